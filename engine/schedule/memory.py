"""The KV blocks of all groups and the prefix tree over them, as one face for the scheduler.

Groups of layers that see only a window have blocks of their own (`windows.py`); what is said here is of the others.
Every group has its own pool, and the scheduler moves through them in step: one logical block is one `Column`, a block
of each group. Memory is given in this order: free blocks, then evicted leaves of the tree, then the tree as a whole.
The last is needed when a cached block stands above one in use that belongs to somebody else: two sequences computed the
same content at once and kept a block each. Whatever is cached can therefore always be had, and `available` counts it.

What eviction takes may be in tier 2 (`tier.py`). `wake` has it read back for a sequence that is about to be admitted,
which waits for it; what is not there then is computed. So nothing is built on what was read before it is known to
be right.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .blocks import BlockPool, BlockState
from .node import Column, Node
from .prefix import PrefixTree
from .sequence import Sequence
from .step import StepResult, Swap
from .swapping import SwapCost
from .tier import Tier
from .window_tier import WindowCopy
from .windows import WindowLimit, Windows, WindowStart


class Start(NamedTuple):
    """What a sequence can begin with: whole blocks to share, and `copied` tokens to copy from `source`.

    `nodes` is the tree's path to them, the node of `source` included, and `waking` what tier 2 could make of it.
    """

    columns: tuple[Column, ...]
    source: Column | None = None
    copied: int = 0
    nodes: tuple[Node, ...] = ()
    waking: Waking | None = None
    windows: tuple[WindowStart, ...] = ()


class Waking(NamedTuple):
    """A longer start, of `tokens`, that a sequence has when tier 2's part of it was read back.

    `path` is the tree's to its end: nodes that have these `columns`, then those that are `asleep`; the last one may be
    to copy from. Of groups with a window some of it may be in tier 2 as well.
    """

    path: tuple[Node, ...]
    columns: tuple[Column, ...]
    asleep: tuple[Node, ...]
    tokens: int


class KVMemory:
    """Block tables of sequences: begin, grow, publish, release. Mutates the block fields of a Sequence, no others."""

    def __init__(
        self,
        num_blocks: tuple[int, ...],
        block_size: int,
        caching: bool,
        k: int,
        tier_blocks: int = 0,
        preemption_mode: str = "auto",
        windows: tuple[WindowLimit, ...] = (),
    ) -> None:
        self.block_size = block_size
        self.pools = tuple(BlockPool(count) for count in num_blocks)
        self.tier = Tier[Node](tier_blocks)
        self.windows = Windows(windows, block_size, tier_blocks)
        forgotten = self.windows.forget if windows else None
        self.tree = PrefixTree(self.pools, block_size, k, tier=self.tier, forgotten=forgotten)
        self._cost = SwapCost(preemption_mode, block_size)
        self._caching = caching
        self._held: list[Column] = []

    @property
    def available(self) -> int:
        """Columns that can be had without taking any from a sequence, with blocks of the groups with a window."""
        return self.windows.available(self.room)

    @property
    def room(self) -> int:
        """The same of the groups that keep everything: prompts of so many blocks can be had in parts."""
        return min(pool.num_free + pool.num_cached for pool in self.pools)

    @property
    def all_pools(self) -> tuple[BlockPool, ...]:
        """The pool of every group."""
        return (*self.pools, *self.windows.pools)

    @property
    def tiers(self) -> tuple[tuple[Tier[Node] | Tier[WindowCopy], int | None], ...]:
        """Tier 2 of every group that has one, and the bytes of a block there; None for those that keep everything."""
        return ((self.tier, None), *self.windows.tiers)

    @property
    def fragmentation(self) -> float:
        """The share of the free and cached blocks of all groups that cannot be had in runs of 16."""
        usable = sum(pool.num_free + pool.num_cached for pool in self.pools)
        return 1 - sum(pool.num_in_runs for pool in self.pools) / usable if usable else 0.0

    def waste(self, running: Iterable[Sequence]) -> float:
        """The share of the blocks in use that no token was scheduled for: the ends of the sequences' last ones."""
        active = self.pools[0].num_active * self.block_size
        unused = sum(len(seq.blocks) * self.block_size - seq.scheduled for seq in running)
        return unused / active if active else 0.0

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def find(self, seq: Sequence) -> Start:
        """The longest start the tree has for the sequence's tokens; at least one token stays to be computed.

        So does every position of a prompt whose logprobs are wanted and have not been computed.
        """
        hit = self.tree.find(seq.request.salt, seq.tokens, seq.reusable)
        known = len(hit.nodes) * self.block_size + hit.partial_tokens
        path = hit.nodes if hit.partial is None else (*hit.nodes, hit.partial)
        there = next((place for place, node in enumerate(path) if not node.blocks), len(path))
        columns = tuple(node.blocks for node in path[: min(there, len(hit.nodes))])
        if hit.partial is None or there < len(path):
            start = Start(columns, nodes=path[: len(columns)])
        else:
            start = Start(columns, hit.partial.blocks, hit.partial_tokens, path)
        return self._served(start, Waking(path, tuple(node.blocks for node in path[:there]), path[there:], known))

    def whole(self, start: Start) -> Start:
        """What is left of a start from the tree without the tokens to copy."""
        if start.source is None:
            return start
        return self._served(Start(start.columns, nodes=start.nodes[: len(start.columns)]))

    def wake(self, seq: Sequence, start: Start) -> bool:
        """Have tier 2 read what it has of a sequence's start, as far as there are blocks for it, some in each step.

        Whether the sequence, which is affordable, should wait for it: while no more was read since it was queued than
        it has blocks, lest what is read be evicted and read for ever. Somebody else's reads it waits for in any case.
        Groups with a window come last, when the tree has all of it, and at once: they are small.
        """
        waking = start.waking
        if waking is None:
            return False
        if any(map(self.tier.is_read, waking.asleep)) or self.windows.is_read(waking.path, waking.tokens):
            return True
        if seq.woken >= self.blocks_for(len(seq.tokens)) * len(self.all_pools):
            return False
        self.windows.renew(waking.path, waking.tokens)
        if not waking.asleep:
            count = self.windows.wake(seq, waking.path, waking.tokens)
            seq.woken += count
            if count:
                self._hold(waking.columns)
            return count > 0
        room = max(self.room - self._cached(waking.columns), 0)
        nodes = waking.asleep[: min(self._cost.blocks_at_once, room)]
        if not nodes:
            return False
        seq.woken += len(nodes)
        self._hold(waking.columns)
        self.tier.renew(waking.asleep)
        self.tier.reserve(nodes)
        for node, column in zip(nodes, self._take(len(nodes))):
            if node.alive:
                self.tier.read(node, column, seq.leader.order)
                self.tier.hold((column,))
            else:  # to have the blocks, the tree had to be flushed
                self.tier.cancel(node)
                self._release(column)
        return self.tier.due

    @property
    def due(self) -> bool:
        """Whether the next step has to read something from tier 2, so that it is worth making without any chunk."""
        return self.tier.due or any(tier.due for tier, _ in self.windows.tiers)

    def take_moves(self) -> tuple[Swap, ...]:
        """The moves to and from tier 2 that the step now made starts with; the order counts inside a group."""
        moves = self.tier.take_moves()
        for tier, _ in self.windows.tiers:
            moves += tier.take_moves()
        return moves

    def settle(self, result: StepResult, tokens: int) -> None:
        """The oldest step in flight, which computed so many tokens, has come back: its moves to and from tier 2 too."""
        if not self.tier.ever:
            return
        settled = self.tier.settle(result.failed)
        moves = settled.moves + self.windows.settle(result.failed)
        self._cost.learn(result.swap_us, moves, result.compute_us, tokens)
        for node in settled.lost:
            self.tree.lose(node)
        for node, _, column, request in settled.done:
            if node.alive and not node.blocks:
                self.tree.restore(node, column, request)
        for column in settled.held:
            self._release(column)

    def fork(self, seq: Sequence, other: Sequence, tokens: int) -> Start:
        """The start that another sequence's first `tokens` computed tokens give `seq`, which begins with them too.

        If some window of the other has passed them, what the tree has.
        """
        windows = self.windows.fork(other, tokens)
        if windows is None:
            return self.find(seq)
        full, copied = divmod(tokens, self.block_size)
        return Start(tuple(other.blocks[:full]), other.blocks[full] if copied else None, copied, windows=windows)

    def _served(self, start: Start, waking: Waking | None = None) -> Start:
        """As much of a start from the tree as groups with a window have too, and of `waking` as they could have."""
        tokens = self.tokens_of(start)
        served = self.windows.serve(start.nodes, tokens)
        if waking is not None:
            waking = self._reached(waking, served)
        if served < tokens:
            full = served // self.block_size
            start = Start(start.columns[:full], nodes=start.nodes[:full])
        return start._replace(waking=waking, windows=self.windows.start(start.nodes, served))

    def _reached(self, waking: Waking, served: int) -> Waking | None:
        """As much of it as groups with a window could go on from, None if that is no more than what is `served`."""
        if not self.tier.ever:
            return None
        tokens = self.windows.serve(waking.path, waking.tokens, asleep=True)
        if tokens <= served:
            return None
        blocks = self.blocks_for(tokens)
        asleep = waking.asleep[: max(0, blocks - len(waking.columns))]
        return Waking(waking.path[:blocks], waking.columns[:blocks], asleep, tokens)

    def tokens_of(self, start: Start) -> int:
        return len(start.columns) * self.block_size + start.copied

    def known_of(self, start: Start) -> int:
        """Tokens that need not be computed, those that tier 2 has included."""
        return self.tokens_of(start) if start.waking is None else start.waking.tokens

    def cost(self, start: Start) -> int:
        """By how much `available` falls when the blocks of `start` are taken into use (new ones not counted)."""
        return self._cached(start.columns if start.source is None else (*start.columns, start.source))

    def _cached(self, columns: Iterable[Column]) -> int:
        return sum(self.pools[0].state(column[0]) is BlockState.CACHED for column in columns)

    def begin(self, seq: Sequence, start: Start) -> Column | None:
        """Give the sequence its first blocks; those of every group into which `start.source` must be copied, if any.

        The source is held until `drop_held`, so that nothing else is written there before the copy.
        """
        for column in start.columns:
            self._share(column)
        seq.blocks = list(start.columns)
        seq.borrowed = len(start.columns)
        seq.published = min(len(start.nodes), len(start.columns))
        seq.cursor = start.nodes[seq.published - 1] if seq.published else None
        if start.source is not None:
            self._share(start.source)
            self._held.append(start.source)
        for node in start.nodes:
            self.tree.touch(node, seq.leader.order)
        windows = self.windows.begin(seq, start.windows, start.source is not None)
        if start.source is None:
            return None
        assert self.room, "the scheduler admits only what fits"
        (target,) = self._take(1)
        seq.blocks.append(target)
        return (*target, *windows)

    def grow(self, seq: Sequence, tokens: int) -> int:
        """Extend the table to hold `tokens` tokens, as far as memory goes without preemption; how many it holds now."""
        missing = self.blocks_for(tokens) - len(seq.blocks)
        if missing > 0:
            seq.blocks += self._take(min(missing, self.available))
            self.windows.grow(seq, len(seq.blocks))
        return len(seq.blocks) * self.block_size

    def publish(self, seq: Sequence) -> None:
        """Make the full blocks whose content is final known to the tree, and give back what no window sees any more."""
        if self._caching:
            self._publish(seq)
        self.windows.trim(seq)

    def _publish(self, seq: Sequence) -> None:
        if seq.cursor is not None and not seq.cursor.blocks:  # a twin's block was evicted; our own one can stand in
            seq.cursor, seq.published = None, 0
        size = self.block_size
        while (seq.published + 1) * size <= seq.computed:
            start = seq.published * size
            self._insert(seq, tuple(seq.tokens[start : start + size]))

    def release(self, seq: Sequence) -> None:
        """Take the sequence's blocks back. What is final is published first, the partial tail too."""
        self.publish(seq)
        tail = seq.published * self.block_size
        if self._caching and tail < seq.computed:
            self._insert(seq, tuple(seq.tokens[tail : seq.computed]))
        if seq.cursor is not None and seq.cursor.alive:
            self.tree.refresh(seq.cursor, seq.leader.order)
        self._drop(seq)

    def preempt(self, seq: Sequence) -> None:
        """As `release`, for a sequence that comes back: by its blocks in tier 2, or by computing what is gone.

        Which of them is cheaper is decided here, and holds for what nobody else has used.
        """
        order, own = seq.leader.order, seq.blocks[seq.borrowed :]
        self.release(seq)
        seq.woken = 0
        if self.tier.num_places and not self._cost.swap_is_cheaper:
            for column in own:
                node = self.tree.node_of(column[0])
                if node is not None and node.owner == order:
                    node.volatile = True

    def discard(self, seq: Sequence) -> None:
        """Take the blocks back and make the tree forget what this sequence put there: its content is in doubt."""
        for column in seq.blocks[seq.borrowed :]:
            node = self.tree.node_of(column[0])
            if node is not None:
                self.tree.prune(node)
                break
        self._drop(seq)

    def drop(self, seq: Sequence) -> None:
        """Take the blocks back, and publish nothing that is not published already."""
        self._drop(seq)

    def drop_held(self) -> None:
        """The step is made: its copies come before whatever a later one writes."""
        for column in self._held:
            self._release(column)
        self._held.clear()
        self.windows.drop_held()

    def _insert(self, seq: Sequence, tokens: tuple[int, ...]) -> None:
        parent = seq.cursor if seq.cursor is not None else self.tree.root(seq.request.salt)
        seq.cursor = self.tree.insert(parent, tokens, seq.blocks[seq.published], seq.leader.order)
        if len(seq.cursor.tokens) == len(tokens):  # else what is known already goes on further than ours
            self.windows.publish(seq, seq.published, seq.cursor)
        seq.published += 1

    def _drop(self, seq: Sequence) -> None:
        for column in reversed(seq.blocks):
            self._release(column)
        self.windows.release(seq)
        seq.blocks = []
        seq.borrowed = seq.announced = seq.published = 0
        seq.cursor = None

    def _take(self, count: int) -> list[Column]:
        """So many new columns, at most as many as are available."""
        for pool in self.pools:
            while pool.num_free < count:
                if not self.tree.evict():
                    self.tree.flush()
        return list(zip(*(pool.take(count) for pool in self.pools)))

    def _hold(self, columns: tuple[Column, ...]) -> None:
        """Keep these until the next step has come back."""
        for column in columns:
            self._share(column)
        self.tier.hold(columns)

    def _share(self, column: Column) -> None:
        for pool, block in zip(self.pools, column):
            pool.share(block)

    def _release(self, column: Column) -> None:
        states = [pool.release(block) for pool, block in zip(self.pools, column)]
        if states[0] is BlockState.CACHED:
            self.tree.idle(column[0])
