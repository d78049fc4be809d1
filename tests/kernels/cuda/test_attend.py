"""Attention against float64: every type and flag, with no report of the checker, and equal bits in whatever company."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from llmctl.kernels.cuda.attend import (
    AttendShape,
    Queries,
    choose_split,
    plan_attention,
    refusal,
)
from llmctl.kernels.cuda.emulate import Emulation, build
from llmctl.kernels.cuda.source import FOLDER, Kernel
from llmctl.kernels.cuda.tiles import choose_attend

from .attend_cases import ROUNDED_WEIGHTS, Problem, bound, error, make, run

DECODE = ((1, 100), (1, 0), (1, 37), (3, 200))
PREFILL = ((45, 0), (1, 70), (20, 130))


def decode(act: str, compute: str, kv: str, *, fine: bool = False) -> AttendShape:
    return AttendShape(act, compute, kv, 64, 1, 4, 64, 2, fine)


def prefill(act: str, compute: str, kv: str, *, soft_cap: bool = False) -> AttendShape:
    return AttendShape(act, compute, kv, 64, 4, 1, 64, 2, soft_cap=soft_cap)


# Head and block size, window, soft cap, sinks.
SIZES = (
    (64, 16, 0, 0.0, False),
    (128, 32, 0, 0.0, False),
    (96, 16, 90, 0.0, False),
    (256, 16, 0, 20.0, False),
    (128, 16, 90, 20.0, True),
    (64, 64, 0, 0.0, True),
    (32, 256, 0, 0.0, False),
    (160, 32, 90, 0.0, False),
)
SMALL = (
    Problem(decode("bf16", "bf16", "bf16", fine=True), DECODE, 2, 3, 128),
    Problem(prefill("f16", "f16", "fp8_e4m3", soft_cap=True), PREFILL, 1, 2, 64, 50, 20.0, sinks=True),
    Problem(decode("f16", "f16", "int8", fine=True), DECODE, 1, 4, 64, block=32),
    Problem(decode("f32", "f32", "f32"), DECODE, 1, 2, 128),
    Problem(decode("bf16", "f16", "fp8_e4m3"), DECODE, 1, 4, 64, block=128),
    Problem(AttendShape("bf16", "f16", "fp8_e4m3", 32, 1, 4, 64, 2), DECODE, 1, 4, 64),  # 64 rows are copied at once
    # Two warps share the dimensions, and copies are not at places that are known when compiling.
    Problem(AttendShape("f32", "f32", "f32", 192, 1, 1, 16, 2), ((1, 70), (3, 20)), 1, 2, 64, 50),
)
COMBINATIONS = [
    (act, compute, kv)
    for act, compute in (
        ("f16", "f16"),
        ("bf16", "bf16"),
        ("bf16", "f16"),
        ("f32", "f32"),
        ("f32", "tf32"),
        ("f32", "bf16"),
    )
    for kv in ("f16", "bf16", "f32", "fp8_e4m3", "fp8_e5m2", "int8")
    if refusal(act, compute, kv) is None
]


def kernels(problems: tuple[Problem, ...]) -> list[Kernel]:
    return [kernel for p in problems for kernel in (p.shape.kernel, p.shape.merge_kernel)]


@pytest.fixture(scope="module")
def checked(builds: Path) -> Emulation:
    return build(kernels(SMALL), "checked", builds)


def answer(problem: Problem, emulation: Emulation) -> tuple[torch.Tensor, float]:
    """The kernels' answer, which has to be right and without reports, and its error."""
    case = make(problem)
    out = run(case, emulation)
    reports = emulation.reports()
    emulation.forget()
    wrong = error(case, out)
    assert reports == ()
    assert wrong <= bound(problem.shape), problem.name
    return out, wrong


@pytest.mark.parametrize("problem", SMALL, ids=lambda problem: problem.name)
def test_attention_is_right_and_touches_nothing_that_it_must_not(checked: Emulation, problem: Problem) -> None:
    checked.order("random", seed=3)
    answer(problem, checked)
    answer(dataclasses.replace(problem, distribution="outliers", seed=1), checked)


def test_queries_beyond_the_range_of_what_is_multiplied_lose_nothing(checked: Emulation) -> None:
    case = make(SMALL[4])
    usual = run(case, checked)
    case.q *= 2.0**20  # float16 ends at 65504
    case.scale /= 2.0**20
    assert torch.equal(run(case, checked), usual)
    checked.forget()


def test_a_query_has_the_same_bits_alone_and_in_company(checked: Emulation) -> None:
    problem = SMALL[0]
    problem = dataclasses.replace(problem, sequences=((3, 200), (1, 20)))
    (together, _), queries = answer(problem, checked), make(problem).q
    case = make(dataclasses.replace(problem, sequences=((1, 202),)))  # the same 203 tokens
    case.q[:] = queries[2]
    alone = run(case, checked)
    checked.forget()
    assert torch.equal(together[2], alone[0])


def test_where_a_context_is_cut_does_not_depend_on_the_step() -> None:
    sequences = [Queries(0, 0, 1, 299), Queries(1, 1, 7, 250)]
    plan = plan_attention(sequences, group=4, rows=16, tile=64, split=128)
    assert [int(w["end"] - w["begin"]) for w in plan.work] == sorted(
        (w["end"] - w["begin"] for w in plan.work), reverse=True
    )
    ends = {(int(w["slot"]), int(w["tile"])): [] for w in plan.work}
    for item in np.sort(plan.work, order="begin"):
        ends[int(item["slot"]), int(item["tile"])].append((int(item["begin"]), int(item["end"])))
    assert ends[0, 0] == [(0, 128), (128, 256), (256, 300)]
    assert ends[1, 0] == [(0, 128), (128, 254)]  # four queries of four heads: positions 250 to 253
    assert ends[1, 1] == [(0, 128), (128, 256), (256, 257)]
    assert plan.parts == 8 and [int(m["count"]) for m in plan.merge] == [3, 2, 3]


def test_a_window_is_cut_at_the_same_places() -> None:
    plan = plan_attention([Queries(0, 0, 1, 299)], group=4, rows=16, tile=64, split=128, window=100)
    assert [(int(w["begin"]), int(w["end"])) for w in plan.work] == [(192, 256), (256, 300)]


def test_the_split_fills_the_gpu_but_parts_stay_worth_their_merge() -> None:
    sizes = {"group": 4, "rows": 16, "tile": 64, "kv_heads": 8}
    assert choose_split([Queries(0, 0, 1, 8191)], processors=132, **sizes) == 256  # two blocks for each SM
    assert choose_split([Queries(0, 0, 1, 99)], processors=132, **sizes) == 128  # the whole in one part
    for count, length in ((32, 2048), (128, 4096)):  # as many blocks as do without a merge
        assert choose_split([Queries(i, i, 1, length - 1) for i in range(count)], processors=132, **sizes) >= length


def test_formats_that_do_not_go_together_are_refused_with_what_does() -> None:
    assert refusal("bf16", "f16", "bf16") == "a bf16 cache is multiplied in bf16, not in f16"
    assert refusal("f32", "bf16", "int8") is None


# Each must be found by the checker, by wrong values, or both.
MUTANTS = {
    "no barrier before the stage is reused": (
        "    copy_wait<kStages - 2>();\n    __syncthreads();\n",
        "    copy_wait<kStages - 2>();\n",
        ("race on shared memory",),
    ),
    "no barrier before the parts are merged": (
        "  __syncthreads();\n  for (int i = threadIdx.x; i < S::kRows",
        "  for (int i = threadIdx.x; i < S::kRows",
        ("race on shared memory",),
    ),
    "no wait for the copies": (
        "    copy_wait<kStages - 2>();\n    __syncthreads();\n",
        "    __syncthreads();\n",
        ("before its wait",),
    ),
    "tokens behind the end are fetched": (
        "const bool valid = token >= begin && token < end;",
        "const bool valid = token >= begin;",
        (),
    ),
    "rows beyond the last query are written": (
        "    if (row >= item.queries * group) continue;\n",
        "",
        ("out of bounds",),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_defect_planted_in_attention_is_found(builds: Path, tmp_path: Path, mutant: str) -> None:
    good, bad, reports = MUTANTS[mutant]
    folder = tmp_path / "cuda"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    text = (folder / "attend.cuh").read_text()
    assert text.count(good) == 1
    (folder / "attend.cuh").write_text(text.replace(good, bad))
    problem = SMALL[0]
    emulation = build(
        [Kernel(str(folder / "attend.cuh"), k.expression) for k in kernels((problem,))], "checked", builds
    )
    case = make(problem)
    out = run(case, Renamed(emulation, folder / "attend.cuh"))
    said = emulation.reports()
    emulation.forget()
    for expected in reports:
        assert any(expected in report for report in said), said
    if not reports:
        assert said or not error(case, out) <= bound(problem.shape)


@dataclasses.dataclass
class Renamed:
    """An emulation of kernels of another file than ours."""

    emulation: Emulation
    header: Path

    def launch(self, kernel: Kernel, *rest) -> bool:
        return self.emulation.launch(Kernel(str(self.header), kernel.expression), *rest)

    def register(self, *args, **kwargs) -> None:
        self.emulation.register(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("combination", COMBINATIONS, ids="-".join)
def test_the_sweep_stays_within_the_bounds(builds: Path, combination: tuple[str, str, str]) -> None:
    problems = sweep(*combination)
    emulation = build(kernels(problems), "checked", builds)
    worst = {"fine weights": 0.0, "rounded weights": 0.0}
    for number, problem in enumerate(problems):
        emulation.order(("ascending", "descending", "random")[number % 3], seed=number + 1)
        _, wrong = answer(problem, emulation)
        rounded = problem.shape.compute in ROUNDED_WEIGHTS and not problem.shape.fine
        kind = "rounded weights" if rounded else "fine weights"
        worst[kind] = max(worst[kind], wrong)
    specializations = {problem.shape.kernel for problem in problems}
    print(f"{combination}: {len(specializations)} specializations, {len(problems)} cases, worst errors {worst}")


def sweep(act: str, compute: str, kv: str) -> tuple[Problem, ...]:
    """Problems for one combination of types: SIZES, groups and distributions in turn."""
    problems = []
    for seed, (head_dim, block, window, soft_cap, sinks) in enumerate(SIZES):
        for is_prefill, sequences, fine in ((False, DECODE, True), (True, PREFILL, True), (True, PREFILL, False)):
            if not fine and (compute not in ("f16", "bf16") or seed > 1):
                continue
            shape = choose_attend(
                "sm_90a", act, compute, kv, head_dim, soft_cap=soft_cap > 0, prefill=is_prefill, fine=fine
            )
            for distribution in ("normal", "outliers", "tiny"):
                group = (1, 3, 4, 8)[(seed + len(problems)) % 4]
                problems.append(
                    Problem(shape, sequences, 2, group, 128, window, soft_cap, distribution, seed, block, sinks)
                )
    return tuple(problems)
