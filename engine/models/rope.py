"""Rotary embedding tables.

The arithmetic is that of transformers: inverse frequencies and angles are rounded to float32 at the same places,
because far from the start that rounding moves an angle by more than any other error in the model. Powers, cosines and
sines are taken in float64 and rounded once, so that the tables do not depend on which vector math library numpy found.

Two kinds depend on how long sequences may become, dynamic (NTK) and longrope. transformers looks at each forward pass
and rotates later keys otherwise than those it has cached. Here the longest sequence that the engine admits decides,
once: every key is rotated alike, and what transformers computes for a sequence of that length is what comes out.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np
import numpy.typing as npt

from .arch import RopeSpec

F32 = npt.NDArray[np.float32]

_AT_ONCE = 512  # positions


def rope_tables(rope: RopeSpec, head_dim: int, max_positions: int) -> tuple[F32, F32]:
    """(cos, sin), each float32 [max_positions, head_dim / 2], for positions 0 .. max_positions - 1.

    A few positions at a time: what is float64 meanwhile stays in the CPU's cache, in memory that is there already.
    """
    positions = np.arange(max_positions, dtype=np.float32)[:, None]
    rope = settled(rope, head_dim, max_positions)
    frequencies, scale = inverse_frequencies(rope, head_dim)[None, :], np.float32(rope.attention_factor)
    cos, sin = (np.empty((max_positions, head_dim // 2), np.float32) for _ in range(2))
    for start in range(0, max_positions, _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        angles = (positions[part] * frequencies).astype(np.float64)
        np.multiply(np.cos(angles).astype(np.float32), scale, out=cos[part])
        np.multiply(np.sin(angles).astype(np.float32), scale, out=sin[part])
    return cos, sin


def settled(rope: RopeSpec, head_dim: int, max_positions: int) -> RopeSpec:
    """The rope for sequences of at most `max_positions`, which no longer depends on their length."""
    if rope.kind == "dynamic":
        length = max(max_positions, rope.original_context)
        stretch = rope.factor * length / rope.original_context - (rope.factor - 1)
        return RopeSpec(theta=rope.theta * stretch ** (head_dim / (head_dim - 2)))
    if rope.kind == "longrope" and rope.long_factors:
        factors = rope.long_factors if max_positions > rope.original_context else rope.factors
        return msgspec.structs.replace(rope, factors=factors, long_factors=())
    return rope


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> F32:
    """Radians per position of each pair of dimensions, float32 [head_dim / 2]; `rope` is settled."""
    exponents = (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)).astype(np.float32)
    powers: F32 = np.power(np.float64(rope.theta), exponents.astype(np.float64), dtype=np.float64).astype(np.float32)
    return _SCALED[rope.kind](rope, powers)


def _default(rope: RopeSpec, powers: F32) -> F32:
    return np.float32(1) / powers


def _linear(rope: RopeSpec, powers: F32) -> F32:
    return np.float32(1) / powers / np.float32(rope.factor)


def _factors(rope: RopeSpec, powers: F32) -> F32:
    factors: F32 = np.array(rope.factors, np.float32)
    return np.float32(1) / powers / factors


def _longrope(rope: RopeSpec, powers: F32) -> F32:
    """Ding et al.: LongRoPE, 2024."""
    factors: F32 = np.array(rope.factors, np.float32)
    return np.float32(1) / (factors * powers)


def _llama3(rope: RopeSpec, powers: F32) -> F32:
    """Long wavelengths are stretched by `factor`, short ones kept, with a linear passage between (Llama 3.1).

    Divisions of a number by an array multiply with the reciprocal, as torch does it.
    """
    plain = np.float32(1) / powers
    low, high, factor = (np.float32(x) for x in (rope.low_freq_factor, rope.high_freq_factor, rope.factor))
    context = np.float32(rope.original_context)
    wavelength = np.float32(2 * np.pi) * (np.float32(1) / plain)
    stretched = plain / factor
    smooth = (context * (np.float32(1) / wavelength) - low) / (high - low)
    between = (np.float32(1) - smooth) * plain / factor + smooth * plain
    long = wavelength > np.float32(rope.original_context / rope.low_freq_factor)
    short = wavelength < np.float32(rope.original_context / rope.high_freq_factor)
    return np.where(long, stretched, np.where(short, plain, between)).astype(np.float32)


def _yarn(rope: RopeSpec, powers: F32) -> F32:
    """Peng et al.: YaRN, 2023. Dimensions that turn often are kept, those that hardly do are stretched by `factor`."""
    half = len(powers)

    def dimension(turns: float) -> float:
        """The pair of dimensions that turns so often within the original context."""
        return half * math.log(rope.original_context / (turns * 2 * math.pi)) / math.log(rope.theta)

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(half, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    stretched = np.float32(1) / (np.float32(rope.factor) * powers)
    scaled: F32 = stretched * (np.float32(1) - kept) + np.float32(1) / powers * kept
    return scaled


_SCALED = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "factors": _factors,
}
