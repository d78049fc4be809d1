"""Rotary embedding tables.

The arithmetic is that of transformers: inverse frequencies and angles are rounded to float32 at the same places,
because far from the start that rounding moves an angle by more than any other error in the model. Powers, cosines and
sines are taken in float64 and rounded once, so that the tables do not depend on which vector math library numpy found.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .arch import RopeSpec

F32 = npt.NDArray[np.float32]


def rope_tables(rope: RopeSpec, head_dim: int, max_positions: int) -> tuple[F32, F32]:
    """(cos, sin), each float32 [max_positions, head_dim / 2], for positions 0 .. max_positions - 1."""
    positions = np.arange(max_positions, dtype=np.float32)
    angles = (positions[:, None] * inverse_frequencies(rope, head_dim)[None, :]).astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> F32:
    """Radians per position of each pair of dimensions, float32 [head_dim / 2]."""
    exponents = (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)).astype(np.float32)
    powers: F32 = np.power(np.float64(rope.theta), exponents.astype(np.float64), dtype=np.float64).astype(np.float32)
    plain = np.float32(1) / powers
    return _SCALED[rope.kind](rope, plain)


def _default(rope: RopeSpec, plain: F32) -> F32:
    return plain


def _linear(rope: RopeSpec, plain: F32) -> F32:
    return plain / np.float32(rope.factor)


def _factors(rope: RopeSpec, plain: F32) -> F32:
    factors: F32 = np.array(rope.factors, np.float32)
    return plain / factors


def _llama3(rope: RopeSpec, plain: F32) -> F32:
    """Long wavelengths are stretched by `factor`, short ones kept, with a linear passage between (Llama 3.1).

    Divisions of a number by an array multiply with the reciprocal, as torch does it.
    """
    low, high, factor = (np.float32(x) for x in (rope.low_freq_factor, rope.high_freq_factor, rope.factor))
    context = np.float32(rope.original_context)
    wavelength = np.float32(2 * np.pi) * (np.float32(1) / plain)
    stretched = plain / factor
    smooth = (context * (np.float32(1) / wavelength) - low) / (high - low)
    between = (np.float32(1) - smooth) * plain / factor + smooth * plain
    long = wavelength > np.float32(rope.original_context / rope.low_freq_factor)
    short = wavelength < np.float32(rope.original_context / rope.high_freq_factor)
    return np.where(long, stretched, np.where(short, plain, between)).astype(np.float32)


_SCALED = {"default": _default, "linear": _linear, "llama3": _llama3, "factors": _factors}
