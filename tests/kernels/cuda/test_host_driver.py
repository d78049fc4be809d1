"""The driver that stands in for a GPU's: what it puts off, what it writes down, and the misuse that it finds."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from llmctl.kernels.cuda.driver import OutOfMemory, pack_arguments
from llmctl.kernels.cuda.host_driver import HostDriver, Misuse
from llmctl.kernels.cuda.source import Kernel

KERNEL = Kernel("step.cuh", "gather_tokens")


class Bench:
    """A driver that computes nothing, a stream of it, and some memory of both kinds."""

    def __init__(self) -> None:
        self.driver = HostDriver(None, memory_total=1 << 20)
        self.driver.open(0)
        self.stream = self.driver.stream()
        self.device = self.driver.allocate(1024)
        self.pinned = self.driver.pin(1024)
        self.function = self.driver.load(self.driver.get(KERNEL))

    def launch(self, *pointers: int, shared: int = 0) -> None:
        arguments = pack_arguments([ctypes.c_void_p(pointer) for pointer in pointers])
        self.driver.launch(self.function, (1, 1, 1), 32, shared, self.stream, arguments)

    def host(self) -> np.ndarray:
        return np.frombuffer((ctypes.c_ubyte * 1024).from_address(self.pinned), np.uint8)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def after_free(b: Bench) -> None:
    b.driver.free(b.device)
    b.launch(b.device)


def twice_freed(b: Bench) -> None:
    b.driver.free(b.device)
    b.driver.free(b.device)


def replayed_after_free(b: Bench) -> None:
    b.driver.begin_capture(b.stream)
    b.launch(b.device)
    graph, _ = b.driver.end_capture(b.stream)
    b.driver.free(b.device)
    b.driver.replay(graph, b.stream)
    b.driver.synchronize(b.stream)


def replayed_after_destroy(b: Bench) -> None:
    b.driver.begin_capture(b.stream)
    graph, _ = b.driver.end_capture(b.stream)
    b.driver.destroy_graph(graph)
    b.driver.replay(graph, b.stream)


def source_changed(b: Bench) -> None:
    b.driver.upload(b.device, b.pinned, 64, b.stream)
    b.host()[3] = 7
    b.driver.synchronize(b.stream)


def target_used(b: Bench) -> None:
    b.driver.download(b.pinned, b.device, 64, b.stream)
    b.host()[3] = 7
    b.driver.synchronize(b.stream)


def unordered(write: bool) -> Callable[[Bench], None]:
    """A copy on a stream of its own, and a fill of what it reads or writes that does not wait for it."""

    def run(b: Bench) -> None:
        b.driver, b.pinned = HostDriver(Path("unused")), 0
        b.driver.open(0)
        pinned, device = b.driver.pin(1024), b.driver.allocate(1024)
        compute, copies, computed = b.driver.stream(), b.driver.stream(), b.driver.event()
        b.driver.fill(device, 1, 1024, compute)
        b.driver.record(computed, compute)
        b.driver.follow(copies, computed)
        if write:
            b.driver.upload(device, pinned, 64, copies)
        else:
            b.driver.download(pinned, device, 64, copies)
        b.driver.fill(device, 2, 1024, compute)
        b.driver.synchronize(compute)
        b.driver.synchronize(copies)

    return run


def captured(call: Callable[[Bench], object]) -> Callable[[Bench], None]:
    def run(b: Bench) -> None:
        b.driver.begin_capture(b.stream)
        call(b)

    return run


MISUSE: dict[str, tuple[Callable[[Bench], object], str]] = {
    "a launch with freed memory": (after_free, "not in device memory"),
    "memory freed twice": (twice_freed, "was freed already"),
    "a graph whose memory is gone": (replayed_after_free, "not in device memory"),
    "a graph that is gone": (replayed_after_destroy, "destroyed or never made"),
    "a copy beyond the end": (lambda b: b.driver.upload(b.device + 1000, b.pinned, 64, b.stream), "its target"),
    "a copy from unpinned memory": (
        lambda b: b.driver.upload(b.device, int(np.zeros(64).ctypes.data), 64, b.stream), "pinned memory"
    ),
    "a copy within the device that overlaps": (
        lambda b: b.driver.move(b.device, b.device + 8, 64, b.stream), "overlap"
    ),
    "a source written before its copy is done": (source_changed, "changed before it was waited for"),
    "a target used before its copy is done": (target_used, "used before it was waited for"),
    "too much shared memory": (lambda b: b.launch(b.device, shared=100_000), "were not allowed"),
    "a wait in a capture": (captured(lambda b: b.driver.synchronize(b.stream)), "synchronize while"),
    "an allocation in a capture": (captured(lambda b: b.driver.allocate(16)), "allocate while"),
    "a kernel loaded in a capture": (captured(lambda b: b.driver.load(b.driver.get(KERNEL))), "load while"),
    "a copy with the host in a capture": (
        captured(lambda b: b.driver.upload(b.device, b.pinned, 4, b.stream)), "upload while"
    ),
    "a copy of what another stream changes": (unordered(False), "reads 64 bytes at .* that another stream changed"),
    "a copy to what another stream changes": (unordered(True), "writes 64 bytes at .* that another stream changed"),
    "an event that a captured stream waits for": (
        captured(lambda b: b.driver.follow(b.stream, b.driver.event())), "follow while"
    ),
    "memory left behind": (lambda b: b.driver.close(), "were not freed"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_found(bench: Bench, name: str) -> None:
    misuse, message = MISUSE[name]
    with pytest.raises(Misuse, match=message):
        misuse(bench)


def test_what_is_done_right_is_written_down_in_order(bench: Bench) -> None:
    driver = bench.driver
    event = driver.event()
    driver.calls.clear()
    driver.upload(bench.device, bench.pinned, 64, bench.stream)
    bench.launch(bench.device + 1024)
    driver.download(bench.pinned, bench.device, 64, bench.stream)
    driver.record(event, bench.stream)
    assert not driver.came(event)
    driver.wait(event)
    assert driver.came(event)
    bench.host()[:] = 0  # the copies are done
    driver.synchronize(bench.stream)
    assert [call.name for call in driver.calls] == [
        "upload", "launch", "download", "record", "wait", "synchronize"
    ]  # fmt: skip
    assert driver.launches[0].kernel == "gather_tokens"
    assert driver.launches[0].numbers == (1, 1, 1, 32, 0, bench.device + 1024)


def test_memory_runs_out_where_it_ends(bench: Bench) -> None:
    free, total = bench.driver.memory()
    assert (free, total) == ((1 << 20) - 1024, 1 << 20)
    bench.driver.allocate(free)
    with pytest.raises(OutOfMemory, match="no room for 1 bytes"):
        bench.driver.allocate(1)


def test_streams_that_follow_each_other_are_in_order() -> None:
    driver = HostDriver(Path("unused"))
    driver.open(0)
    pinned, device = driver.pin(64), driver.allocate(64)
    compute, copies = driver.stream(), driver.stream()
    computed, copied = driver.event(), driver.event()
    driver.fill(device, 1, 64, compute)
    driver.record(computed, compute)
    driver.follow(copies, computed)
    driver.download(pinned, device, 64, copies)
    driver.record(copied, copies)
    driver.follow(compute, copied)
    driver.fill(device, 2, 64, compute)
    driver.synchronize(compute)  # which does what the other stream has to have done
    assert driver.came(copied) and (ctypes.c_ubyte * 64).from_address(pinned)[5] == 1
    assert (ctypes.c_ubyte * 64).from_address(device)[5] == 2
