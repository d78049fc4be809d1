"""Weights in another float format than they are stored in, for `--dtype`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...kernels.cpu.pack import packed_bytes
from ...kernels.errors import UnsupportedModel, UsageError
from ...kernels.formats import BF16, F16, F32, WeightFormat
from ...quant.formats.stored import StoredTensor
from ...quant.tensor import WeightTensor

TARGETS: dict[str, WeightFormat | None] = {"auto": None, "float32": F32, "float16": F16, "bfloat16": BF16}


def target_format(stored: WeightFormat, dtype: str) -> WeightFormat:
    """The format that a weight stored like this gets under `--dtype dtype`."""
    return TARGETS[dtype] or stored


def packed_form(stored: StoredTensor, dtype: str) -> tuple[WeightFormat, int]:
    """The format and bytes of a matrix once packed; UnsupportedModel if the kernels have no layout for it."""
    assert stored.format is not None, stored.name
    format = target_format(stored.format, dtype)
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
    values = weight.dequantize()
    if target == F32:
        return WeightTensor(F32, values)
    if target == BF16:
        return WeightTensor(BF16, _to_bf16(values))
    assert target == F16, target.name
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16)
    if not np.isfinite(halves).all():
        largest = float(np.abs(values).max())
        raise UsageError(
            f"tensor `{name}` holds {largest:g}, more than float16 can (65504)", "use --dtype bfloat16 or float32"
        )
    return WeightTensor(F16, halves)


def _to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    return (rounded >> np.uint32(16)).astype(np.uint16)
