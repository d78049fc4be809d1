"""The free blocks of an arena in runs of powers of two that split and join: a buddy system (Knowlton, 1965).

One block is never refused while any is free, so runs are a convenience: what takes many blocks at once gets neighbours
where there are some, and what is copied or moved as a whole is then few stretches of memory. Nobody may rely on it.
"""

from __future__ import annotations

from collections.abc import Iterator


class FreeRuns:
    """Runs of 2^order free blocks, each at a multiple of its length; no two of them could be joined to a longer one.

    Taking and giving cost O(log n). Of runs of one order the one freed last is taken first: its memory is warm.
    """

    __slots__ = ("_runs", "count")

    def __init__(self, num_blocks: int) -> None:
        self.count = 0
        self._runs: list[dict[int, None]] = [{} for _ in range(num_blocks.bit_length())]
        first = 0
        for order in reversed(range(num_blocks.bit_length())):
            if num_blocks >> order & 1:
                self._runs[order][first] = None
                first += 1 << order
        self.count = num_blocks

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """First block and order of every run."""
        return ((first, order) for order, runs in enumerate(self._runs) for first in runs)

    def take(self, most: int) -> range:
        """The longest run of at most `most` blocks that can be had, split from the shortest that holds it.

        There is one: the caller looks at `count`.
        """
        wanted = min(most.bit_length(), len(self._runs)) - 1
        order = next((order for order in range(wanted, len(self._runs)) if self._runs[order]), -1)
        if order < 0:
            order = next(order for order in reversed(range(wanted)) if self._runs[order])
            wanted = order
        first, _ = self._runs[order].popitem()
        while order > wanted:
            order -= 1
            self._runs[order][first + (1 << order)] = None
        self.count -= 1 << wanted
        return range(first, first + (1 << wanted))

    def give(self, block: int) -> None:
        """The block is free again, and joins its neighbours as far as they are."""
        self.count += 1
        order = 0
        while (buddy := block ^ (1 << order)) in self._runs[order]:
            del self._runs[order][buddy]
            block = min(block, buddy)
            order += 1
        self._runs[order][block] = None
