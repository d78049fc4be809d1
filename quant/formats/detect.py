"""Which format a checkpoint folder's Linears are stored in.

The config is looked for where one tool after another has put it; the tool that wrote it is named by the config itself
or, in the oldest files, by the file's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...kernels.errors import UnsupportedModel
from . import awq, bitsandbytes, compressed_tensors, fp8, gptq
from .fields import Config, read_object, read_text
from .linear import LinearFormat

_PLACES = (("quantize_config.json", "gptq"), ("quant_config.json", "awq"), ("hf_quant_config.json", "modelopt"))
CONFIG_FILES = tuple(name for name, _ in _PLACES)  # that may say how a checkpoint is quantized, besides config.json
_DETECTORS: tuple[Callable[[Config], LinearFormat | None], ...] = (
    awq.detect,
    gptq.detect,
    fp8.detect,  # before the rest of compressed-tensors
    compressed_tensors.detect,
    bitsandbytes.detect,
)


@dataclass(frozen=True, slots=True)
class Found:
    """A quantization config, and the file of the folder that it stands in."""

    file: str
    config: Config


def find_config(config: Config, read_json: Callable[[str], Config | None]) -> Found | None:
    """The quantization config of a checkpoint, None if it is not quantized.

    config     the content of config.json
    read_json  the content of another JSON file in the folder, None if there is no such file
    """
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            return Found("config.json", read_object(config, key))
    for name, method in _PLACES:
        found = read_json(name)
        if found is not None:
            named = found if "quant_method" in found else {**found, "quant_method": found.get("method", method)}
            return Found(name, named)
    return None


def detect_format(quantization: Config) -> LinearFormat:
    """The format that a quantization config describes; UnsupportedModel if it cannot be read here."""
    for detect in _DETECTORS:
        found = detect(quantization)
        if found is not None:
            return found
    method = read_text(quantization, "quant_method", default="")
    raise UnsupportedModel(
        f"the model is quantized with `{method or 'an unnamed method'}`",
        "supported: AWQ, GPTQ, FP8, compressed-tensors with integer or float8 weights, bitsandbytes NF4, GGUF files",
    )
