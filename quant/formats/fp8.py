"""Linears of float8 weights (e4m3) with scales, as several tools write them, read only.

weight float8_e4m3fn [n, k], and beside it a scale, which is multiplied whatever it is called: one number, one per
output [n, 1], or one per block [ceil(n / bn), ceil(k / bk)], whose last blocks may be cut. A scale may be float8_e8m0
too, a power of two. Known are Hugging Face's `fp8` (DeepSeek's weights, `weight_scale_inv`), compressed-tensors'
`float-quantized`, `fbgemm_fp8` and ModelOpt's FP8.

Most of these models quantize activations as well when their makers run them. Here activations keep their values, which
is nearer to what the weights were before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...kernels.errors import CheckpointError, UnsupportedModel
from ...kernels.formats import WeightFormat
from ..tensor import Array, WeightTensor
from .fields import Config, read_int, read_names, read_object, read_text
from .linear import DecodedLinear, LinearLayout, part, read_bias
from .stored import shape_text

F32Array = npt.NDArray[np.float32]

_SCALES = ("float32", "float16", "uint16", "uint8")
_GROUPS = (128, 64, 32)  # of inputs, that kernels know


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """`scale` is what scales are called, `block` (0, 0) if there are none; `skipped` are parts of modules' names."""

    tool: str
    scale: str
    block: tuple[int, int] = (0, 0)
    skipped: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.tool}, float8"

    @property
    def parts(self) -> tuple[str, ...]:
        return self.scale, "weight", "input_scale", "activation_scale", "output_scale", "weight_shape", "bias"

    def covers(self, module: str) -> bool:
        return module != "lm_head" and not any(skip.rstrip("*") in module for skip in self.skipped)

    def shape(self, module: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        n, k = shapes["weight"]
        return n, k

    def layout(self, module: str, tensors: Mapping[str, Array]) -> LinearLayout:
        weight, scales = part(module, tensors, "weight", ("uint8",)), self._scales(module, tensors)
        return LinearLayout(WeightFormat("fp8_e4m3", self._group(module, weight, scales), "none", "f32"))

    def decode(self, module: str, tensors: Mapping[str, Array]) -> DecodedLinear:
        codes = part(module, tensors, "weight", ("uint8",))
        if bool(((codes & np.uint8(127)) == 127).any()):  # type: ignore[operator]
            raise CheckpointError(f"`{module}.weight` holds NaN", "the file is broken: fetch the model again")
        scales = self._scales(module, tensors)
        group = self._group(module, codes, scales)
        n, k = codes.shape
        if group != k:
            # A scale for each group of inputs: a block has several, and the last block may be cut.
            scales = np.repeat(scales, self.block[1] // group, axis=1)[:, : k // group]
        if scales.shape[0] != n:
            scales = np.repeat(scales, n if scales.shape[0] == 1 else self.block[0], axis=0)[:n]
        format = WeightFormat("fp8_e4m3", group, "none", "f32")
        weight = WeightTensor(format, codes, np.ascontiguousarray(scales))
        return DecodedLinear(weight, read_bias(module, tensors, n))

    def _scales(self, module: str, tensors: Mapping[str, Array]) -> F32Array:
        """float32 [1 or n or blocks of outputs, 1 or blocks of inputs]."""
        stored = tensors.get(self.scale)
        if stored is None or stored.dtype.name not in _SCALES or stored.ndim > 2:
            found = "missing" if stored is None else f"{stored.dtype.name} {shape_text(stored.shape)}"
            raise CheckpointError(f"`{module}.{self.scale}` is {found}, expected a float scale or a matrix of them")
        if stored.dtype == np.uint8:  # float8_e8m0: the exponent of a power of two
            scales: F32Array = np.exp2(stored.astype(np.float32) - np.float32(127))
        elif stored.dtype == np.uint16:
            scales = (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            scales = stored.astype(np.float32)
        if not np.isfinite(scales).all():
            raise CheckpointError(f"`{module}.{self.scale}` holds NaN or infinity", "fetch the model again")
        return scales.reshape(-1, 1) if scales.ndim < 2 else scales

    def _group(self, module: str, weight: Array, scales: F32Array) -> int:
        """Inputs that share a scale; CheckpointError if the scales are not of this weight."""
        (n, k), found = weight.shape, scales.shape
        if found in ((1, 1), (n, 1)):
            return int(k)
        rows, columns = self.block
        if not rows or found != (-(-n // rows), -(-k // columns)):
            blocks = f" in blocks of {rows} x {columns}" if rows else ""
            raise CheckpointError(
                f"`{module}.{self.scale}` has shape {shape_text(found)} for a weight of {n} x {k}{blocks}",
                "the quantization config belongs to another checkpoint, or the file is broken",
            )
        group = math.gcd(columns, k)
        fitting = next((size for size in _GROUPS if group % size == 0), 0)
        if not fitting:
            raise UnsupportedModel(
                f"`{module}` has {k} inputs in blocks of {columns}", "blocks of multiples of 32 inputs can be read"
            )
        return fitting


def detect(config: Config) -> Fp8Format | None:
    """The format that a quantization config of float8 weights describes, None if it describes another."""
    method = read_text(config, "quant_method", default="")
    if method == "fp8":
        skipped = (*read_names(config, "modules_to_not_convert"), *read_names(config, "ignored_layers"))
        block = _block(config, "weight_block_size")
        return Fp8Format("fp8", "weight_scale_inv" if block[0] else "weight_scale", block, skipped)
    if method == "fbgemm_fp8":
        return Fp8Format("fbgemm_fp8", "weight_scale", skipped=read_names(config, "modules_to_not_convert"))
    quantization = read_object(config, "quantization")
    if method == "modelopt" and read_text(quantization, "quant_algo", default="") == "fp8":
        return Fp8Format("ModelOpt", "weight_scale", skipped=read_names(quantization, "exclude_modules"))
    if method == "compressed-tensors" and read_text(config, "format", default="") in _FLOAT_LAYOUTS:
        return _compressed(config)
    return None


_FLOAT_LAYOUTS = ("float-quantized", "naive-quantized")


def _compressed(config: Config) -> Fp8Format | None:
    """Of compressed-tensors, None unless all weights are float8."""
    groups = read_object(config, "config_groups")
    weights = [read_object(read_object(groups, name), "weights") for name in groups]
    if not weights or any(read_text(one, "type", default="int") != "float" for one in weights):
        return None
    blocks = {_block(one, "block_structure") for one in weights} - {(0, 0)}
    if len(blocks) > 1 or any(read_int(one, "num_bits") != 8 for one in weights):
        raise UnsupportedModel(
            "compressed-tensors with float weights of several kinds", "supported: float8 by tensor, channel or block"
        )
    skipped = tuple(name for name in read_names(config, "ignore") if not name.startswith("re:"))
    return Fp8Format("compressed-tensors", "weight_scale", blocks.pop() if blocks else (0, 0), skipped)


def _block(config: Config, name: str) -> tuple[int, int]:
    """Two sizes under this name, (0, 0) if there are none."""
    value = config.get(name)
    if value is None:
        return 0, 0
    if not isinstance(value, list) or len(value) != 2 or any(type(size) is not int or size < 1 for size in value):
        raise CheckpointError(f"`{name}` of the quantization config is {value!r}, expected two sizes of a block")
    return value[0], value[1]
