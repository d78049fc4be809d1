"""Who used the CPUs: a server's process tree, this client, and anybody else. A ratio means little on a busy machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # of a `cpu` line: user, nice, system, irq, softirq, steal


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds of CPU time so far: of each named process tree, of this process, and of all on the CPUs in use."""

    at_s: float
    trees_s: tuple[float, ...]
    own_s: float
    busy_s: float


def read_usage(trees: Iterable[tuple[int, ...]], cpus: Iterable[int], proc: Path = _PROC) -> Usage:
    """Where it stands now. `trees` are the roots of process trees."""
    return Usage(
        time.monotonic(),
        tuple(tree_cpu_s(pids, proc) for pids in trees),
        time.process_time(),
        cpus_busy_s(set(cpus), proc),
    )


def tree_cpu_s(pids: Iterable[int], proc: Path = _PROC) -> float:
    """CPU seconds of these processes and their living descendants."""
    total, waiting, seen = 0.0, list(pids), set[int]()
    while waiting:
        pid = waiting.pop()
        if pid in seen:
            continue
        seen.add(pid)
        try:
            fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
            for thread in (proc / str(pid) / "task").iterdir():
                waiting += map(int, (thread / "children").read_text().split())
        except OSError:
            continue
        total += (int(fields[11]) + int(fields[12])) * _TICK_S
    return total


def cpus_busy_s(cpus: set[int], proc: Path = _PROC) -> float:
    """Seconds that these CPUs were not idle, added up."""
    total = 0.0
    for line in (proc / "stat").read_text().splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
            total += sum(int(values[field]) for field in _BUSY_FIELDS if field < len(values)) * _TICK_S
    return total
