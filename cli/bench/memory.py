"""The most memory that process trees held: PSS, where a shared page counts by its share, so processes add up."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from pathlib import Path

PERIOD_S = 0.5  # reading the page tables of a gigabyte takes milliseconds of a core

_PROC = Path("/proc")
_PSS = re.compile(r"^Pss:\s+(\d+) kB$", re.MULTILINE)


class PeakMemory:
    """Looks at the trees of `pids`, without those of `without`, until `stop`."""

    def __init__(self, pids: Iterable[int], without: Iterable[int] = ()) -> None:
        self._pids, self._without = tuple(pids), tuple(without)
        self._peak: int | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="llmctl-bench-memory", daemon=True)
        self._thread.start()

    def stop(self) -> int | None:
        """The peak in bytes after one last look, None if no process can be read."""
        self._stopped.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        self._look()
        while self._pids and not self._stopped.wait(PERIOD_S):
            self._look()
        self._look()

    def _look(self) -> None:
        found = tree_pss(self._pids, self._without)
        if found is not None:
            self._peak = max(self._peak or 0, found)


def tree_pss(pids: Iterable[int], without: Iterable[int] = (), proc: Path = _PROC) -> int | None:
    """Bytes of these processes and their descendants now, None if none of them can be read.

    A process that ends meanwhile, or belongs to another user, is passed over. `proc` is where /proc is found.
    """
    seen, waiting, total = set(without), list(pids), None
    while waiting:
        pid = waiting.pop()
        if pid in seen:
            continue
        seen.add(pid)
        try:
            rollup = (proc / str(pid) / "smaps_rollup").read_text()
            threads = sorted((proc / str(pid) / "task").iterdir())
            waiting += [int(child) for thread in threads for child in (thread / "children").read_text().split()]
        except OSError:
            continue
        found = _PSS.search(rollup)
        if found is not None:
            total = (total or 0) + (int(found[1]) << 10)
    return total
