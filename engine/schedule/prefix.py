"""The prefix tree: which token prefixes have their KV in some block, and which of them to forget first.

Nodes store their tokens (at most one block's worth) and children are compared token by token, so no hash decides what
is reused. Children are kept sorted by their tokens: the child sharing most with a query stands next to where the query
would be inserted, so a lookup is a bisection however many conversations branch inside one block. A shorter node whose
tokens another child begins with is replaced by it, so no child is a prefix of another; only full nodes have children.

Eviction is LRU-K (O'Neil, O'Neil, Weikum: The LRU-K page replacement algorithm, SIGMOD 1993): the victim is the leaf
whose K-th last reference is oldest. A reference is one request's use of a node, time counts requests, and repeated uses
by the same request only refresh the last reference (the paper's correlated references). Only leaves are victims. A
bounded ghost table keeps the references of the evicted, so that content which comes back is not mistaken for new; its
keys are hashes, since a collision costs a worse guess and nothing else.

What is evicted goes to tier 2 (`tier.py`) where there is one: the node stays, without blocks, until it is restored or
forgotten there too. Blocks are evicted from the leaves up and restored from the root down, so a node with blocks never
stands below one without.

Two points are our own. The paper lets every block that was used less than K times go first, which of conversations
keeps those that ended and drops the newest turn of those that go on. So references that a block lacks are assumed, each
some time before the next: a newcomer stays for a while, and what is used again within that while stays longer. And a
request that goes on where a known line ends, as the next turn of a conversation does, prolongs the line's last use.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .blocks import BlockPool, IllegalTransition
from .node import Column, Node, Residency
from .tier import Tier

# The time before, as a share of the K-th last reference's age in what is evicted. At 0.5 a newcomer of LRU-2 stays
# about as long as under LRU, at 1 the shortest time. Lower loses more to scans, higher more of the next turns of
# conversations.
ASSUMED_AGE = 0.9

_SMOOTHING = 64  # evictions that the age of the evicted is averaged over, roughly


class Hit(NamedTuple):
    """The longest known prefix of a prompt: whole blocks, then `partial_tokens` of one more node.

    Nodes whose KV only tier 2 has come last.
    """

    nodes: tuple[Node, ...]
    partial: Node | None
    partial_tokens: int


class PrefixTree:
    """Nodes over the blocks of `pools`. Blocks enter by `insert` or `restore` (published) and leave by eviction."""

    def __init__(
        self,
        pools: tuple[BlockPool, ...],
        block_size: int,
        k: int = 2,
        max_ghosts: int | None = None,
        tier: Tier[Node] | None = None,
        forgotten: Callable[[Node], None] | None = None,
    ) -> None:
        """`forgotten` is told of every node that is removed."""
        self._pools = pools
        self._tier = Tier[Node]() if tier is None else tier
        self._forgotten = forgotten
        self._block_size = block_size
        self._k = k
        self._max_ghosts = pools[0].num_blocks if max_ghosts is None else max_ghosts
        self._roots: dict[str, Node] = {}
        self._node_of: dict[int, Node] = {}  # by block id in group 0
        self._ghosts: dict[int, tuple[int, ...]] = {}
        # Candidates by how many references they lack; entries that no longer hold are skipped.
        self._heaps: list[list[tuple[int, int, int, Node]]] = [[] for _ in range(k)]
        self._serial = 0
        self._age = 0.0  # of the K-th last reference of nodes as they are evicted
        self.now = 0
        self.inserts = 0
        self.evictions = 0
        self.evicted_reused = 0

    def __len__(self) -> int:
        """How many nodes have blocks."""
        return len(self._node_of)

    def __iter__(self) -> Iterator[Node]:
        """The nodes that have blocks."""
        return iter(self._node_of.values())

    def tick(self) -> None:
        """One more request has come."""
        self.now += 1

    def find(self, salt: str, tokens: Sequence[int], limit: int) -> Hit:
        """The longest known prefix of tokens[:limit] among requests of the same salt. Counts as no reference."""
        nodes: list[Node] = []
        node = self._roots.get(salt)
        start = 0
        while node is not None and start < limit:
            child, common = node.closest(tuple(tokens[start : min(start + self._block_size, limit)]))
            if common < self._block_size:
                return Hit(tuple(nodes), child, common)
            assert child is not None
            nodes.append(child)
            node = child
            start += self._block_size
        return Hit(tuple(nodes), None, 0)

    def root(self, salt: str) -> Node:
        """The node under which prefixes of this salt begin. It lasts while it has children, so do not keep it."""
        node = self._roots.get(salt)
        if node is None:
            if len(self._roots) > len(self._node_of) + 64:
                self._roots = {name: root for name, root in self._roots.items() if root.children}
            node = self._roots[salt] = Node(None, (), hash((0, *map(ord, salt))))
        return node

    def insert(self, parent: Node, tokens: tuple[int, ...], blocks: Column, request: int) -> Node:
        """The node for `tokens` below `parent`: a new one that publishes `blocks`, or the one that already serves them.

        `blocks` are active and not written any more (a partial block: not in its first len(tokens) places). When the
        content is known already they stay private to their holder, unless only tier 2 has it.
        """
        if parent.parent is not None and not parent.blocks:
            raise IllegalTransition(f"a node in {parent.residency.value} cannot have children with blocks")
        place = bisect_left(parent.keys, tokens)
        if place < len(parent.keys) and parent.keys[place][: len(tokens)] == tokens:
            node = parent.children[place]
            if not node.blocks and node.tokens == tokens:
                self._occupy(node, blocks)
            self.touch(node, request)
            return node
        history: tuple[int, ...] = ()
        owner = -1
        if place > 0 and parent.keys[place - 1] == tokens[: len(parent.keys[place - 1])]:
            shorter = parent.children[place - 1]
            self._continue(shorter, request)
            history, owner = shorter.history, shorter.owner
            self._remove(shorter)
            place -= 1
        node = Node(parent, tokens, hash((parent.ghost_key, tokens)))
        ghost = self._ghosts.pop(node.ghost_key, None)
        if ghost is not None:
            self.evicted_reused += 1
            history = tuple(sorted((*history, *ghost), reverse=True))[: self._k]
        if not history:
            self._continue(parent, request)
        node.history, node.owner = history, owner
        parent.keys.insert(place, tokens)
        parent.children.insert(place, node)
        self._occupy(node, blocks)
        self._refer(node, request)  # it is in use, so nothing to offer
        return node

    def restore(self, node: Node, blocks: Column, request: int) -> None:
        """Publish `blocks`, into which tier 2's copy of the node was read for `request`."""
        if node.residency is not Residency.TIER or (node.parent and node.parent.parent and not node.parent.blocks):
            raise IllegalTransition(f"a node in {node.residency.value} cannot be restored")
        self.evicted_reused += 1
        self._occupy(node, blocks)
        self.touch(node, request)

    def lose(self, node: Node) -> None:
        """The node's copy in tier 2 is no good; without blocks it and what is below it are forgotten."""
        if node.blocks:
            if node.place >= 0:
                self._tier.forget(node)
        elif node.alive:
            self.prune(node)

    def touch(self, node: Node, request: int) -> None:
        """Record that `request` uses the node."""
        self._refer(node, request)
        self._offer(node)

    def _refer(self, node: Node, request: int) -> None:
        node.volatile = False
        if node.owner == request:
            self._prolong(node, node.history)
        else:
            node.before = node.history
            node.history = (self.now, *node.history)[: self._k]
            node.owner = request

    def refresh(self, node: Node, request: int) -> None:
        """`request`, which used the path down to `node`, leaves: it was in use until now. No new reference."""
        step: Node | None = node
        while step is not None and step.parent is not None:
            if step.owner == request:
                self._prolong(step, step.history)
                self._offer(step)
            step = step.parent

    def idle(self, block: int) -> None:
        """Take note that a published block of group 0 has lost its last holder."""
        self._offer(self._node_of[block])

    def evict(self) -> bool:
        """Free the blocks of the least valuable leaf that nobody holds, which tier 2 may keep. False: there is none."""
        lowest: tuple[float, int] | None = None
        victim: Node | None = None
        for missing, heap in enumerate(self._heaps):
            while heap and not self._holds(heap[0]):
                heapq.heappop(heap)
            if heap:
                oldest, last, _, node = heap[0]
                kth = oldest - missing * ASSUMED_AGE * self._age
                if lowest is None or (kth, last) < lowest:
                    lowest, victim = (kth, last), node
        if lowest is None or victim is None:
            return False
        self._age += (self.now - lowest[0] - self._age) / _SMOOTHING
        self.evictions += 1
        if not self._demote(victim):
            self._remember(victim)
            self.prune(victim)
        return True

    def prune(self, node: Node) -> None:
        """Forget `node` and all below it, at once and without ghosts. Blocks in use stay with their holders."""
        below = [node]
        for each in below:  # grows while it is read: breadth first
            below.extend(each.children)
        for each in reversed(below):
            self._remove(each)

    def flush(self) -> None:
        """Forget all that has blocks, which frees those that nobody holds. Holders may publish theirs again."""
        self.evictions += self._pools[0].num_cached
        for root in tuple(self._roots.values()):
            for child in tuple(root.children):
                if child.blocks:
                    self.prune(child)

    def node_of(self, block: int) -> Node | None:
        """The node that publishes this block of group 0."""
        return self._node_of.get(block)

    def _continue(self, leaf: Node, request: int) -> None:
        """`request` goes on where `leaf` ends: it is the same use of the line down to it, going on."""
        node: Node | None = leaf
        while node is not None and node.before and node.owner == request and len(node.children) == (node is not leaf):
            self._prolong(node, node.before)
            node.before = ()
            node = node.parent

    def _prolong(self, node: Node, history: tuple[int, ...]) -> None:
        """Let the last use in `history` last until now. What was before it moves along, as in the paper."""
        later = self.now - history[0]
        node.history = tuple(time + later for time in history)

    def _holds(self, entry: tuple[int, int, int, Node]) -> bool:
        oldest, last, _, node = entry
        return node.alive and (oldest, last) == (node.history[-1], node.history[0]) and self._evictable(node)

    def _evictable(self, node: Node) -> bool:
        if node.resident or not node.blocks:
            return False
        for pool, block in zip(self._pools, node.blocks):  # noqa: SIM110  a generator costs more than the rest
            if pool.refs(block):
                return False
        return True

    def _offer(self, node: Node) -> None:
        if not self._evictable(node):
            return
        heap = self._heaps[self._k - len(node.history)]
        if len(heap) > 2 * len(self._node_of) + 64:
            heap[:] = filter(self._holds, heap)
            heapq.heapify(heap)
        self._serial += 1
        heapq.heappush(heap, (node.history[-1], node.history[0], self._serial, node))

    def _remember(self, node: Node) -> None:
        self._ghosts[node.ghost_key] = node.history
        if len(self._ghosts) > self._max_ghosts:
            del self._ghosts[next(iter(self._ghosts))]

    def _demote(self, node: Node) -> bool:
        """Take the node's blocks and leave it to tier 2. False if there is no room, or it is not worth the write."""
        if node.place >= 0:
            self._tier.keep(node)
        elif (node.volatile and not node.children) or not self._make_place():
            return False
        else:
            self._tier.write(node)
        self._vacate(node)
        return True

    def _make_place(self) -> bool:
        """Have a free place in tier 2. False if there is none to be had."""
        if self._tier.num_free:
            return True
        oldest = self._tier.oldest()
        if oldest is None:
            return False
        if oldest.blocks:
            self._tier.forget(oldest)
        else:
            self._remember(oldest)
            self.prune(oldest)
        return True

    def _occupy(self, node: Node, blocks: Column) -> None:
        assert node.parent is not None and not node.blocks, node.residency
        for pool, block in zip(self._pools, blocks):
            pool.publish(block)
        node.blocks = blocks
        node.parent.resident += 1
        self._node_of[blocks[0]] = node
        self.inserts += 1

    def _vacate(self, node: Node) -> None:
        assert node.parent is not None and not node.resident, node.tokens
        for pool, block in zip(self._pools, node.blocks):
            pool.unpublish(block)
        del self._node_of[node.blocks[0]]
        node.blocks = ()
        node.parent.resident -= 1
        self._offer(node.parent)

    def _remove(self, node: Node) -> None:
        assert node.parent is not None and not node.children, node.tokens
        if node.place >= 0:
            self._tier.forget(node)
        if node.blocks:
            self._vacate(node)
        parent = node.parent
        place = bisect_left(parent.keys, node.tokens)
        del parent.keys[place], parent.children[place]
        node.alive = False
        if self._forgotten is not None:
            self._forgotten(node)
