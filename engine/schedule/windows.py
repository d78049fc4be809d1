"""KV groups of layers with a window: their blocks go when the window has passed them, while the sequence runs.

A layer that sees the last `window` positions never reads an older one again. Its group has a pool of its own, much
smaller than that of the layers which see everything, and each sequence a `WindowTable` of the blocks that it still
holds. What the tree publishes is cached here as well, by node, until the pool needs the block; so the tree may know a
prefix that some group cannot serve, and a hit is the longest length that every group can (`serve`).

Among cached blocks the one nobody has held for longest goes first. A sequence gives back what is behind its window
long before its end, so what remains longest are the ends of prompts and conversations: the places where hits end. Those
may be in tier 2 besides (`window_tier.py`), from where `wake` has them read back together for one sequence, after the
tree's own blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Some
from dataclasses import dataclass
from typing import NamedTuple

from .blocks import BlockPool, BlockState
from .node import Node
from .sequence import Sequence, WindowTable
from .tier import Tier
from .window_tier import WindowCopy, WindowTier


@dataclass(frozen=True, slots=True)
class WindowLimit:
    """A group's window in positions, the blocks of its pool, and its places in tier 2, each of so many bytes."""

    window: int
    num_blocks: int
    tier_blocks: int = 0
    bytes_per_block: int = 0

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

    def __init__(self, limits: Iterable[WindowLimit], block_size: int, first_place: int = 0) -> None:
        """Places in tier 2 are numbered from `first_place` on, group after group."""
        groups: list[_Group] = []
        for limit in limits:
            groups.append(_Group(limit, block_size, first_place))
            first_place += limit.tier_blocks
        self._groups = tuple(groups)
        self._block_size = block_size
        self._running: dict[int, Sequence] = {}  # by order, those that have tables here

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        return tuple(group.pool for group in self._groups)

    @property
    def tiers(self) -> tuple[tuple[Tier[WindowCopy], int], ...]:
        """Tier 2 of every group, and the bytes of a block there."""
        return tuple((group.copies.tier, group.bytes_per_block) for group in self._groups)

    def available(self, most: int) -> int:
        """Blocks that can be had in every group without taking any from a sequence, at most `most`."""
        for group in self._groups:
            most = min(most, group.available)
        return most

    def serve(self, nodes: Some[Node], tokens: int, *, asleep: bool = False) -> int:
        """The longest prefix of the first `tokens` tokens, which `nodes` are the path of, that every group has.

        `asleep`: with what only tier 2 has.
        """
        before = -1
        while tokens != before:
            before = tokens
            for group in self._groups:
                tokens = group.serve(nodes, tokens, asleep)
        return tokens

    def is_read(self, nodes: Some[Node], tokens: int) -> bool:
        """Whether some of what a start at `tokens` needs is on its way back from tier 2."""
        return any(group.copies.is_read(group.seen(nodes, tokens)) for group in self._groups)

    def renew(self, nodes: Some[Node], tokens: int) -> None:
        """What a start at `tokens` needs is of use soon: evict other blocks and give up other copies before."""
        for group in self._groups:
            group.renew(group.seen(nodes, tokens))

    def wake(self, seq: Sequence, nodes: Some[Node], tokens: int) -> int:
        """Have all that a start at `tokens` lacks read back for the sequence; how many blocks those are.

        0 if some group has no room for them beside what was promised to those running. What is there stays until then.
        """
        needs = [group.seen(nodes, tokens) for group in self._groups]
        for place, (group, seen) in enumerate(zip(self._groups, needs)):
            if group.falls_by(seen) > group.available - self._promised(place):
                return 0
        return sum(group.wake(seen, seq.leader.order) for group, seen in zip(self._groups, needs))

    def settle(self, failed: Some[int]) -> int:
        """See `KVMemory.settle`; how many moves it was."""
        return sum(group.settle(failed) for group in self._groups)

    def forget(self, node: Node) -> None:
        """The tree has forgotten the node: so does tier 2."""
        for group in self._groups:
            group.copies.forget(node)

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
            if group.missing(seq, len(start.blocks)) + group.idle_of(start) > group.available - self._promised(place):
                return False
        return True

    def _promised(self, place: int) -> int:
        """Blocks of a group that those running need soon."""
        group = self._groups[place]
        return sum(group.missing(each, len(each.windows[place].blocks)) for each in self._running.values())

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
            group.trim(table, seq.computed, seq.prompt_len)

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

    def __init__(self, limit: WindowLimit, block_size: int, first_place: int) -> None:
        self.pool = BlockPool(limit.num_blocks)
        self.copies = WindowTier(limit.tier_blocks, first_place)
        self.bytes_per_block = limit.bytes_per_block
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

    def serve(self, nodes: Some[Node], tokens: int, asleep: bool) -> int:
        size = self._block_size
        while tokens > 0:
            first, last = self._seen_from(tokens), (tokens - 1) // size
            gone = next((i for i in range(last, first - 1, -1) if not self._has(nodes[i], asleep)), None)
            if gone is None:
                return tokens
            tokens = gone * size
        return 0

    def seen(self, nodes: Some[Node], tokens: int) -> Some[Node]:
        """Those of the path whose blocks a start at `tokens` needs."""
        return nodes[min(self._seen_from(tokens), tokens // self._block_size) : self._end_of(tokens)]

    def renew(self, seen: Some[Node]) -> None:
        for node in seen:
            block = self._block_of.get(node)
            if block is not None:
                self.copies.want(node)
                if block in self._idle:
                    del self._idle[block]
                    self._idle[block] = None
        self.copies.renew(node for node in seen if node in self.copies)

    def falls_by(self, seen: Some[Node]) -> int:
        """By how much `available` falls when these nodes' blocks are taken into use, those in tier 2 into new ones."""
        blocks = [self._block_of.get(node) for node in seen]
        return sum(block is None or self.pool.state(block) is BlockState.CACHED for block in blocks)

    def wake(self, seen: Some[Node], request: int) -> int:
        if not self.copies.tier.ever:
            return 0
        missing = [node for node in seen if node not in self._block_of]
        self.copies.reserve(missing)
        for node in seen:
            if node in self._block_of:
                self._share(self._block_of[node])
                self.copies.tier.hold(((self._block_of[node],),))
        self.copies.read(missing, self._take(len(missing)), request)
        return len(missing)

    def settle(self, failed: Some[int]) -> int:
        settled = self.copies.settle(failed)
        for read in settled.done:
            self._publish(read.node.node, read.column[0])
            self.copies.want(read.node.node)
        for (block,) in settled.held:
            self._release(block)
        return settled.moves

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
            self._want(block)
        table = WindowTable(start.first, list(start.blocks))
        if copies:
            self._share(start.source)
            self._want(start.source)
            self._held.append(start.source)
            table.blocks += self._take(1)
        return table

    def grow(self, table: WindowTable, columns: int) -> None:
        missing = columns - table.end
        if missing > 0:
            table.blocks += self._take(missing)

    def publish(self, table: WindowTable, place: int, node: Node) -> None:
        """A node whose block was taken gets the sequence's own, unless that is another's already."""
        if place >= table.first:
            self._publish(node, table.blocks[place - table.first])

    def trim(self, table: WindowTable, computed: int, prompt_len: int) -> None:
        passed = max(0, computed - self._window) // self._block_size - table.first
        if passed > 0:
            seen_by_answer = self._seen_from(prompt_len - 1) - table.first
            for block in table.blocks[max(seen_by_answer, 0) : min(passed, self._end_of(prompt_len) - table.first)]:
                self._want(block)
            for block in table.blocks[:passed]:
                self._release(block)
            del table.blocks[:passed]
            table.first += passed

    def release(self, table: WindowTable) -> None:
        for block in table.blocks:
            self._want(block)
            self._release(block)

    def drop_held(self) -> None:
        for block in self._held:
            self._release(block)
        self._held.clear()

    def _seen_from(self, position: int) -> int:
        """The first block of which `position` sees something."""
        return max(0, position + 1 - self._window) // self._block_size

    def _end_of(self, tokens: int) -> int:
        return -(-tokens // self._block_size)

    def _has(self, node: Node, asleep: bool) -> bool:
        return node in self._block_of or (asleep and node in self.copies)

    def _want(self, block: int) -> None:
        self.copies.want(self._node_of.get(block))

    def _publish(self, node: Node, block: int) -> None:
        if node in self._block_of or self.pool.published(block):
            return
        self.pool.publish(block)
        self._block_of[node] = block
        self._node_of[block] = node
        self.copies.published(node, block)

    def _take(self, count: int) -> list[int]:
        while self.pool.num_free < count:
            block = next(iter(self._idle))
            del self._idle[block]
            node = self._node_of.pop(block)
            del self._block_of[node]
            self.copies.evicted(node, block)
            self.pool.unpublish(block)
        return self.pool.take(count)

    def _share(self, block: int) -> None:
        self.pool.share(block)
        self._idle.pop(block, None)

    def _release(self, block: int) -> None:
        if self.pool.release(block) is BlockState.CACHED:
            self._idle[block] = None
