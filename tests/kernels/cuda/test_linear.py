"""Linear layers on the emulator: against float64, with every access checked, and with defects planted in them."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from llmctl.kernels.cuda import linear_tiles as tiles
from llmctl.kernels.cuda.call import Call
from llmctl.kernels.cuda.emulate import Emulation, Mode, build
from llmctl.kernels.cuda.linear import (
    Addresses,
    Linear,
    fma_call,
    mma_calls,
    refusal,
    vector_call,
    workspace_bytes,
)
from llmctl.kernels.cuda.source import Kernel
from llmctl.kernels.formats import WeightFormat

from .linear_worlds import LIMITS, World, make_world, run


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


def launch(emulation: Emulation, case: Case, *, only_rows: int = 0) -> tuple[World, tuple[str, ...]]:
    """One run of the case, or of its first rows."""
    layer = case.layer
    world = make_world(layer, case.rows, seed=case.rows * 1000 + layer.inputs, kind=case.kind, bias=case.bias)
    sums = np.full(workspace_bytes(layer, case.rows, case.splits) // 4, np.nan, np.float32) if case.splits > 1 else None
    calls = case.calls(world.addresses(sums), only_rows or case.rows)
    return world, run(emulation, world, calls, sums)


def built(cases: list[Case], mode: Mode, builds: Path) -> Emulation:
    return build([kernel for case in cases for kernel in case.kernels], mode, builds)


@pytest.fixture(scope="module")
def few(builds: Path) -> Emulation:
    return built([*FEW, WIDER], "checked", builds)


@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_a_layer_is_near_float64_and_no_access_is_wrong(few: Emulation, case: Case) -> None:
    few.order("random", seed=case.rows)
    world, reports = launch(few, case)
    few.order("ascending")
    assert reports == ()
    assert world.error <= LIMITS[case.layer.dtype], world.error


def test_shared_memory_is_read_without_bank_conflicts(few: Emulation) -> None:
    few.counts()
    launch(few, FEW[2])
    instructions, conflicts = few.counts()
    assert instructions > 0
    assert conflicts == 0


def test_a_row_has_the_same_bits_alone_and_in_any_tile(few: Emulation) -> None:
    together, _ = launch(few, ALONE)
    wider, _ = launch(few, WIDER)
    alone, reports = launch(few, ALONE, only_rows=1)
    assert reports == ()
    assert wider.y.tobytes() == together.y.tobytes()
    assert alone.y[0].tobytes() == together.y[0].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["values", "checked"])
def test_every_specialization_is_near_float64(builds: Path, mode: Mode) -> None:
    emulation = built(EVERY, mode, builds)
    worst = dict.fromkeys(LIMITS, 0.0)
    for case in EVERY:
        world, reports = launch(emulation, case)
        assert reports == (), case.name
        assert world.error <= LIMITS[case.layer.dtype], (case.name, world.error)
        worst[case.layer.dtype] = max(worst[case.layer.dtype], world.error)
    specializations = {kernel for case in EVERY for kernel in case.kernels}
    print(f"{mode}: {len(specializations)} specializations, {len(EVERY)} cases, worst errors {worst}")
