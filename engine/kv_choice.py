"""How K and V are stored: what was asked, and what is chosen where nothing was."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..kernels.errors import UsageError
from ..kernels.formats import KVFormat
from .config import EngineConfig
from .gpu_types import activation_type
from .kv_groups import kv_layer_bytes
from .models.arch import DecoderSpec

SLIDING_WINDOW = "sliding_window"  # what vLLM calls the layers with a window

# `kv_cache_dtype` to the kind of KVFormat, where the two differ.
_KINDS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "fp8": "fp8_e4m3"}


def choose_kv_format(config: EngineConfig, weight_formats: Sequence[str], latent: bool = False) -> KVFormat:
    """How K and V are stored: as asked, else float32 if all weights are, else int16; on a GPU as activations are.

    Latents, which are no heads, are by default float32 or bfloat16 if all weights are, else float16.

    int16 is about as exact as float16, takes 2 bytes more per token and head, and attention over a long prompt is
    nearly twice as fast with it. `weight_formats` are names of WeightFormats as loaded, with `config.dtype` already
    applied.
    """
    if config.kv_cache_dtype != "auto":
        return KVFormat(_KINDS.get(config.kv_cache_dtype, config.kv_cache_dtype))
    if config.on_gpu:
        return KVFormat(activation_type(weight_formats))
    only = set(weight_formats)
    if latent:
        return KVFormat(only.pop() if only in ({"f32"}, {"bf16"}) else "f16")
    return KVFormat("f32" if only == {"f32"} else "int16")


def kv_format_of_layers(spec: DecoderSpec, config: EngineConfig, weight_formats: Sequence[str]) -> tuple[KVFormat, ...]:
    """How each layer's K and V are stored; UsageError for skipped layers that the model does not have."""
    latent = spec.latent is not None
    asked = choose_kv_format(config, weight_formats, latent)
    skipped, numbers = set[int](), {str(layer) for layer in range(spec.num_layers)}
    for name in config.kv_cache_dtype_skip_layers:
        windows = [layer for layer in range(spec.num_layers) if spec.window(layer)]
        if name == SLIDING_WINDOW and windows:
            skipped.update(windows)
        elif name in numbers:
            skipped.add(int(name))
        else:
            raise UsageError(
                f"--kv-cache-dtype-skip-layers names `{name if len(name) <= 40 else name[:40] + '...'}`",
                f"this model's layers are 0 to {spec.num_layers - 1}"
                + (f", and `{SLIDING_WINDOW}` stands for {len(windows)} of them" if windows else ", none has a window"),
            )
    whole = choose_kv_format(msgspec.structs.replace(config, kv_cache_dtype="auto"), weight_formats, latent)
    if skipped and whole == asked:
        raise UsageError(
            f"--kv-cache-dtype-skip-layers has no effect: all layers are stored in {whole.kind} in any case",
            "leave it out, or ask for another format with `--kv-cache-dtype`",
        )
    return tuple(whole if layer in skipped else asked for layer in range(spec.num_layers))


def kv_bytes_per_token(spec: DecoderSpec, *formats: KVFormat) -> int:
    """Bytes of K and V of one token in all layers, scales included: of one format, or one for each layer."""
    each = formats * spec.num_layers if len(formats) == 1 else formats
    return sum(kv_layer_bytes(spec, kv) for kv in each)


def check_latents(spec: DecoderSpec, formats: Sequence[KVFormat], config: EngineConfig, whose: str) -> None:
    """Raise UsageError for latents in a format that they cannot have."""
    if spec.latent is not None and any(each.bytes_per_value == 1 or each.scale_bytes for each in formats):
        raise UsageError(
            f"--kv-cache-dtype is {config.kv_cache_dtype}, the latents of {whose} are floats of 16 bits or more",
            "use `--kv-cache-dtype float16`",
        )
