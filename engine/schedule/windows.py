"""KV groups of layers with a window: their blocks go when the window has passed them, while the sequence runs.

A layer that sees the last `window` positions never reads an older one again. Its group has a pool of its own, much
smaller than that of the layers which see everything, and each sequence a `WindowTable` of the blocks that it still
holds. What the tree publishes is cached here as well, by node, until the pool needs the block; so the tree may know a
prefix that some group cannot serve, and a hit is the longest length that every group can (`serve`).

Among cached blocks the one nobody has held for longest goes first. A sequence gives back what is behind its window
long before its end, so what remains longest are the ends of prompts and conversations: the places where hits end.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Some
from dataclasses import dataclass
from typing import NamedTuple

from .blocks import BlockPool, BlockState
from .node import Node
from .sequence import Sequence, WindowTable


@dataclass(frozen=True, slots=True)
class WindowLimit:
    """A group's window in positions, and the blocks of its pool."""

    window: int
    num_blocks: int

    def blocks_of_one(self, block_size: int) -> int:
        """Blocks that one sequence holds while it decodes, at most."""
        return blocks_behind(self.window, block_size)


def blocks_behind(window: int, block_size: int) -> int:
    """Blocks that a sequence of any length holds in a group with this window while it decodes, at most.

    The window begins and ends inside a block, and there is one block of slack.
    """
    return window // block_size + 3


class WindowStart(NamedTuple):
    """What a sequence begins with in one group: blocks to share, the first at `first`, and one to copy from or -1."""

    first: int
    blocks: tuple[int, ...]
    source: int = -1


class Windows:
    """All groups with a window, as one face for `KVMemory`. Without any it does nothing."""

    def __init__(self, limits: Iterable[WindowLimit], block_size: int) -> None:
        self._groups = tuple(_Group(limit, block_size) for limit in limits)
        self._block_size = block_size
        self._running: dict[int, Sequence] = {}  # by order, those that have tables here

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        return tuple(group.pool for group in self._groups)

    def available(self, most: int) -> int:
        """Blocks that can be had in every group without taking any from a sequence, at most `most`."""
        for group in self._groups:
            most = min(most, group.available)
        return most

    def serve(self, nodes: Some[Node], tokens: int) -> int:
        """The longest prefix of the first `tokens` tokens, which `nodes` are the path of, that every group has."""
        before = -1
        while tokens != before:
            before = tokens
            for group in self._groups:
                tokens = group.serve(nodes, tokens)
        return tokens

    def start(self, nodes: Some[Node], tokens: int) -> tuple[WindowStart, ...]:
        """The start at `tokens`, which `serve` gave."""
        return tuple(group.start(nodes, tokens) for group in self._groups)

    def fork(self, other: Sequence, tokens: int) -> tuple[WindowStart, ...] | None:
        """The start that another sequence's first `tokens` tokens give; None if some window has passed it."""
        starts = [group.fork(table, tokens) for group, table in zip(self._groups, other.windows)]
        found = tuple(start for start in starts if start is not None)
        return found if len(found) == len(starts) else None

    def affordable(self, seq: Sequence, starts: tuple[WindowStart, ...]) -> bool:
        """Whether every group has what the sequence needs soon, besides what those running do."""
        for place, (group, start) in enumerate(zip(self._groups, starts)):
            running = self._running.values()
            promised = sum(group.missing(each, len(each.windows[place].blocks)) for each in running)
            if group.missing(seq, len(start.blocks)) + group.idle_of(start) > group.available - promised:
                return False
        return True

    def begin(self, seq: Sequence, starts: tuple[WindowStart, ...], copies: bool) -> tuple[int, ...]:
        """Give the sequence its tables; if its start `copies`, the blocks to copy into."""
        if not self._groups:
            return ()
        self._running[seq.order] = seq
        nothing = (WindowStart(0, ()),) * len(self._groups)
        for group, start in zip(self._groups, starts or nothing):
            seq.windows.append(group.begin(start, copies))
        return tuple(table.blocks[-1] for table in seq.windows) if copies else ()

    def grow(self, seq: Sequence, columns: int) -> None:
        """Extend the tables to so many columns."""
        for group, table in zip(self._groups, seq.windows):
            group.grow(table, columns)

    def publish(self, seq: Sequence, place: int, node: Node) -> None:
        """The tree knows the content of the sequence's block at `place` as `node`."""
        for group, table in zip(self._groups, seq.windows):
            group.publish(table, place, node)

    def trim(self, seq: Sequence) -> None:
        """Give back what no position behind those computed sees, but for one that a twin may begin with."""
        for group, table in zip(self._groups, seq.windows):
            group.trim(table, seq.computed)

    def release(self, seq: Sequence) -> None:
        """Take all of the sequence's blocks back."""
        for group, table in zip(self._groups, seq.windows):
            group.release(table)
        seq.windows = []
        self._running.pop(seq.order, None)

    def drop_held(self) -> None:
        """Give back what copies of the step now made are from."""
        for group in self._groups:
            group.drop_held()


class _Group:
    """One pool, and the cached blocks in it."""

    def __init__(self, limit: WindowLimit, block_size: int) -> None:
        self.pool = BlockPool(limit.num_blocks)
        self._window = limit.window
        self._most = limit.blocks_of_one(block_size)
        self._block_size = block_size
        self._block_of: dict[Node, int] = {}
        self._node_of: dict[int, Node] = {}
        self._idle: dict[int, None] = {}  # cached blocks, the one that was given back first in front
        self._held: list[int] = []

    @property
    def available(self) -> int:
        return self.pool.num_free + self.pool.num_cached

    def serve(self, nodes: Some[Node], tokens: int) -> int:
        size = self._block_size
        while tokens > 0:
            first, last = self._seen_from(tokens), (tokens - 1) // size
            gone = next((i for i in range(last, first - 1, -1) if nodes[i] not in self._block_of), None)
            if gone is None:
                return tokens
            tokens = gone * size
        return 0

    def start(self, nodes: Some[Node], tokens: int) -> WindowStart:
        whole, copied = divmod(tokens, self._block_size)
        first = min(self._seen_from(tokens), whole)
        blocks = tuple(self._block_of[node] for node in nodes[first:whole])
        return WindowStart(first, blocks, self._block_of[nodes[whole]] if copied else -1)

    def fork(self, table: WindowTable, tokens: int) -> WindowStart | None:
        whole, copied = divmod(tokens, self._block_size)
        first = min(self._seen_from(tokens), whole)
        if first < table.first:
            return None
        blocks = tuple(table.blocks[first - table.first : whole - table.first])
        return WindowStart(first, blocks, table.blocks[whole - table.first] if copied else -1)

    def missing(self, seq: Sequence, held: int) -> int:
        """Blocks the sequence needs besides those it holds, for its known tokens and one block's worth to come."""
        soon = min(len(seq.tokens) + seq.pending + self._block_size, seq.goal)
        return max(0, min(-(-soon // self._block_size), self._most) - held)

    def idle_of(self, start: WindowStart) -> int:
        """By how much `available` falls when the start's blocks are taken into use."""
        blocks = start.blocks if start.source < 0 else (*start.blocks, start.source)
        return sum(self.pool.state(block) is BlockState.CACHED for block in blocks)

    def begin(self, start: WindowStart, copies: bool) -> WindowTable:
        for block in start.blocks:
            self._share(block)
        table = WindowTable(start.first, list(start.blocks))
        if copies:
            self._share(start.source)
            self._held.append(start.source)
            table.blocks += self._take(1)
        return table

    def grow(self, table: WindowTable, columns: int) -> None:
        missing = columns - table.end
        if missing > 0:
            table.blocks += self._take(missing)

    def publish(self, table: WindowTable, place: int, node: Node) -> None:
        """A node whose block was taken gets the sequence's own, unless that is another's already."""
        if place < table.first or node in self._block_of:
            return
        block = table.blocks[place - table.first]
        if not self.pool.published(block):
            self.pool.publish(block)
            self._block_of[node] = block
            self._node_of[block] = node

    def trim(self, table: WindowTable, computed: int) -> None:
        passed = max(0, computed - self._window) // self._block_size - table.first
        if passed > 0:
            for block in table.blocks[:passed]:
                self._release(block)
            del table.blocks[:passed]
            table.first += passed

    def release(self, table: WindowTable) -> None:
        for block in table.blocks:
            self._release(block)

    def drop_held(self) -> None:
        for block in self._held:
            self._release(block)
        self._held.clear()

    def _seen_from(self, position: int) -> int:
        """The first block of which `position` sees something."""
        return max(0, position + 1 - self._window) // self._block_size

    def _take(self, count: int) -> list[int]:
        while self.pool.num_free < count:
            block = next(iter(self._idle))
            del self._idle[block]
            del self._block_of[self._node_of.pop(block)]
            self.pool.unpublish(block)
        return self.pool.take(count)

    def _share(self, block: int) -> None:
        self.pool.share(block)
        self._idle.pop(block, None)

    def _release(self, block: int) -> None:
        if self.pool.release(block) is BlockState.CACHED:
            self._idle[block] = None
