"""What the blocks of GGUF's quantized types hold, taken apart into codes and scales without changing a value.

A type's `format` describes its weights exactly. Types whose scales are float16 numbers are what kernels read. The scale
of a K-quant group is the product of a float16 of its block and a small integer of its own, which float16 cannot hold:
it is given as float32, which can. Two types come out exact in another way, because a value is a float16 times an
integer of at most 8 bits: IQ4_NL through its table, Q3_K as code times integer scale.

What the loader makes of formats that no kernel reads is in `engine/load/convert.py`.
Source of the layouts: `ggml-common.h` and `ggml-quants.c` of the ggml project.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...kernels.formats import BF16, F16, F32, WeightFormat
from ..tensor import Array, WeightTensor

U8Array = npt.NDArray[np.uint8]
F32Array = npt.NDArray[np.float32]

BLOCK = 32
SUPER = 256  # elements in a block of a K-quant
_CHUNK_ELEMENTS = 1 << 20


class Parts(NamedTuple):
    """Of m blocks: codes [m, block], scales and minima [m, block / group]."""

    codes: Array
    scales: Array
    minima: Array | None = None


class BlockType(NamedTuple):
    """A storage type: `size` bytes hold `block` elements. Without a format it is known but cannot be read."""

    name: str
    block: int
    size: int
    format: WeightFormat | None = None
    take_apart: Callable[[U8Array], Parts] | None = None  # of blocks [m, size]; None for the float types


def read_blocks(kind: BlockType, raw: U8Array, shape: tuple[int, ...]) -> WeightTensor:
    """The weight of this shape in `raw`, a bounded number of blocks at a time."""
    assert kind.format is not None and kind.take_apart is not None, kind.name
    blocks = raw.reshape(-1, kind.size)
    count, groups = len(blocks), kind.block // kind.format.group
    per_group = np.dtype(np.float16 if kind.format.scales == "f16" else np.float32)
    codes: Array = np.empty((count, kind.block), np.uint8 if kind.format.kind == "int4" else np.int8)
    scales = np.empty((count, groups), per_group)
    minima = np.empty((count, groups), per_group) if kind.format.zero == "min" else None
    step = _CHUNK_ELEMENTS // kind.block
    for start in range(0, count, step):
        some = slice(start, start + step)
        with np.errstate(invalid="ignore"):  # whoever loads a weight looks for NaN and infinity in it
            parts = kind.take_apart(blocks[some])
        codes[some], scales[some] = parts.codes, parts.scales
        if minima is not None:
            assert parts.minima is not None, kind.name
            minima[some] = parts.minima
    assert math.prod(shape) == codes.size, (shape, codes.size)
    rows = (*shape[:-1], -1)
    return WeightTensor(
        kind.format, codes.reshape(shape), scales.reshape(rows), None if minima is None else minima.reshape(rows)
    )


def _q4_0(blocks: U8Array) -> Parts:
    return Parts(_nibbles(blocks[:, 2:], 16), _halves(blocks[:, :2]))


def _q4_1(blocks: U8Array) -> Parts:
    return Parts(_nibbles(blocks[:, 4:], 16), _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _q5_0(blocks: U8Array) -> Parts:
    return Parts(_five_bits(blocks[:, 2:6], blocks[:, 6:]) - np.int8(16), _halves(blocks[:, :2]))


def _q5_1(blocks: U8Array) -> Parts:
    return Parts(_five_bits(blocks[:, 4:8], blocks[:, 8:]), _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _q8_0(blocks: U8Array) -> Parts:
    return Parts(blocks[:, 2:].view(np.int8), _halves(blocks[:, :2]))


def _iq4_nl(blocks: U8Array) -> Parts:
    return Parts(_IQ4_VALUES[_nibbles(blocks[:, 2:], 16)], _halves(blocks[:, :2]))


def _iq4_xs(blocks: U8Array) -> Parts:
    """d, 2 high bits of 8 scales, 4 low bits of them, nibbles as in IQ4_NL."""
    high = _bits(np.ascontiguousarray(blocks[:, 2:4]), (0, 2, 4, 6), 3)
    low = _bits(blocks[:, 4:8], (0, 4), 15)
    scales = (low | high << 4).astype(np.int16) - np.int16(32)
    return Parts(_IQ4_VALUES[_nibbles(blocks[:, 8:], 16)], _floats(blocks[:, :2]) * scales)


def _q2_k(blocks: U8Array) -> Parts:
    """16 bytes of scale (low) and minimum (high nibble), 64 of codes, d, dmin."""
    d, dmin = _floats(blocks[:, 80:82]), _floats(blocks[:, 82:84])
    pairs = blocks[:, :16]
    return Parts(_runs(blocks[:, 16:80], (0, 2, 4, 6), 3), d * (pairs & 15), -(dmin * (pairs >> 4)))


def _q3_k(blocks: U8Array) -> Parts:
    """32 bytes with the third bit of the codes, 64 with the others, 12 of 6-bit scales per 16, d.

    A value is d times (code - 4) times (scale - 32), an integer from -124 to 128. With both signs changed that is int8.
    """
    low = _bits(blocks[:, 96:104], (0, 4), 15, interleave=False)
    high = _bits(blocks[:, 104:108], (0, 2, 4, 6), 3, interleave=False)
    scales = (low | high << 4).astype(np.int16) - np.int16(32)
    third = _bits(blocks[:, :32], tuple(range(8)), 1, interleave=False)
    codes = (_runs(blocks[:, 32:96], (0, 2, 4, 6), 3) | third << 2).astype(np.int16) - np.int16(4)
    products = codes.reshape(-1, 16, 16) * scales[:, :, None]
    return Parts((-products).astype(np.int8).reshape(-1, SUPER), np.repeat(-_halves(blocks[:, 108:110]), 2, axis=1))


def _q4_k(blocks: U8Array) -> Parts:
    scales, minima = _six_bit_pairs(blocks)
    return Parts(_nibbles(blocks[:, 16:], 32), scales, minima)


def _q5_k(blocks: U8Array) -> Parts:
    """As Q4_K, with 32 bytes in front of the nibbles whose bit i belongs to the i-th group."""
    scales, minima = _six_bit_pairs(blocks)
    fifth = _bits(blocks[:, 16:48], tuple(range(8)), 1, interleave=False)
    return Parts(_nibbles(blocks[:, 48:], 32) | fifth << 4, scales, minima)


def _q6_k(blocks: U8Array) -> Parts:
    """128 bytes of low nibbles, 64 of high pairs of bits, 16 int8 scales, d."""
    low, high = _nibbles(blocks[:, :128], 64), _runs(blocks[:, 128:192], (0, 2, 4, 6), 3)
    codes = (low | high << 4).view(np.int8) - np.int8(32)
    return Parts(codes, _floats(blocks[:, 208:210]) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8))


def _six_bit_pairs(blocks: U8Array) -> tuple[F32Array, F32Array]:
    """Scales and minima of 8 groups: d, dmin, then 12 bytes.

    Bytes 0-3 hold the first four scales in their low 6 bits and bytes 4-7 the first four minima; the other four have
    their low halves in the nibbles of bytes 8-11 and their high 2 bits on top of the former.
    """
    d, dmin = _floats(blocks[:, :2]), _floats(blocks[:, 2:4])
    first, second, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 63, low & 15 | first >> 2 & 48), axis=1)
    minima = np.concatenate((second & 63, low >> 4 | second >> 2 & 48), axis=1)
    return d * scales, -(dmin * minima)


def _nibbles(raw: U8Array, run: int) -> U8Array:
    """Of every `run` bytes: first all low nibbles, then all high ones."""
    return _runs(raw, (0, 4), 15, run)


def _runs(raw: U8Array, shifts: tuple[int, ...], mask: int, run: int = 32) -> U8Array:
    """Of every `run` bytes: the bits under `mask` after the first shift, then after the second and so on."""
    parts = raw.reshape(len(raw), -1, 1, run) >> np.array(shifts, np.uint8)[:, None]
    parts &= np.uint8(mask)
    return parts.reshape(len(raw), -1)


def _bits(raw: U8Array, shifts: tuple[int, ...], mask: int, interleave: bool = True) -> U8Array:
    """The fields of each byte side by side, or else the first fields of all bytes, then the second ones and so on."""
    if interleave:
        return (raw[:, :, None] >> np.array(shifts, np.uint8) & np.uint8(mask)).reshape(len(raw), -1)
    return _runs(raw, shifts, mask, raw.shape[1])


def _five_bits(fifth: U8Array, raw: U8Array) -> npt.NDArray[np.int8]:
    """Nibbles with a bit of a 32-bit mask on top of each."""
    return (_nibbles(raw, 16) | _bits(fifth, tuple(range(8)), 1) << 4).view(np.int8)


def _halves(raw: U8Array) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(raw).view(np.float16)


def _floats(raw: U8Array) -> F32Array:
    return _halves(raw).astype(np.float32)


_IQ4_VALUES = np.array((-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8)

TYPES = {
    0: BlockType("F32", 1, 4, F32),
    1: BlockType("F16", 1, 2, F16),
    2: BlockType("Q4_0", BLOCK, 18, WeightFormat("int4", 32), _q4_0),
    3: BlockType("Q4_1", BLOCK, 20, WeightFormat("int4", 32, "min"), _q4_1),
    6: BlockType("Q5_0", BLOCK, 22, WeightFormat("int8", 32), _q5_0),
    7: BlockType("Q5_1", BLOCK, 24, WeightFormat("int8", 32, "min"), _q5_1),
    8: BlockType("Q8_0", BLOCK, 34, WeightFormat("int8", 32), _q8_0),
    9: BlockType("Q8_1", BLOCK, 36),
    10: BlockType("Q2_K", SUPER, 84, WeightFormat("int8", 16, "min", "f32"), _q2_k),
    11: BlockType("Q3_K", SUPER, 110, WeightFormat("int8", 128), _q3_k),
    12: BlockType("Q4_K", SUPER, 144, WeightFormat("int4", 32, "min", "f32"), _q4_k),
    13: BlockType("Q5_K", SUPER, 176, WeightFormat("int8", 32, "min", "f32"), _q5_k),
    14: BlockType("Q6_K", SUPER, 210, WeightFormat("int8", 16, scales="f32"), _q6_k),
    15: BlockType("Q8_K", SUPER, 292),
    16: BlockType("IQ2_XXS", SUPER, 66),
    17: BlockType("IQ2_XS", SUPER, 74),
    18: BlockType("IQ3_XXS", SUPER, 98),
    19: BlockType("IQ1_S", SUPER, 50),
    20: BlockType("IQ4_NL", BLOCK, 18, WeightFormat("int8", 32), _iq4_nl),
    21: BlockType("IQ3_S", SUPER, 110),
    22: BlockType("IQ2_S", SUPER, 82),
    23: BlockType("IQ4_XS", SUPER, 136, WeightFormat("int8", 32, scales="f32"), _iq4_xs),
    24: BlockType("I8", 1, 1),
    25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4),
    27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", SUPER, 56),
    30: BlockType("BF16", 1, 2, BF16),
    34: BlockType("TQ1_0", SUPER, 54),
    35: BlockType("TQ2_0", SUPER, 66),
    39: BlockType("MXFP4", BLOCK, 17),
}
SUPPORTED = ", ".join(kind.name for kind in TYPES.values() if kind.format is not None)
