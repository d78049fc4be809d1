"""What every format of quantized Linears offers the loader, and what one decoded Linear is.

A format is a frozen record made of a checkpoint's `quantization_config`. Which modules are quantized is told by the
tensors that are there (`parts[0]` exists), not by the config: producers disagree on what they list. The config says
what the bits mean.

Arrays are as the file stores them, bfloat16 as its bits in uint16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ...kernels.errors import CheckpointError
from ...kernels.formats import BF16, F16, F32, WeightFormat
from ..tensor import Array, WeightTensor
from .stored import shape_text

F16Array = npt.NDArray[np.float16]
I32Array = npt.NDArray[np.int32]

SCALES = ("float16", "float32", "uint16")  # what scales are stored in

_FLOATS: dict[np.dtype[np.generic], WeightFormat] = {
    np.dtype(np.float32): F32,
    np.dtype(np.float16): F16,
    np.dtype(np.uint16): BF16,
}


@dataclass(frozen=True, slots=True, eq=False)
class DecodedLinear:
    """One Linear. `bias` [n] is None also where the file stores only zeros, as AutoGPTQ does for layers without one."""

    weight: WeightTensor
    bias: WeightTensor | None = None


class LinearLayout(NamedTuple):
    """What a WeightTensor is besides its values; its shape where those of the tensors do not tell it."""

    format: WeightFormat
    order: I32Array | None = None
    shape: tuple[int, int] | None = None


class LinearFormat(Protocol):
    """How a checkpoint stores its quantized Linears."""

    @property
    def name(self) -> str:
        """For messages: `AWQ gemm, 4 bits`."""
        ...

    @property
    def parts(self) -> tuple[str, ...]:
        """What follows a module's name in those of its tensors; the first one marks a module as quantized."""
        ...

    def covers(self, module: str) -> bool:
        """Whether the config says that this module is quantized."""
        ...

    def shape(self, module: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        """(n, k) from the shapes of the module's tensors, before anything is read."""
        ...

    def layout(self, module: str, tensors: Mapping[str, Array]) -> LinearLayout:
        """Of the weight that `decode` will give, from shapes, zero points and group indices alone."""
        ...

    def decode(self, module: str, tensors: Mapping[str, Array]) -> DecodedLinear:
        """The module's weight, exactly as its producer means it; CheckpointError if the tensors do not fit together."""
        ...


def part(module: str, tensors: Mapping[str, Array], name: str, dtypes: tuple[str, ...], ndim: int = 2) -> Array:
    """The module's tensor of this name, present and of one of these numpy dtypes."""
    array = tensors.get(name)
    if array is None:
        raise CheckpointError(f"`{module}` has no tensor `{name}`", "the file is incomplete: fetch the model again")
    if array.dtype.name not in dtypes or array.ndim != ndim:
        raise CheckpointError(
            f"`{module}.{name}` is {array.dtype.name} {shape_text(array.shape)}, expected {ndim} dimensions of "
            f"{' or '.join(dtypes)}"
        )
    return array


def check_shape(module: str, name: str, array: Array, shape: tuple[int, ...]) -> None:
    """Raise CheckpointError unless the tensor has this shape."""
    if array.shape != shape:
        raise CheckpointError(
            f"`{module}.{name}` has shape {shape_text(array.shape)}, expected {shape_text(shape)}",
            "the quantization config belongs to another checkpoint, or the file is broken",
        )


def read_scales(module: str, tensors: Mapping[str, Array], name: str) -> F16Array:
    """The scales as float16; CheckpointError where float16 cannot hold what the file stores.

    A scale below float16's normal range is rounded to the nearest one: it moves no weight by more than 15 * 2**-25.
    """
    stored = part(module, tensors, name, SCALES)
    if stored.dtype == np.float16:
        scales: F16Array = stored.astype(np.float16, copy=False)
    else:
        exact = (stored.astype(np.uint32) << 16).view(np.float32) if stored.dtype == np.uint16 else stored
        with np.errstate(over="ignore"):
            scales = exact.astype(np.float16)
        lost = (scales.astype(np.float32) != exact) & (np.abs(exact) >= np.finfo(np.float16).smallest_normal)
        if lost.any() and np.isfinite(exact).all():
            raise CheckpointError(
                f"`{module}.{name}` holds {int(lost.sum())} scales that float16 cannot hold, such as "
                f"{float(exact[lost][0])!r}",
                "quantize the model with float16 scales",
            )
    if not np.isfinite(scales).all():
        raise CheckpointError(
            f"`{module}.{name}` holds NaN or infinity",
            "the producer divided by zero or overflowed: quantize the model again",
        )
    return scales


def read_bias(module: str, tensors: Mapping[str, Array], n: int) -> WeightTensor | None:
    """The bias [n], None if there is none or it is all zeros."""
    if "bias" not in tensors:
        return None
    bias = part(module, tensors, "bias", ("float16", "float32", "uint16"), ndim=1)
    check_shape(module, "bias", bias, (n,))
    return WeightTensor(_FLOATS[bias.dtype], bias) if bias.any() else None
