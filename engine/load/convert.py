"""Weights in another format than they are stored in: one that kernels read, or the float type of `--dtype`.

Some of GGUF's types, and float8 and NF4 on a CPU, have no kernel that reads them as they are. They get the nearest
format that has one, which costs a little exactness: what it costs is said by `roundings`, and `--dtype float32` keeps
every value. A GPU has kernels for float8 and NF4 (`NATIVE`). A CPU multiplies integers of 16 bits twice as fast as
floats, so `auto` makes such ones of float16 and bfloat16 there, and float16 or bfloat16 that are asked for stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ...kernels.cpu.pack import STORED_ONLY, packed_bytes
from ...kernels.errors import UnsupportedModel, UsageError
from ...kernels.formats import BF16, F16, F32, INT16, INT16_TOP, WeightFormat
from ...quant.formats.stored import StoredTensor
from ...quant.tensor import Array, WeightTensor

TARGETS: dict[str, WeightFormat | None] = {"auto": None, "float32": F32, "float16": F16, "bfloat16": BF16}
NATIVE = "native"  # `auto` for a GPU
_GROUP = 32  # of weights whose codes are made anew
_E8M0_BIAS, _E8M0_LEAST, _E8M0_NAN = 127, -126, 255  # below 2 ** -126 float32 has no full precision


def settled_dtype(dtype: str, *, on_gpu: bool) -> str:
    """What `--dtype dtype` comes to where the model runs."""
    return NATIVE if dtype == "auto" and on_gpu else dtype


def target_format(stored: WeightFormat, dtype: str, k: int) -> WeightFormat:
    """The format that a weight of k inputs stored like this gets under `--dtype dtype`."""
    if dtype == NATIVE:
        return stored if stored.kind in STORED_ONLY else _kernel_format(stored)
    if dtype == "auto" and stored in (F16, BF16) and k % INT16.group == 0:
        return INT16
    return TARGETS[dtype] or _kernel_format(stored)


def roundings(tensors: Iterable[StoredTensor], dtype: str) -> tuple[str, ...]:
    """What `--dtype auto` does not keep of these tensors, in a line per storage type; nothing for a type asked for."""
    matrices = (t for t in tensors if len(t.shape) == 2)
    lines = {rounding(t.dtype, t.format, dtype, t.shape[1]) for t in matrices if t.format is not None}
    return tuple(sorted(lines - {""}))


def rounding(name: str, stored: WeightFormat, dtype: str = "auto", k: int = INT16.group) -> str:
    """What is not kept of weights of the storage type `name`, "" if every value is or if a float type was asked for."""
    target = target_format(stored, dtype, k)
    if target.is_float or target == stored:
        return ""
    if target == INT16:
        return f"{name} stored as {target.name}: values rounded to 14 bits of the largest of {target.group}"
    what = "scales rounded to float16" if _same_codes(stored, target) else "values rounded to 8 bits"
    return f"{name} stored as {target.name}: {what}"


def packed_form(stored: StoredTensor, dtype: str) -> tuple[WeightFormat, int]:
    """The format and bytes of a matrix once packed; UnsupportedModel if the kernels have no layout for it."""
    assert stored.format is not None, stored.name
    format = target_format(stored.format, dtype, stored.shape[1])
    try:
        return format, packed_bytes(format, *stored.shape)
    except UsageError as error:
        raise UnsupportedModel(
            f"`{stored.name}` of `{stored.path}`: {error.message}", "use --dtype float32, which unpacks it"
        ) from error


def convert(name: str, weight: WeightTensor, target: WeightFormat) -> WeightTensor:
    """The weight in `target`, rounded to nearest even; UsageError if a value is too large for float16."""
    if weight.format == target:
        return weight
    if target == INT16:
        return _to_int16(weight)
    if not target.is_float:
        return _narrowed(name, weight, target) if _same_codes(weight.format, target) else _to_int8(name, weight, target)
    values = weight.dequantize()
    if target == F32:
        return WeightTensor(F32, values)
    if target == BF16:
        return WeightTensor(BF16, _to_bf16(values))
    assert target == F16, target.name
    return WeightTensor(F16, _to_f16(f"tensor `{name}` holds", values))


def _kernel_format(stored: WeightFormat) -> WeightFormat:
    """What kernels read in place of `stored`: itself wherever they can."""
    if stored.kind in STORED_ONLY:
        return WeightFormat("int8", _GROUP)
    if stored.kind == "int8" and (stored.zero == "min" or (stored.scales == "f32" and stored.group < _GROUP)):
        return WeightFormat("int8", _GROUP)
    return stored if stored.is_float else dataclasses.replace(stored, scales="f16")


def _same_codes(stored: WeightFormat, target: WeightFormat) -> bool:
    return dataclasses.replace(stored, scales="f16") == target


def _narrowed(name: str, weight: WeightTensor, target: WeightFormat) -> WeightTensor:
    """The same codes with scales and minima as float16: a value moves by at most 2**-11 of its two terms.

    Below float16's normal range, 2**-14, a scale moves by up to 2**-25.
    """
    assert weight.scales is not None
    scales = _to_f16(f"tensor `{name}` has scale", weight.scales)
    zeros = None if weight.zeros is None else _to_f16(f"tensor `{name}` has minimum", weight.zeros)
    return WeightTensor(target, weight.data, scales, zeros, weight.order)


def _to_int16(weight: WeightTensor) -> WeightTensor:
    """Codes of at most INT16_TOP and a power of two per group: a float16 that is a quarter of the largest stays exact.

    A group with NaN or infinity gets NaN for its scale, and ones where they were.
    """
    values = weight.dequantize()
    n, k = values.shape
    grouped = values.reshape(n, k // INT16.group, INT16.group)
    peaks = np.abs(grouped).max(2)
    finite = np.isfinite(peaks)
    bits = INT16_TOP.bit_length() - 1
    exponents = np.clip(np.frexp(np.where(finite, peaks, 0))[1] - bits, _E8M0_LEAST, None)
    codes = np.ldexp(grouped, -exponents[:, :, None])
    if not finite.all():
        codes[~finite] = np.where(np.isfinite(codes[~finite]), 0, 1)
    np.rint(codes, out=codes)
    scales = np.where(finite, exponents + _E8M0_BIAS, _E8M0_NAN).astype(np.uint8)
    return WeightTensor(INT16, codes.astype(np.int16).reshape(n, k), scales)


def _to_int8(name: str, weight: WeightTensor, target: WeightFormat) -> WeightTensor:
    """Codes -128..127 and a scale per group, for other codes: float8, NF4, or at most 6 bits in smaller groups.

    Without minima the new step is a whole part of the step of that one of the smaller groups whose values are largest:
    it keeps its values but for the scale's rounding to float16, and the others, whose own steps are smaller, move by at
    most half of the new step. With minima, and for floats, the step is the largest value through 127.
    """
    assert weight.scales is not None and weight.order is None, weight.format
    n, k = weight.data.shape
    groups = k // target.group
    values = weight.dequantize().reshape(n, groups, target.group)
    peaks = np.abs(values).max(2)
    steps = peaks / np.float32(127)
    if weight.format.kind == "int8" and weight.zeros is None:
        parts = np.abs(weight.scales).reshape(n, groups, -1).max(2).astype(np.float32)
        with np.errstate(divide="ignore", invalid="ignore"):
            whole = parts / np.floor(np.float32(128) * parts / peaks)
        steps = np.where(np.isfinite(whole), whole, steps)
    scales = _to_f16(f"tensor `{name}` has scale", steps)
    rounded = scales.astype(np.float32)[:, :, None]
    codes = np.divide(values, rounded, out=np.zeros_like(values), where=rounded != 0)
    np.rint(codes, out=codes)
    np.clip(codes, -128, 127, out=codes)
    return WeightTensor(target, codes.astype(np.int8).reshape(n, k), scales)


def _to_f16(what: str, values: Array) -> npt.NDArray[np.float16]:
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if not np.isfinite(halves).all():
        largest = float(np.abs(values).max())
        raise UsageError(f"{what} {largest:g}, more than float16 can (65504)", "use --dtype bfloat16 or float32")
    return halves


def _to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype(np.uint16)
