"""What this machine can do at most, by our own probes (`kernels/cpu/probe.cpp`), on the pool's threads.

A kernel cannot be faster than its bytes come from where they lie, nor than its multiplications can be done; the nearer
of the two is its roof. Reading is measured from memory and from each cache, because rows of activations are in a cache
while weights and old keys and values are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np

from ....kernels import _cpu
from ....kernels.device import Machine

MEMORY_BYTES = 256 << 20  # read from memory: more than caches of ordinary machines hold
PROBE_S = 0.02
TRIES = 5

Clock = Callable[[], float]


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """Reading from one place: at most `bytes` lie there (0: any number), and come at `gbps`."""

    name: str
    bytes: int
    gbps: float


class Peaks(msgspec.Struct, frozen=True, kw_only=True):
    """The best of several probes. Gop/s count a multiply-add as two; levels go from the fastest to memory."""

    threads: int
    levels: tuple[Level, ...]
    fma_gops: float
    int16_gops: float
    int8_gops: float

    def level(self, working_bytes: float) -> Level:
        """Where a working set of this size lies when it is used over and over."""
        return next(level for level in self.levels if level.bytes >= working_bytes or not level.bytes)

    @property
    def memory(self) -> Level:
        return self.levels[-1]

    def gops(self, unit: str) -> float:
        """The peak of "fma", "int16" or "int8"."""
        return {"fma": self.fma_gops, "int16": self.int16_gops, "int8": self.int8_gops}[unit]


def measure_peaks(machine: Machine, limit_bytes: int, clock: Clock = time.perf_counter) -> Peaks:
    """Probe the machine; takes about a second. The buffer that is read has at most `limit_bytes`."""
    threads = _cpu.threads()
    size = max(1 << 20, min(limit_bytes, max(MEMORY_BYTES, 4 * machine.l3_bytes)))
    buffer = np.ones(size, np.uint8)
    levels = []
    for name, capacity, used in (
        ("L2", machine.l2_bytes * threads, machine.l2_bytes * threads // 2),
        ("L3", machine.l3_bytes, machine.l3_bytes // 2),
        ("memory", 0, size),
    ):
        if used == 0 or used > size:  # a cache that is not there, or larger than what may be used
            continue
        levels.append(Level(name=name, bytes=capacity, gbps=_best("read", buffer.ctypes.data, used, clock)))
    return Peaks(
        threads=threads,
        levels=tuple(levels),
        fma_gops=_best("fma", 0, 0, clock),
        int16_gops=_best("int16", 0, 0, clock),
        int8_gops=_best("int8", 0, 0, clock),
    )


def _best(what: str, data: int, size: int, clock: Clock) -> float:
    """Billions of bytes or operations per second, the best of TRIES runs of about PROBE_S each."""
    _, seconds = _timed(what, 1, data, size, clock)  # the threads wake up
    done, seconds = _timed(what, 1, data, size, clock)
    rounds = max(1, int(PROBE_S / max(seconds, 1e-7)))
    rates = []
    for _ in range(TRIES):
        done, seconds = _timed(what, rounds, data, size, clock)
        rates.append(done / max(seconds, 1e-9))
    return max(rates) / 1e9


def _timed(what: str, rounds: int, data: int, size: int, clock: Clock) -> tuple[float, float]:
    start = clock()
    done = _cpu.probe(what, rounds, data, size)
    return done, clock() - start
