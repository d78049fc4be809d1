"""Times kernels beside the machine's peaks: how near each comes to its roof.

Ops run in recorded programs of a few, as in the engine, so the time of one holds its share of a region's start and one
barrier. Each program is timed alone and the median counts. What there was no time or memory for is listed.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ....engine.load.progress import Progress
from ....kernels import registry
from ....kernels.device import Machine, read_machine
from ....kernels.errors import UsageError
from .cases import BLOCK_SIZE, Case, all_cases
from .peaks import Clock, Peaks, measure_peaks

WEAK_PERCENT = 70.0
TINY_S = 5e-6  # of roof: below it starting and meeting at a barrier is most of the time
POINT_S = 0.06  # spent on one case
PROGRAM_OPS = 16
MIN_RUNS = 3
COLD_BYTES = 64 << 20  # of weights or KV that the ops of a case go through, at least


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure. Empty tuples: everything. `only` are parts of case names; `isa` "": the best that accepts."""

    only: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()
    isa: str = ""
    limit_s: float = 120.0
    limit_bytes: int = 1 << 30

    def takes(self, case: Case) -> bool:
        return (
            (not self.sizes or case.size in self.sizes)
            and (not self.rows or case.rows in self.rows)
            and (not self.only or any(part in f"{case.name}/" for part in self.only))
        )


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel on one shape. Time is the median over `runs` programs, per op.

    gbps, gops  what it moved and computed per second
    roof        what bounds it: "memory", a cache, or "fma", "int16", "int8"
    percent     of that roof; may be above 100 where more comes from caches than was reckoned with
    weak        under 70 % of its roof; never for what is `tiny`
    """

    op: str
    size: str
    part: str
    format: str
    rows: int
    isa: str
    us: float
    runs: int
    gbps: float
    gops: float
    roof: str
    percent: float
    weak: bool
    tiny: bool


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A case that was not measured, and why."""

    name: str
    reason: str


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """Every measured kernel beside the peaks of the machine."""

    machine: Machine
    build: str
    threads: int
    peaks: Peaks
    points: tuple[Point, ...]
    skipped: tuple[Skipped, ...]


def measure(wanted: Wanted, threads: int, progress: Progress, clock: Clock = time.perf_counter) -> Roofline:
    """Measure what is wanted, on `threads` threads. Raises UsageError if nothing is."""
    cases = [case for case in all_cases() if wanted.takes(case)]
    if not cases:
        raise UsageError("no kernel has such a name", "names are such as `linear/0.1B/q_proj/int4g32/m16`")
    registry.configure("auto", threads)
    machine = read_machine()
    deadline = clock() + wanted.limit_s
    progress("peaks of this machine", 0, 0)
    peaks = measure_peaks(machine, wanted.limit_bytes // 2, clock)
    points: list[Point] = []
    skipped: list[Skipped] = []
    cold_target = min(max(COLD_BYTES, 2 * machine.l3_bytes), wanted.limit_bytes // 4)
    for number, case in enumerate(cases):
        progress("kernels", number, len(cases))
        entry, reason = None, ""
        if clock() >= deadline:
            reason = f"no time was left of {wanted.limit_s:g} s"
        elif case.needed_bytes(cold_target) > wanted.limit_bytes:
            reason = f"needs {case.needed_bytes(cold_target) >> 20} MiB of {wanted.limit_bytes >> 20} MiB"
        else:
            arguments = case.make(case.copies(cold_target), threads)
            entry, reason = _choose(case.op, arguments[0], wanted.isa)
        if entry is None:
            skipped.append(Skipped(name=case.name, reason=reason))
        else:
            points.append(_point(case, entry, arguments, peaks, clock))
    return Roofline(
        machine=machine,
        build=registry.build_id(),
        threads=threads,
        peaks=peaks,
        points=tuple(points),
        skipped=tuple(skipped),
    )


def _choose(op: str, arguments: object, isa: str) -> tuple[registry.Entry | None, str]:
    """(the entry that would be bound, "") or (None, why there is none)."""
    refusals = []
    for entry in registry.entries():
        if entry.op != op or (isa and entry.isa != isa):
            continue
        refusal = entry.accepts(arguments)
        if refusal is None:
            return entry, ""
        refusals.append(f"{entry.isa}: {refusal}")
    return None, "; ".join(refusals) or f"no kernel for instruction set `{isa}`"


def _point(case: Case, entry: registry.Entry, arguments: Sequence[Any], peaks: Peaks, clock: Clock) -> Point:
    programs = list(_programs(case, entry, arguments))
    programs[0][1]()
    times: list[float] = []
    spent, number = 0.0, 1
    while len(times) < MIN_RUNS or spent < POINT_S:
        count, run = programs[number % len(programs)]
        start = clock()
        run()
        seconds = clock() - start
        times.append(seconds / count)
        spent += max(seconds, 1e-6)
        number += 1
    seconds = max(statistics.median(times), 1e-9)
    moved = case.cold_bytes + case.warm_bytes
    roof_s, roof = _roof(case, peaks)
    percent, tiny = 100 * roof_s / seconds, roof_s < TINY_S
    return Point(
        op=case.op,
        size=case.size,
        part=case.part,
        format=case.format,
        rows=case.rows,
        isa=entry.isa,
        us=seconds * 1e6,
        runs=len(times),
        gbps=moved / seconds / 1e9,
        gops=case.ops / seconds / 1e9,
        roof=roof,
        percent=percent,
        weak=percent < WEAK_PERCENT and not tiny,
        tiny=tiny,
    )


def _programs(case: Case, entry: registry.Entry, arguments: Sequence[Any]) -> Iterator[tuple[int, Callable[[], None]]]:
    """(number of ops, what runs them), over all arguments."""
    if case.op == "sample":
        sample = entry.build(arguments[0])
        yield 1, functools.partial(sample, case.rows)
        return
    if case.op == "kv_copy":
        copy = entry.build(arguments[0])
        yield 1, functools.partial(copy, 0, 1, BLOCK_SIZE)
        return
    for start in range(0, len(arguments), PROGRAM_OPS):
        some = arguments[start : start + PROGRAM_OPS]
        ops = [op for one in some for op in entry.build(one)]
        yield len(some), registry.record(ops, some[0].batch).replay


def _roof(case: Case, peaks: Peaks) -> tuple[float, str]:
    """(the least seconds that one op can take, what bounds it)."""
    warm = peaks.level(case.warm_bytes)
    bounds = []
    if case.cold_bytes:
        bounds.append((case.cold_bytes / (peaks.memory.gbps * 1e9), peaks.memory.name))
    if case.warm_bytes and not case.cold_bytes:
        bounds.append((case.warm_bytes / (warm.gbps * 1e9), warm.name))
    if case.unit:
        bounds.append((case.ops / (peaks.gops(case.unit) * 1e9), case.unit))
    return max(bounds)


def pick(text: str, what: str, known: Sequence[str]) -> tuple[str, ...]:
    """The comma-separated names in `text`, each of which must be known. Raises UsageError for another."""
    names = tuple(filter(None, (name.strip() for name in text.split(","))))
    for name in names:
        if name not in known:
            raise UsageError(f"{what} has `{name}`", f"choose from: {', '.join(known)}")
    return names


def rows_of(text: str, known: Sequence[int]) -> tuple[int, ...]:
    """The comma-separated numbers of rows in `text`, all of them known."""
    return tuple(np.array(pick(text, "--rows", [str(row) for row in known]), int).tolist())
