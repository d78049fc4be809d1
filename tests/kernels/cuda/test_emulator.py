"""The emulator finds every planted defect, in the line that has it, and is silent about kernels without one."""

import ctypes
import math
import platform
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from llmctl.kernels.cuda.emulate import Emulation, build
from llmctl.kernels.cuda.source import FOLDER, Kernel

HEADER = "emu/selftest.cuh"
ONE_BLOCK, TWO_BLOCKS = (1, 1, 1), (2, 1, 1)


@dataclass(frozen=True)
class Planted:
    """One kernel of the self-test: how it is launched and what has to be said of it ("" for nothing)."""

    name: str
    expected: str
    inputs: int = 1
    grid: tuple[int, int, int] = ONE_BLOCK
    threads: int = 32
    shared_bytes: int = 0
    finishes: bool = True


PLANTED = (
    Planted("reduce<true>", "", grid=TWO_BLOCKS, threads=128, shared_bytes=512),
    Planted("reduce<false>", "race on shared memory", threads=128, shared_bytes=512),
    Planted("neighbours<true>", "", shared_bytes=128),
    Planted("neighbours<false>", "race on shared memory", shared_bytes=128),
    Planted("shuffle_as_fence", "race on shared memory", shared_bytes=128),
    Planted("barrier_in_branch", "deadlock: 40 threads wait at", inputs=0, threads=64, finishes=False),
    Planted("two_barriers", "different barriers", inputs=0, threads=64),
    Planted("lane_not_in_mask", "calling lane is not in the mask", inputs=0, finishes=False),
    Planted("diverged_shuffle", "deadlock: 16 threads wait at", inputs=0, finishes=False),
    Planted("shared_overrun", "out of bounds of shared memory", inputs=0, shared_bytes=64, finishes=False),
    Planted("global_overrun", "out of bounds", inputs=0, threads=257, finishes=False),
    Planted("misaligned_load", "not aligned to 16 bytes", threads=1),
    Planted("unwritten_shared", "uninitialised read of shared memory", inputs=0, shared_bytes=128),
    Planted("blocks_write_one_place", "race on out", inputs=0, grid=TWO_BLOCKS, threads=1),
    Planted("atomics", "", inputs=0, grid=TWO_BLOCKS, threads=64),
    Planted("atomic_and_store", "race on out", inputs=0, grid=TWO_BLOCKS, threads=1),
    Planted("copied<0, false>", "never waited for", threads=1, shared_bytes=16),
    Planted("copied<1, false>", "before its wait", threads=1, shared_bytes=16),
    Planted("copied<2, true>", "", threads=64, shared_bytes=1024),
    Planted("ring<true>", "", threads=64, shared_bytes=1024),
    Planted("ring<false>", "race on shared memory", threads=64, shared_bytes=1024),
)
OTHERS = ("write_to_input", "unwritten_global", "multiply<Half>", "multiply<Bf16>")


def kernel(name: str) -> Kernel:
    head, angle, rest = name.partition("<")
    return Kernel(HEADER, f"selftest::{head}{angle}{rest}")


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.fixture(scope="module")
def checked(builds: Path) -> Emulation:
    return build([kernel(name) for name in (*(p.name for p in PLANTED), *OTHERS)], "checked", builds)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
@pytest.mark.parametrize("order", ["ascending", "descending", "random"])
def test_every_planted_defect_is_named_and_clean_kernels_are_not(checked: Emulation, planted: Planted, order) -> None:
    out, data = np.ones(256, np.int32 if "atomic" in planted.name else np.float32), np.ones(256, np.float32)
    checked.order(order, seed=7)
    checked.register(out.ctypes.data, out.nbytes, "out")
    checked.register(data.ctypes.data, data.nbytes, "in", read_only=True)
    arguments = [pointer(out), pointer(data)][: 1 + planted.inputs]
    finished = checked.launch(kernel(planted.name), planted.grid, planted.threads, planted.shared_bytes, arguments)
    reports = checked.reports()
    checked.forget()
    assert finished == planted.finishes
    if planted.expected:
        assert any(planted.expected in report for report in reports), reports
    else:
        assert reports == ()


def test_a_report_names_the_line_of_the_access(checked: Emulation) -> None:
    out, data = np.ones(32, np.float32), np.ones(32, np.float32)
    lines = (FOLDER / HEADER).read_text().splitlines()
    expected = 1 + next(i for i, line in enumerate(lines) if "in[0] = 0;" in line)
    checked.register(data.ctypes.data, data.nbytes, "in", read_only=True)
    checked.launch(kernel("write_to_input"), ONE_BLOCK, 1, 0, [pointer(data)])
    assert checked.reports() == (f"write to read-only in at selftest.cuh:{expected}",)
    checked.forget()
    checked.register(out.ctypes.data, out.nbytes, "out")
    checked.register(data.ctypes.data, data.nbytes, "scratch", written=False)
    checked.launch(kernel("unwritten_global"), ONE_BLOCK, 32, 0, [pointer(out), pointer(data)])
    (report,) = checked.reports()
    checked.forget()
    assert report.startswith("uninitialised read of scratch at selftest.cuh:")


@pytest.mark.parametrize("name", ["Half", "Bf16"])
def test_a_tensor_core_instruction_multiplies_as_its_layout_says(checked: Emulation, name: str) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.integers(-8, 9, (16, 16)), rng.integers(-8, 9, (8, 16))
    if name == "Half":
        stored = [x.astype(np.float16) for x in (a, b)]
    else:
        stored = [(x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for x in (a, b)]
    out = np.zeros((16, 8), np.float32)
    for array, label in ((out, "out"), (stored[0], "a"), (stored[1], "b")):
        checked.register(array.ctypes.data, array.nbytes, label)
    checked.launch(kernel(f"multiply<{name}>"), ONE_BLOCK, 32, 768, [pointer(x) for x in (out, *stored)])
    assert checked.reports() == ()
    checked.forget()
    assert np.array_equal(out, a @ b.T)


def test_a_launch_that_a_device_would_refuse_is_refused(checked: Emulation) -> None:
    out = np.zeros(1, np.float32)
    assert not checked.launch(kernel("global_overrun"), ONE_BLOCK, 2048, 0, [pointer(out)])
    assert checked.reports() == ("launch of 2048 threads in a grid of 1 x 1 x 1",)
    assert not checked.launch(kernel("global_overrun"), ONE_BLOCK, 32, 300_000, [pointer(out)])
    assert checked.reports() == ("launch with 300000 bytes of shared memory",)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="a second build would only repeat the first")
def test_reading_before_the_wait_is_poison_in_the_values_build(builds: Path) -> None:
    values = build([kernel("copied<1, false>")], "values", builds)
    out, data = np.zeros(4, np.float32), np.ones(4, np.float32)
    values.launch(kernel("copied<1, false>"), ONE_BLOCK, 1, 16, [pointer(out), pointer(data)])
    assert math.isnan(out[0])
