"""Which device runs the engine, and what that decides about options that were left open."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from ..kernels.cuda import devices
from ..kernels.cuda.driver import DeviceInfo
from ..kernels.errors import LlmctlError, UnsupportedModel, UsageError
from .config import EngineConfig, environment

if TYPE_CHECKING:
    from ..kernels.cuda.gpu import Gpu

log = logging.getLogger(__name__)

GPU_SHARE = 0.9  # of a GPU's free memory, if nothing else is said: it is seldom anybody else's
_KV_TYPES = ("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8")


def settle(config: EngineConfig, implementation: str = "llmctl") -> tuple[EngineConfig, DeviceInfo | None]:
    """The config with `device` cpu or cuda:N and what follows from that, and the GPU if there is one in it.

    Raises UsageError, NoKernel or UnsupportedModel for a GPU that is asked for and cannot be had, or not with this.
    """
    info = _choose(config, implementation)
    if info is None:
        _check_cpu(config)
        return msgspec.structs.replace(config, device="cpu"), None
    if implementation != "llmctl":
        raise UnsupportedModel(
            f"--device is `{config.device}`, and transformers' modules, which compute this model, run on the CPU here",
            "use `--device cpu`",
        )
    _check_gpu(config)
    sized = config.num_gpu_blocks_override or config.kv_cache_memory_bytes or config.gpu_memory_utilization
    share = config.gpu_memory_utilization if sized else GPU_SHARE
    return msgspec.structs.replace(config, device=f"cuda:{info.index}", gpu_memory_utilization=share), info


def open_device(config_device: str, *, deterministic: bool, jit: bool) -> Gpu:
    """The GPU that a settled `device` names, ready to be used by this thread."""
    info = devices.find_gpu(_index(config_device))
    return devices.open_machine(info, environment().cache / "cubins", deterministic=deterministic, compile=jit)


def _choose(config: EngineConfig, implementation: str) -> DeviceInfo | None:
    if config.device == "cpu":
        return None
    if config.on_gpu:
        return devices.find_gpu(_index(config.device))
    if implementation != "llmctl" or config.kernels != "auto":
        return None
    try:
        found = devices.gpus()
    except LlmctlError as error:
        log.debug("no GPU: %s", error.message)
        return None
    for info in found:
        if not (why := devices.why_unusable(info)):
            log.info("running on %s (cuda:%d)", info.name, info.index)
            return info
        log.warning("%s (cuda:%d) is not used: %s", info.name, info.index, why)
    return None


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _check_cpu(config: EngineConfig) -> None:
    if config.enforce_eager and config.device == "cpu":
        raise UsageError("--enforce-eager has no meaning with `--device cpu`, which captures no graphs", "leave it out")


def _check_gpu(config: EngineConfig) -> None:
    """Raise UsageError for options that a GPU does not do."""
    if config.kernels != "auto":
        raise UsageError(
            f"--kernels is `{config.kernels}`, which are kernels for CPUs", "leave it out, or use `--device cpu`"
        )
    if config.kv_cache_dtype not in _KV_TYPES:
        raise UsageError(
            f"--kv-cache-dtype is `{config.kv_cache_dtype}`, which GPUs have no kernels for",
            f"choose one of: {', '.join(_KV_TYPES)}; or use `--device cpu`",
        )
    if config.block_size not in (16, 32, 64):
        raise UsageError(f"--block-size is {config.block_size}, GPUs have kernels for 16, 32 and 64", "use 32")
    if config.cache_audit and not config.deterministic:
        raise UsageError(
            "--cache-audit compares bits, which on a GPU depend on a request's company", "add `--deterministic`"
        )
