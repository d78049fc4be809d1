"""From an EngineConfig to an open model. An engine's process does this first, before it imports all that runs it."""

from __future__ import annotations

from ..kernels import registry
from .config import EngineConfig, environment
from .device import settle
from .load.convert import settled_dtype
from .load.hub import resolve
from .load.model import Model, open_model
from .load.progress import Progress


def find_model(config: EngineConfig, progress: Progress | None = None) -> Model:
    """The config's model, open. Raises LlmctlError if it cannot be found or read."""
    settings = environment()
    source = resolve(config.model, environment=settings, progress=progress)
    gpu = _architecture(config)
    return open_model(
        source,
        implementation=config.model_impl,
        dtype=settled_dtype(config.dtype, on_gpu=bool(gpu)),
        cache=settings.cache,
        progress=progress,
        rope_scaling=config.rope_scaling,
        gpu=gpu,
    )


def _architecture(config: EngineConfig) -> str:
    """Of the GPU that the config comes to, "" for the CPU."""
    if config.kernels == registry.CUDA:
        return "sm_80"
    info = settle(config)[1]
    if info is None:
        return ""
    from ..kernels.cuda.jit import architecture  # nothing of it is needed on a CPU

    return architecture(*info.capability)
