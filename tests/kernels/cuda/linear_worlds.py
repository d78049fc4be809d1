"""Seeded linear layers with their answers in float64, and what runs calls on the emulator and looks at every report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from llmctl.kernels.cuda.call import Call
from llmctl.kernels.cuda.emulate import Emulation
from llmctl.kernels.cuda.linear import Addresses, Linear
from llmctl.kernels.cuda.pack import pack
from llmctl.kernels.formats import NF4_VALUES, WeightFormat

TORCH = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# Largest |y - y64| allowed, over the largest sum of |x||w| of the row.
LIMITS = {"f16": 5e-4, "bf16": 4e-3, "f32": 1e-6}
NF4 = np.array(NF4_VALUES)


@dataclass(frozen=True, eq=False)
class Stored:
    """A weight as its checkpoint stores it, and its values."""

    data: np.ndarray
    scales: np.ndarray | None
    zeros: np.ndarray | None
    values: np.ndarray  # float64 [n, k]


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Rounded to the type, as an array that numpy has: bfloat16 as its bits."""
    rounded = torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(TORCH[dtype])
    return rounded.view(torch.uint16).numpy() if dtype == "bf16" else rounded.numpy()


def exact(array: np.ndarray, dtype: str) -> np.ndarray:
    """The float64 values of what `stored` gave."""
    if dtype == "bf16":
        return (array.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def random_weight(format: WeightFormat, n: int, k: int, rng: np.random.Generator) -> Stored:
    """A weight with values of about 1 / sqrt(k) in which every code occurs."""
    if format.is_float:
        data = stored(rng.standard_normal((n, k)) / np.sqrt(k), format.kind)
        return Stored(data, None, None, exact(data, format.kind))
    groups, zeros = k // format.group, None
    if format.kind == "int8":
        codes = rng.integers(-128, 128, (n, k)).astype(np.int8)
        meant, unit = codes.astype(np.float64), 64.0
    elif format.kind == "fp8_e4m3":
        codes = rng.integers(0, 256, (n, k)).astype(np.uint8)
        codes[(codes & 127) == 127] -= 1
        meant, unit = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy(), 64.0
    else:
        codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
        meant, unit = (NF4[codes], 1.0) if format.kind == "nf4" else (codes.astype(np.float64), 4.0)
    scale_type = np.float16 if format.scales == "f16" else np.float32
    scales = (rng.uniform(0.5, 1.5, (n, groups)) / np.sqrt(k) / unit).astype(scale_type)
    meant = meant.reshape(n, groups, -1)
    if format.zero == "int":
        zeros = rng.integers(0, 17, (n, groups)).astype(np.uint8)  # GPTQ counts from 1
        meant = meant - zeros[:, :, None]
    elif format.kind == "int4" and format.zero == "none":
        meant = meant - 8
    values = meant * scales.astype(np.float64)[:, :, None]
    if format.zero == "min":
        zeros = (-8 * scales * rng.uniform(0.5, 1.5, (n, groups))).astype(scales.dtype)
        values = values + zeros.astype(np.float64)[:, :, None]
    return Stored(codes, scales, zeros, values.reshape(n, k))


def random_inputs(kind: str, rows: int, k: int, rng: np.random.Generator) -> np.ndarray:
    """Activations: normal, with a few channels a hundred times larger, or so small that some are denormals."""
    x = rng.standard_normal((rows, k))
    if kind == "outliers":
        x[:, rng.integers(0, k, 3)] *= 100
    elif kind == "denormals":
        x *= 10.0 ** rng.uniform(-7, 0, (rows, k))
    return x


def ended(layer: Linear, sums: np.ndarray, residual: np.ndarray | None) -> np.ndarray:
    """float64 sums as the layer's end makes its output of them."""
    if layer.end == "add":
        assert residual is not None
        return sums + residual
    if layer.end == "store":
        return sums
    pairs = sums.reshape(sums.shape[0], -1, 2, 8)
    gate, up = (torch.from_numpy(pairs[:, :, i].reshape(sums.shape[0], -1).copy()) for i in range(2))
    kind = torch.nn.functional.silu(gate) if layer.end == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    return (kind * up).numpy()


@dataclass(frozen=True, eq=False)
class World:
    """Arrays that a kernel may read and write, and what it has to write."""

    layer: Linear
    rows: int
    y: np.ndarray
    x: np.ndarray
    weight: np.ndarray
    bias: np.ndarray | None
    residual: np.ndarray | None
    expected: np.ndarray  # float64
    sizes: np.ndarray  # float64 [rows, 1]: the largest sum of |x||w|

    @property
    def error(self) -> float:
        found = exact(self.y, self.layer.dtype)[:, : self.expected.shape[1]]
        return float((np.abs(found - self.expected) / self.sizes).max())

    def addresses(self, sums: np.ndarray | None = None) -> Addresses:
        return Addresses(
            *(0 if a is None else a.ctypes.data for a in (self.y, self.x, self.weight, self.bias, self.residual, sums))
        )


def make_world(layer: Linear, rows: int, seed: int, *, kind: str = "normal", bias: bool = False) -> World:
    rng = np.random.default_rng(seed)
    weight = random_weight(layer.weight, layer.outputs, layer.inputs, rng)
    x = stored(random_inputs(kind, rows, layer.inputs, rng), layer.dtype)
    y = stored(np.full((rows, layer.width), np.nan), layer.dtype)
    outputs = layer.outputs + layer.outputs % 2
    biases = stored(rng.standard_normal(outputs) * 0.1, layer.dtype) if bias else None
    residual = stored(rng.standard_normal(y.shape), layer.dtype) if layer.end == "add" else None
    x64 = exact(x, layer.dtype)
    sums, sizes = x64 @ weight.values.T, np.abs(x64) @ np.abs(weight.values.T)
    if biases is not None:
        sums += exact(biases, layer.dtype)[: layer.outputs]
        sizes += np.abs(exact(biases, layer.dtype))[: layer.outputs]
    if residual is not None:
        sizes += np.abs(exact(residual, layer.dtype))[:, : layer.outputs]
    expected = ended(layer, sums, None if residual is None else exact(residual, layer.dtype)[:, : layer.outputs])
    most = sizes.max(axis=1, keepdims=True)
    if layer.end in ("silu", "gelu"):
        most = most**2
    packed = pack(layer.weight, weight.data, weight.scales, weight.zeros)
    return World(layer, rows, y, x, packed, biases, residual, expected, np.maximum(most, 1e-30))


def run(emulation: Emulation, world: World, calls: Sequence[Call], sums: np.ndarray | None = None) -> tuple[str, ...]:
    """Launch in order; every report there was."""
    emulation.register(world.y.ctypes.data, world.y.nbytes, "y", written=False)
    for name in ("x", "weight", "bias", "residual"):
        if (array := getattr(world, name)) is not None:
            emulation.register(array.ctypes.data, array.nbytes, name, read_only=True)
    if sums is not None:
        emulation.register(sums.ctypes.data, sums.nbytes, "sums", written=False)
    try:
        for call in calls:
            emulation.launch(call.kernel, call.grid, call.threads, call.shared_bytes, call.arguments)
        return emulation.reports()
    finally:
        emulation.forget()
