"""Seeded linear layers with their answers in float64, and what runs calls on the emulator and looks at every report."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from llmctl.kernels.cuda import linear_tiles as tiles
from llmctl.kernels.cuda.call import Call
from llmctl.kernels.cuda.emulate import Emulation
from llmctl.kernels.cuda.linear import Addresses, Linear, fma_call, mma_calls, refusal, vector_call
from llmctl.kernels.cuda.pack import pack
from llmctl.kernels.cuda.source import Kernel
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


@dataclass(frozen=True)
class Case:
    """A layer, how many rows, which tile of linear_mma (None: not that kernel), and how many splits."""

    layer: Linear
    rows: int
    tile: tiles.Tile | None
    splits: int = 1
    kind: str = "normal"
    bias: bool = False

    @property
    def name(self) -> str:
        layer, tile = self.layer, self.tile
        shape = f"m{self.rows}-{layer.outputs}x{layer.inputs}-{f'{tile.rows}x{16 * tile.panels}' if tile else 'plain'}"
        return f"{layer.dtype}-{layer.weight.name}-{layer.end}-{shape}-s{self.splits}-{self.kind}{'-bias' * self.bias}"

    @property
    def steps_per_split(self) -> int:
        steps = -(-self.layer.inputs // tiles.UNIT)
        each = -(-steps // self.splits)
        return each + (each % 2 if self.layer.weight.group == 128 else 0)

    @property
    def kernels(self) -> list[Kernel]:
        return [call.kernel for call in self.calls(Addresses(0, 0, 0, sums=1), self.rows)]

    def calls(self, at: Addresses, rows: int) -> list[Call]:
        if self.tile is not None:
            return mma_calls(self.layer, rows, at, self.tile, self.splits, self.steps_per_split)
        if self.layer.dtype == "f32" and rows > 1:
            return [fma_call(self.layer, rows, at)]
        return [vector_call(self.layer, rows, at)]


CODES = {
    "int4": [WeightFormat("int4", group, zero) for group in (32, 64, 128, 192) for zero in ("none", "int", "min")],
    "nf4": [WeightFormat("nf4", 64, "none", "f32"), WeightFormat("nf4", 128)],
    "int8": [WeightFormat("int8", group) for group in (32, 128, 192)] + [WeightFormat("int8", 192, "none", "f32")],
    "fp8": [WeightFormat("fp8_e4m3", group, "none", "f32") for group in (128, 192)],
}
ENDS = ("store", "add", "silu", "gelu")


def case(
    dtype: str, weight: WeightFormat, end: str, rows: int, tile: int | None, splits: int = 1, kind: str = "normal",
    outputs: int = 80, inputs: int = 0, bias: bool = False,
) -> Case:  # fmt: skip
    inputs = inputs or {128: 384, 192: 192}.get(
        weight.group, 160 if weight.group == 32 else 200 if weight.is_float else 192
    )
    layer = Linear(dtype, weight, outputs, inputs, end)  # type: ignore[arg-type]
    assert refusal(layer) is None, refusal(layer)
    return Case(layer, rows, None if tile is None else tiles.tiles_of(weight)[tile], splits, kind, bias)


# What each part of the kernel does, in as few specializations as show it.
FEW = [
    case("bf16", CODES["int4"][1], "store", 1, 0, bias=True, outputs=78),
    case("bf16", CODES["int4"][1], "store", 16, 0, splits=3, kind="outliers"),
    case("f16", CODES["int4"][5], "add", 19, 1, splits=2, bias=True),
    case("f16", CODES["int4"][6], "silu", 33, 1, inputs=256, splits=2),
    case("bf16", CODES["nf4"][0], "add", 7, 0, kind="denormals"),
    case("f16", CODES["int8"][2], "store", 5, 0, splits=2),
    case("bf16", CODES["int8"][0], "gelu", 2, 0, bias=True),
    case("f16", CODES["fp8"][0], "store", 3, 0, splits=3),
    case("bf16", WeightFormat("bf16"), "store", 18, 0, splits=2),
    case("bf16", CODES["int4"][2], "store", 1, None, outputs=34, inputs=928, bias=True),
    case("f32", CODES["int4"][7], "add", 1, None, inputs=1408),
    case("f16", WeightFormat("f16"), "silu", 1, None, inputs=1160),
    case("f32", CODES["int4"][1], "gelu", 35, None, bias=True),
    case("f32", CODES["nf4"][0], "store", 3, None, outputs=34),
]


ALONE = dataclasses.replace(FEW[1], rows=16, splits=1)
WIDER = dataclasses.replace(ALONE, tile=FEW[2].tile)


def every_case() -> list[Case]:
    """Every storage, type, end and tile, with inputs of every distribution; not every product of them."""
    cases = []
    shapes = itertools.cycle(
        itertools.product((1, 16, 17, 40, 70, 131), ("normal", "outliers", "denormals"), (1, 2, 3))
    )
    for dtype, kind in itertools.product(("f16", "bf16"), CODES):
        for i, weight in enumerate(CODES[kind]):
            for tile in range(4):
                count, inputs, splits = next(shapes)
                outputs = (16, 80, 144, 272)[(i + tile) % 4]
                bias = (i + tile) % 3 == 0
                end = ENDS[(i + tile) % 4]
                cases.append(case(dtype, weight, end, count, tile, splits, inputs, outputs, bias=bias))
                cases.append(case(dtype, weight, end, count + 3, tile, 1, inputs, outputs))
    for (dtype, tile), end in itertools.product(itertools.product(("f16", "bf16"), range(4)), ("store", "add")):
        count, inputs, splits = next(shapes)
        cases.append(case(dtype, WeightFormat(dtype), end, count, tile, splits, inputs, 150))
    plain = [WeightFormat(dtype) for dtype in LIMITS]
    for dtype, (i, weight) in itertools.product(LIMITS, enumerate((*plain, *itertools.chain(*CODES.values())))):
        if weight.is_float and dtype not in (weight.kind, "f32"):
            continue
        for rows in (1, 3) if dtype == "f32" else (1,):
            count, inputs, _ = next(shapes)
            count = 1 if rows == 1 else count + 1
            cases.append(case(dtype, weight, ENDS[i % 4], count, None, 1, inputs, (16, 80, 144, 272)[i % 4]))
    return cases


EVERY = every_case()
