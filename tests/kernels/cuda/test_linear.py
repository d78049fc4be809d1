"""Linear layers on the emulator: against float64, with every access checked, and with defects planted in them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmctl.kernels.cuda.emulate import Emulation, Mode, build
from llmctl.kernels.cuda.linear import workspace_bytes

from .linear_worlds import ALONE, EVERY, FEW, LIMITS, WIDER, Case, World, make_world, run


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
