"""Codes of 4 or 8 bits in 32-bit words, lowest bits first: how AWQ, GPTQ and compressed-tensors pack integers.

A little-endian word seen as bytes is already in order, so that unpacking is a view and one split of nibbles. Only the
last axis is packed here; a format that packs along the first one transposes words, an eighth of the work of codes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U8Array = npt.NDArray[np.uint8]
Words = npt.NDArray[np.int32]


def unpack_words(words: npt.NDArray[np.generic], bits: int) -> U8Array:
    """uint8 codes [..., w * 32 / bits] of int32 words [..., w]; bits is 4 or 8."""
    raw: U8Array = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits == 8:
        return raw
    assert bits == 4, bits
    codes = np.empty((*raw.shape[:-1], raw.shape[-1] * 2), np.uint8)
    codes[..., 0::2] = raw & 15
    codes[..., 1::2] = raw >> 4
    return codes


def pack_words(codes: npt.NDArray[np.generic], bits: int) -> Words:
    """int32 words [..., ceil(c * bits / 32)] of uint8 codes [..., c]; missing codes of the last word are 0."""
    per_word = 32 // bits
    rest = -codes.shape[-1] % per_word
    padded = np.zeros((*codes.shape[:-1], codes.shape[-1] + rest), np.uint8)
    padded[..., : codes.shape[-1]] = codes
    if bits == 4:
        assert padded.size == 0 or padded.max() < 16
        padded = padded[..., 0::2] | padded[..., 1::2] << 4
    words: Words = padded.view("<i4").astype(np.int32, copy=False)
    return words


def codes_to_int8(codes: npt.NDArray[np.generic]) -> npt.NDArray[np.int8]:
    """Codes 0..255 around 128 as signed integers."""
    return (codes.astype(np.uint8, copy=False) ^ np.uint8(128)).view(np.int8)


def int8_to_codes(values: npt.NDArray[np.generic]) -> U8Array:
    """Signed integers as codes 0..255 around 128."""
    return np.ascontiguousarray(values, np.int8).view(np.uint8) ^ np.uint8(128)
