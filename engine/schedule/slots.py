"""The runner's slots: which are free, and which the runner has to be told are no longer used."""

from __future__ import annotations

import heapq

from .sequence import Sequence


class Slots:
    """Slots 0 .. count - 1. The lowest free one is given first, so that those in use stay close together."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._drops: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def give(self, seq: Sequence) -> None:
        """Let the sequence have the lowest free slot."""
        seq.slot = heapq.heappop(self._free)

    def restate(self, seq: Sequence) -> None:
        """The runner must forget what it knows of the sequence, which keeps its slot."""
        self._drops.append(seq.slot)

    def free(self, seq: Sequence) -> None:
        """Take the slot back, unless a step in flight still uses it: then this is called again."""
        if seq.slot >= 0 and seq.in_flight == 0:
            heapq.heappush(self._free, seq.slot)
            self._drops.append(seq.slot)
            seq.slot = -1

    def take_drops(self) -> tuple[int, ...]:
        """What the runner has to forget with the next step."""
        drops = tuple(self._drops)
        self._drops.clear()
        return drops
