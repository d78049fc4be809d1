"""In what type a GPU computes, and what weights take there. Needs no kernels: engines on a CPU ask as well."""

from __future__ import annotations

from collections.abc import Sequence

from ..kernels.formats import FLOAT_BYTES
from .models.arch import DecoderSpec

FLOATS = ("f32", "f16", "bf16")


def activation_type(weight_formats: Sequence[str]) -> str:
    """f32, f16 or bf16: the type of the weights that are floats, bf16 if none is, f32 if they are of several."""
    floats = {name for name in weight_formats if name in FLOATS}
    if len(floats) > 1:
        return "f32"
    return floats.pop() if floats else "bf16"


def gpu_weight_bytes(spec: DecoderSpec, weight_bytes: int, weight_formats: Sequence[str]) -> int:
    """Bytes of the weights: as packed, and the embedding as rows of values, which may be the head's weight too."""
    return weight_bytes + spec.vocab_size * spec.hidden_size * FLOAT_BYTES[activation_type(weight_formats)]
