"""The blocks of one KV group: who holds them, and which are free.

The pool knows ids and counts, nothing of tokens or bytes. A block is held by block tables (its reference count) and may
besides be published, that is, known to the prefix tree. From these two facts follows its state: active while any table
holds it, cached when only the tree does, free when nobody does. Several blocks at once come in runs of neighbours where
there are some (`runs.py`), but no caller may rely on it, so there is no external fragmentation to fight.
"""

from __future__ import annotations

import enum

from .runs import FreeRuns

RUN = 16  # blocks of a run that is long enough to be moved as one


class BlockState(enum.Enum):
    """Where a block stands. free -> active -> (cached <-> active) -> free; nothing else is legal."""

    FREE = "free"
    ACTIVE = "active"
    CACHED = "cached"


class IllegalTransition(RuntimeError):
    """A block or a sequence was moved to a state that cannot follow its present one: a defect of ours."""


class BlockPool:
    """Blocks 0 .. num_blocks - 1 with their reference counts. An operation on one block costs O(log num_blocks)."""

    __slots__ = ("_active_in_run", "_free", "_published", "_refs", "num_blocks", "num_cached", "num_in_runs")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_cached = 0
        self._refs = [0] * num_blocks
        self._published = bytearray(num_blocks)
        self._free = FreeRuns(num_blocks)
        self._active_in_run = [0] * -(-num_blocks // RUN)
        self.num_in_runs = num_blocks  # not active, in runs of 16 or the arena's shorter last one

    @property
    def num_free(self) -> int:
        return self._free.count

    @property
    def num_active(self) -> int:
        return self.num_blocks - self.num_cached - self._free.count

    def refs(self, block: int) -> int:
        """How many holders `block` has, the tree not counted."""
        return self._refs[block]

    def published(self, block: int) -> bool:
        """Whether the prefix tree knows `block`."""
        return bool(self._published[block])

    def state(self, block: int) -> BlockState:
        if self._refs[block]:
            return BlockState.ACTIVE
        return BlockState.CACHED if self._published[block] else BlockState.FREE

    def take(self, count: int = 1) -> list[int]:
        """So many free blocks, now active with one holder each, in runs as long as there are."""
        if count > self._free.count:
            raise IllegalTransition(f"{count} blocks are wanted, {self._free.count} of {self.num_blocks} are free")
        taken: list[int] = []
        while len(taken) < count:
            taken += self._free.take(count - len(taken))
        for block in taken:
            self._refs[block] = 1
            self._activated(block)
        return taken

    def share(self, block: int) -> None:
        """One more holder of an active or cached block."""
        if self._refs[block] == 0:
            if not self._published[block]:
                raise IllegalTransition(f"block {block} is free and cannot be shared")
            self.num_cached -= 1
            self._activated(block)
        self._refs[block] += 1

    def release(self, block: int) -> BlockState:
        """One holder fewer; the state that leaves the block in."""
        if self._refs[block] == 0:
            raise IllegalTransition(f"block {block} is {self.state(block).value} and has no holder to release it")
        self._refs[block] -= 1
        if self._refs[block]:
            return BlockState.ACTIVE
        run = block // RUN
        self._active_in_run[run] -= 1
        if not self._active_in_run[run]:
            self.num_in_runs += self._length(run)
        if self._published[block]:
            self.num_cached += 1
            return BlockState.CACHED
        self._free.give(block)
        return BlockState.FREE

    def publish(self, block: int) -> None:
        """The tree now knows this active block."""
        if self._refs[block] == 0 or self._published[block]:
            raise IllegalTransition(f"block {block} is {self._describe(block)} and cannot be published")
        self._published[block] = 1

    def unpublish(self, block: int) -> None:
        """The tree forgets the block: a cached one is free again, an active one stays with its holders."""
        if not self._published[block]:
            raise IllegalTransition(f"block {block} is {self._describe(block)} and cannot be unpublished")
        self._published[block] = 0
        if self._refs[block] == 0:
            self.num_cached -= 1
            self._free.give(block)

    def _activated(self, block: int) -> None:
        run = block // RUN
        if not self._active_in_run[run]:
            self.num_in_runs -= self._length(run)
        self._active_in_run[run] += 1

    def _length(self, run: int) -> int:
        return min(RUN, self.num_blocks - run * RUN)

    def _describe(self, block: int) -> str:
        return f"{self.state(block).value}, {'published' if self._published[block] else 'not published'}"
