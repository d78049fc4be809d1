"""Mistakes that someone could make in the linear layers' kernels are each named by the checker."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from llmctl.kernels.cuda.linear import workspace_bytes

from .linear_worlds import FEW, Case, make_world, run
from .planted import Defect, build_with

MMA = "linear_mma.cuh"
ONE_SPLIT = dataclasses.replace(FEW[8], splits=1)
DEFECTS = (
    (
        FEW[0],
        Defect(
            "no barrier per step",
            MMA,
            "copy_wait<kStages - 2>();\n    __syncthreads();",
            "copy_wait<kStages - 2>();",
            "race on shared memory",
        ),
    ),
    (FEW[0], Defect("no wait per step", MMA, "copy_wait<kStages - 2>();", "", "before its wait")),
    (
        FEW[0],
        Defect("a wait too short", MMA, "copy_wait<kStages - 2>();", "copy_wait<kStages - 1>();", "before its wait"),
    ),
    (
        FEW[0],
        Defect(
            "rows behind the last are fetched",
            MMA,
            "return first_row + r < rows ? first_row + r : -1;",
            "return first_row + r;",
            "out of bounds",
        ),
    ),
    (
        FEW[8],
        Defect("inputs behind the last are fetched", MMA, "row >= 0 && column < inputs", "row >= 0", "out of bounds"),
    ),
    (
        FEW[5],
        Defect(
            "panels behind the last are fetched",
            MMA,
            "panel < panels;\n      const long source = valid ? (static_cast<long>(panel) * steps",
            "true;\n      const long source = valid ? (static_cast<long>(panel) * steps",
            "out of bounds",
        ),
    ),
    (
        FEW[0],
        Defect(
            "scales are not fetched",
            MMA,
            "copy(scales, kRow, kRow / Stage::kGroups);",
            "to += kPanels * kRow;",
            "uninitialised read of shared memory",
        ),
    ),
    (
        ONE_SPLIT,
        Defect(
            "the ring is one slot short",
            MMA,
            "load(ahead, (ahead - first_step) % kStages)",
            "load(ahead, (ahead - first_step) % (kStages - 1))",
            "race on shared memory",
        ),
    ),
    (
        FEW[1],
        Defect(
            "all splits write one place",
            MMA,
            "static_cast<long>(blockIdx.z) * rows + row",
            "static_cast<long>(row)",
            "race on sums",
        ),
    ),
    (
        FEW[1],
        Defect("a split too many is added up", "linear_end.cuh", "split < splits", "split <= splits", "out of bounds"),
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "defect"), DEFECTS, ids=[defect.name for _, defect in DEFECTS])
def test_a_planted_defect_is_named(builds: Path, tmp_path: Path, case: Case, defect: Defect) -> None:
    emulation, planted = build_with(defect, case.kernels, tmp_path)
    world = make_world(case.layer, case.rows, seed=1, kind=case.kind, bias=case.bias)
    sums = np.zeros(max(4, workspace_bytes(case.layer, case.rows, case.splits)) // 4, np.float32)
    calls = case.calls(world.addresses(sums), case.rows)
    reports = run(emulation, world, [dataclasses.replace(call, kernel=planted[call.kernel]) for call in calls], sums)
    assert any(defect.expected in report for report in reports), reports
