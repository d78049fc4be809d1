"""`WeightTensor`: one weight as its checkpoint means it, in numpy, before any kernel's layout."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..kernels.cpu.pack import e8m0_values
from ..kernels.formats import NF4_VALUES, WeightFormat

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """A weight of shape [n, k] (n outputs, k inputs), or [n] for a norm or a bias.

    data    float kinds: float32 | float16 | uint16 (the bits of bfloat16), of the weight's shape;
            int16: int16 [n, k];  int8: int8 [n, k];  int4, nf4: uint8 [n, k], one code 0..15 per element;
            fp8_e4m3: its bits in uint8
    scales  float16 or float32 as the format says, of int16 exponents in uint8, [n, k / group]; None for the float kinds
    zeros   "min": like scales;  "int": uint8 [n, k / group];  else None
    order   int32 [k]: column j multiplies input order[j], so that the inputs of a group are side by side although the
            checkpoint scattered them (GPTQ with desc_act); None if column j multiplies input j
    """

    format: WeightFormat
    data: Array
    scales: Array | None = None
    zeros: Array | None = None
    order: npt.NDArray[np.int32] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def dequantize(self) -> npt.NDArray[np.float32]:
        """The values as float32, in order of inputs: exactly `scale * code` (+ min) as float32 arithmetic gives it."""
        values = self._dequantize()
        if self.order is None:
            return values
        plain = np.empty_like(values)
        plain[:, self.order] = values
        return plain

    def select_rows(self, rows: npt.NDArray[np.int64] | slice) -> WeightTensor:
        """Some of the outputs, or all in another order; exact in every format. A slice makes views."""
        return WeightTensor(
            self.format,
            self.data[rows],
            None if self.scales is None else self.scales[rows],
            None if self.zeros is None else self.zeros[rows],
            self.order,
        )

    def _dequantize(self) -> npt.NDArray[np.float32]:
        if self.format.kind == "bf16":
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        if self.format.is_float:
            return self.data.astype(np.float32)
        assert self.scales is not None
        n, k = self.data.shape
        codes = _meaning(self.format, self.data).reshape(n, k // self.format.group, self.format.group)
        if self.format.scales == "e8m0":
            scales = e8m0_values(self.scales)[:, :, None]
        else:
            scales = self.scales.astype(np.float32)[:, :, None]
        if self.format.zero == "min":
            assert self.zeros is not None
            return (codes * scales + self.zeros.astype(np.float32)[:, :, None]).reshape(n, k)
        if self.format.zero == "int":
            assert self.zeros is not None
            codes -= self.zeros.astype(np.float32)[:, :, None]
        elif self.format.kind == "int4":
            codes -= 8
        with np.errstate(invalid="ignore"):  # a scale that is no number
            return (codes * scales).reshape(n, k)


def _meaning(format: WeightFormat, codes: Array) -> npt.NDArray[np.float32]:
    """What each code stands for before its group's zero and scale."""
    if format.kind == "nf4":
        table = np.array(NF4_VALUES, np.float32)
    elif format.kind == "fp8_e4m3":
        table = _e4m3_values()
    else:
        return codes.astype(np.float32)
    values: npt.NDArray[np.float32] = table[codes]
    return values


def _e4m3_values() -> npt.NDArray[np.float32]:
    """The value of each of the 256 float8: exponent bias 7, denormals below 2^-6, NaN at 0x7f and 0xff."""
    bits = np.arange(256)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    size[(bits & 127) == 127] = np.nan
    return np.where(bits < 128, size, -size).astype(np.float32)
