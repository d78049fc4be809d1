"""Tier 2 of the KV cache on a GPU: pinned host memory with places, each for one block of the groups that share it.

A block is one stretch of the arena, so a swap is one asynchronous copy for each group, in the order of all else that
the GPU is given; the host waits for none of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

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

    def move(self, swaps: Iterable[Swap]) -> tuple[int, ...]:
        """Start these moves, one after the other; none of them can go wrong."""
        base, driver, stream = int(self._memory.ctypes.data), self._gpu.driver, self._gpu.stream
        for swap in swaps:
            groups, offset = self._shelves.spot(swap.place)
            place = base + offset
            for cache, block in zip(groups, swap.blocks):
                arena, size = self._gpu.address(cache.arena), cache.bytes_per_block
                if swap.out:
                    driver.download(place, arena + block * size, size, stream)
                else:
                    driver.upload(arena + block * size, place, size, stream)
                place += size
        return ()


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
