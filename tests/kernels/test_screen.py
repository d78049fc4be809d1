"""A head that computes whole only what may be a row's largest output: the largest is the same, with the same bits."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmctl.kernels import _cpu
from llmctl.kernels.cpu import ops as cpu
from llmctl.kernels.formats import parse_weight_format
from llmctl.kernels.ops import (
    LARGEST_ONLY,
    LOGIT_ROWS,
    F32Array,
    LinearArgs,
    PackedWeight,
    make_act,
    make_batch,
    make_rows,
)
from llmctl.kernels.reference.act import write_act
from llmctl.kernels.scratch import screen_scratch_bytes

from .cases import random_weight

MAX_ROWS, THREADS = 140, 2
FEW = 4  # rows that read the upper bits of the weights


@pytest.fixture(params=_cpu.isas())
def isa(request: pytest.FixtureRequest):
    _cpu.set_isa(request.param)
    _cpu.set_threads(THREADS)
    yield request.param
    _cpu.set_isa(_cpu.isas()[-1])


@dataclass
class Head:
    """An int8 head of `n` outputs, and the same without a screen."""

    n: int
    k: int = 96
    format: str = "int8g32"
    weight: PackedWeight | None = None

    def __post_init__(self) -> None:
        form = parse_weight_format(self.format)
        if self.weight is None:
            self.weight = random_weight(form, self.n, self.k, np.random.default_rng(self.n))
        self.batch = make_batch(MAX_ROWS, 1, MAX_ROWS, ())
        self.act = make_act(self.k, MAX_ROWS, THREADS, [form])
        self.out, self.whole = make_rows(self.n, MAX_ROWS), make_rows(self.n, MAX_ROWS)
        args = self.batch, self.act, self.weight, None
        (self.screened,) = cpu.build_linear(LinearArgs(*args, self.out, False, True, may_screen=True))
        (self.plain,) = cpu.build_linear(LinearArgs(*args, self.whole, False, True))

    def __call__(self, x: F32Array, *, largest_only: bool = True) -> tuple[F32Array, F32Array]:
        """Outputs of these rows: of a step after those in which a screen is made ready; and in full."""
        write_act(self.act, torch.from_numpy(x))
        self.batch.counts[LOGIT_ROWS] = len(x)
        self.batch.counts[LARGEST_ONLY] = largest_only
        for _ in range(33 if len(x) <= FEW else 2):
            self.out[:] = 0
            self.screened.run()
        self.plain.run()
        return self.out[: len(x), : self.n], self.whole[: len(x), : self.n]


def codes_of(weight: PackedWeight) -> npt.NDArray[np.int8]:
    """[panels, groups, 16 * group], to be changed in place."""
    panels, groups = -(-weight.n // 16), weight.k // weight.format.group
    return weight.data.reshape(panels, groups, -1)[:, :, 32:].view(np.int8)


def assert_same_largest(found: F32Array, expected: F32Array) -> None:
    for row, right in zip(found, expected, strict=True):
        if np.isfinite(right).all():
            assert np.isfinite(row).all()
            assert np.array_equal(np.flatnonzero(row == row.max()), np.flatnonzero(right == right.max()))
            assert row.max() == right.max()
        else:
            assert np.array_equal(row, right, equal_nan=True)


few_or_many = st.one_of(st.integers(1, FEW), st.integers(1, MAX_ROWS))


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=few_or_many,
    spread=st.sampled_from([1e-3, 1.0, 30.0]),
    bits=st.sampled_from([2, 3, 4, 5, 8]),
)
@settings(max_examples=80, deadline=None)
def test_the_largest_output_is_the_one_found_without_a_screen(seed: int, rows: int, spread: float, bits: int) -> None:
    """Also where weights differ in their lowest bits alone, of which bounds know nothing."""
    head, rng = Head(333), np.random.default_rng(seed)
    codes = codes_of(head.weight)
    codes[:] = codes[:1, :1, :1] & -(1 << (bits - 1)) | codes & ((1 << (bits - 1)) - 1)
    x = rng.standard_normal((rows, head.k)) * np.exp(spread * rng.standard_normal((rows, head.k)) / 10)
    assert_same_largest(*head(x.astype(np.float32)))


@pytest.mark.parametrize("format", ["int8g32", "int8g64"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 16, 17, 70, 128, 129])
def test_few_and_many_rows_find_the_largest_on_every_instruction_set(rows: int, format: str, isa: str) -> None:
    head = Head(500, 128, format)
    x = np.random.default_rng(rows).standard_normal((rows, head.k)).astype(np.float32)
    found, expected = head(x)
    assert_same_largest(found, expected)
    is_screened = isa in ("amx", "avx512") and (rows <= FEW or 7 <= rows <= 128)
    assert np.array_equal(found, expected) != is_screened


def test_without_the_flag_every_output_is_whole(isa: str) -> None:
    head = Head(500)
    x = np.random.default_rng(1).standard_normal((20, head.k)).astype(np.float32)
    head(x)
    assert np.array_equal(*head(x, largest_only=False))


@pytest.mark.parametrize("rows", [2, 16])
def test_all_that_are_equally_large_are_found(rows: int, isa: str) -> None:
    format = parse_weight_format("int8g32")
    weight = random_weight(format, 32, 96, np.random.default_rng(0))
    twice = PackedWeight(format, 320, 96, np.concatenate([weight.data] * 10))
    x = np.random.default_rng(2).standard_normal((rows, 96)).astype(np.float32)
    found, expected = Head(320, weight=twice)(x)
    assert_same_largest(found, expected)
    assert all((row == row.max()).sum() >= 10 for row in found)


@pytest.mark.parametrize("rows", [2, 16])
def test_outputs_that_only_pad_the_last_panel_win_nothing(rows: int, isa: str) -> None:
    """Below zero all, where what pads them is zero."""
    format = parse_weight_format("int8g32")
    weight = random_weight(format, 35, 96, np.random.default_rng(0))
    panels = weight.data.reshape(3, 3, -1)
    scales, codes = panels[:, :, :32].view(np.float16), codes_of(weight)
    scales[:], codes[:] = np.abs(scales), -np.minimum(np.abs(codes), 127)
    x = np.random.default_rng(3).uniform(0.5, 1.5, (rows, 96)).astype(np.float32)
    found, expected = Head(35, weight=weight)(x)
    assert (expected < 0).all()
    assert_same_largest(found, expected)


@pytest.mark.parametrize("together", [FEW, 16])
def test_rows_without_bounds_are_computed_whole_and_the_others_are_not_disturbed(together: int, isa: str) -> None:
    head = Head(500)
    x = np.random.default_rng(4).standard_normal((16, head.k)).astype(np.float32)

    def outputs() -> tuple[F32Array, F32Array]:
        parts = [[part.copy() for part in head(x[at : at + together])] for at in range(0, 16, together)]
        return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])

    alone = outputs()[0]
    x[3, 5], x[7, 40], x[9], x[11], x[12] = np.nan, np.inf, 0.0, 3e37, 1e-39
    x[13] *= 1e-22
    x[14] *= 1e-26
    with np.errstate(invalid="ignore", over="ignore"):
        found, expected = outputs()
    assert_same_largest(found, expected)
    assert np.isnan(found[3]).all()
    usual = [row for row in range(16) if row not in (3, 7, 9, 11, 12, 13, 14)]
    assert np.array_equal(found[usual].argmax(1), alone[usual].argmax(1))


SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from llmctl.kernels import registry
from llmctl.kernels.cpu import ops as cpu
from llmctl.kernels.cpu.pack import packed_bytes
from llmctl.kernels.cpu import ops as cpu
from llmctl.kernels.formats import parse_weight_format
from llmctl.kernels.ops import LARGEST_ONLY, LOGIT_ROWS, LinearArgs, PackedWeight, make_act, make_batch, make_rows

n, k, rows, may_screen = map(int, sys.argv[1:])
registry.configure("auto", 1)
form = parse_weight_format("int8g32")
weight = PackedWeight(form, n, k, np.ones(packed_bytes(form, n, k), np.uint8))
batch, act, out = make_batch(rows, 1, rows, ()), make_act(k, rows, 1, [form]), make_rows(n, rows)
out[:] = 1
for array in (act.values, *(part for form in act.forms for part in (form.codes, form.scales, form.sums))):
    array[:] = 1
resident = lambda: 4096 * int(Path('/proc/self/statm').read_text().split()[1])
before = resident()
(op,) = cpu.build_linear(LinearArgs(batch, act, weight, None, out, False, True, may_screen=bool(may_screen)))
for logit_rows, steps in ((rows, 3), (4, 40)):
    batch.counts[[LOGIT_ROWS, LARGEST_ONLY]] = logit_rows, 1
    for _ in range(steps):
        op.run()
print(resident() - before)
"""


def test_the_screen_takes_the_memory_that_is_counted_for_it() -> None:
    if "avx512" not in _cpu.isas():
        pytest.skip("no AVX-512 here")
    n, k, rows = 64000, 256, 128
    taken = []
    for may_screen in (0, 1):
        sizes = n, k, rows, may_screen
        command = [sys.executable, "-c", SCRIPT, *map(str, sizes)]
        taken.append(int(subprocess.run(command, cwd="/", text=True, capture_output=True, check=True).stdout))
    counted = screen_scratch_bytes(n, k, rows)
    assert abs(taken[1] - taken[0] - counted) < 0.1 * counted
