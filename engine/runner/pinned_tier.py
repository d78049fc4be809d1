"""Tier 2 of the KV cache on a GPU: pinned host memory with places, each for one block of the groups that share it.

A block is one stretch of the arena, so a swap is one asynchronous copy for each group. Copies have a stream of their
own, on which they stand in the order of the swaps, and events put them in order with what computes:

- they begin when all steps before have been computed, which may have written or read these blocks;
- a step waits for them if one is of a block that it may write itself;
- if not, the step after it does. Blocks that are read back are used when the step's result is known, no sooner.

So what a step reads back, and what it writes out of blocks that stay, is copied while it computes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from ...kernels.cuda.driver import OutOfMemory
from ...kernels.cuda.gpu import Gpu
from ...kernels.errors import CapacityError
from ...kernels.ops import U8Array
from ..schedule.step import Swap
from ..sizes import format_bytes
from .shelves import Shelves

log = logging.getLogger(__name__)


class PinnedTier:
    """The places, and the copies between them and the arenas."""

    def __init__(self, gpu: Gpu, memory: U8Array, shelves: Shelves) -> None:
        self._gpu, self._memory, self._shelves = gpu, memory, shelves
        driver = gpu.driver
        self._stream, self._computed = driver.stream(), driver.event()
        self._moved = 0  # the event of moves that the next step has to wait for

    def join(self) -> None:
        """Let what computes from now on wait for all moves that were started."""
        if self._moved:
            self._gpu.driver.follow(self._gpu.stream, self._moved)
            self._moved = 0

    def move(self, swaps: Iterable[Swap], written: Collection[tuple[int, int]], begun: int, moved: int) -> None:
        """Start these moves, one after the other; none of them can go wrong. `join` stands before.

        written  (group, block) that the step which begins with them may write
        begun, moved  events around them
        """
        base, driver, stream = int(self._memory.ctypes.data), self._gpu.driver, self._stream
        driver.record(self._computed, self._gpu.stream)
        driver.follow(stream, self._computed)
        driver.record(begun, stream)
        leaving = False
        for swap in swaps:
            groups, offset = self._shelves.spot(swap.place)
            place = base + offset
            for cache, block in zip(groups, swap.blocks):
                arena, size = self._gpu.address(cache.arena), cache.bytes_per_block
                if swap.out:
                    driver.download(place, arena + block * size, size, stream)
                    leaving = leaving or (cache.index, block) in written
                else:
                    driver.upload(arena + block * size, place, size, stream)
                place += size
        driver.record(moved, stream)
        self._moved = moved
        if leaving:
            self.join()

    def close(self) -> None:
        """Give the stream back. All moves must have been waited for."""
        driver = self._gpu.driver
        driver.synchronize(self._stream)
        driver.destroy_event(self._computed)
        driver.destroy_stream(self._stream)


def open_pinned_tier(gpu: Gpu, shelves: Shelves, block_size: int) -> PinnedTier:
    """A tier of these places. CapacityError if the host has not as much memory to pin."""
    needed = shelves.num_bytes
    try:
        memory = gpu.pin(needed)
    except OutOfMemory as error:
        raise CapacityError(
            f"the host gives no {format_bytes(needed)} of pinned memory for swapped KV blocks",
            "use a smaller `--swap-space`, which on a GPU is the host's memory",
        ) from error
    log.info("swap space: %s blocks of %d tokens, %s of pinned memory", shelves, block_size, format_bytes(needed))
    return PinnedTier(gpu, memory, shelves)
