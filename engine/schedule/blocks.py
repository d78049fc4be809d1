"""The blocks of one KV group: who holds them, and which are free.

The pool knows ids and counts, nothing of tokens or bytes. A block is held by block tables (its reference count) and may
besides be published, that is, known to the prefix tree. From these two facts follows its state: active while any table
holds it, cached when only the tree does, free when nobody does. Blocks are taken one at a time: no caller may rely on
neighbours, so there is no external fragmentation to fight.
"""

from __future__ import annotations

import enum


class BlockState(enum.Enum):
    """Where a block stands. free -> active -> (cached <-> active) -> free; nothing else is legal."""

    FREE = "free"
    ACTIVE = "active"
    CACHED = "cached"


class IllegalTransition(RuntimeError):
    """A block or a sequence was moved to a state that cannot follow its present one: a defect of ours."""


class BlockPool:
    """Blocks 0 .. num_blocks - 1 with their reference counts. Every operation is O(1)."""

    __slots__ = ("_free", "_published", "_refs", "num_blocks", "num_cached")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_cached = 0
        self._refs = [0] * num_blocks
        self._published = bytearray(num_blocks)
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_active(self) -> int:
        return self.num_blocks - self.num_cached - len(self._free)

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

    def take(self) -> int:
        """A free block, now active with one holder."""
        if not self._free:
            raise IllegalTransition(f"none of {self.num_blocks} blocks is free")
        block = self._free.pop()
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder of an active or cached block."""
        if self._refs[block] == 0:
            if not self._published[block]:
                raise IllegalTransition(f"block {block} is free and cannot be shared")
            self.num_cached -= 1
        self._refs[block] += 1

    def release(self, block: int) -> BlockState:
        """One holder fewer; the state that leaves the block in."""
        if self._refs[block] == 0:
            raise IllegalTransition(f"block {block} is {self.state(block).value} and has no holder to release it")
        self._refs[block] -= 1
        if self._refs[block]:
            return BlockState.ACTIVE
        if self._published[block]:
            self.num_cached += 1
            return BlockState.CACHED
        self._free.append(block)
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
            self._free.append(block)

    def _describe(self, block: int) -> str:
        return f"{self.state(block).value}, {'published' if self._published[block] else 'not published'}"
