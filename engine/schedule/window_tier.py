"""Tier 2 of a group with a window: copies of the blocks that hits may end in.

A window passes every block of a long text, and most of them nobody will need again. Worth a write is what was in a
window when a sequence ended or was preempted, when its prompt ended, or when another sequence began with it. Like all
copies these are of published content, so that one write is enough; unlike those of the tree's own blocks they lean on
no other, and the one of use longest ago can always go. A copy lives no longer than its node.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .node import Column, Node, Residency
from .tier import Settled, Tier


class WindowCopy:
    """What a node has in one group: its block, () if tier 2 alone has it, and the place of its copy there."""

    __slots__ = ("blocks", "node", "place")

    def __init__(self, node: Node, blocks: Column) -> None:
        self.node = node
        self.blocks = blocks
        self.place = -1

    @property
    def residency(self) -> Residency:
        """Where the content is."""
        if self.blocks:
            return Residency.BLOCKS
        return Residency.TIER if self.place >= 0 else Residency.NOWHERE


class WindowTier:
    """Which nodes have a copy of their block of this group, and which are worth one."""

    def __init__(self, num_places: int = 0, first_place: int = 0) -> None:
        self.tier = Tier[WindowCopy](num_places, first_place)
        self._copies: dict[Node, WindowCopy] = {}
        self._wanted: set[Node] = set()

    def __contains__(self, node: Node) -> bool:
        return node in self._copies

    def want(self, node: Node | None) -> None:
        """The node's block is worth a write when it is evicted."""
        if node is not None and node.alive and self.tier.ever:
            self._wanted.add(node)

    def published(self, node: Node, block: int) -> None:
        """What the node may have a copy of is in this block too."""
        if node in self._copies:
            self._copies[node].blocks = (block,)

    def evicted(self, node: Node, block: int) -> None:
        """The block is taken from the node in the step that is being made."""
        copy = self._copies.get(node)
        if copy is not None:
            copy.blocks = ()
            self.tier.keep(copy)
        elif node.alive and node in self._wanted and (node.children or not node.volatile) and self._make_place():
            copy = self._copies[node] = WindowCopy(node, (block,))
            self.tier.write(copy)
            copy.blocks = ()
        self._wanted.discard(node)

    def forget(self, node: Node) -> None:
        """The tree has forgotten the node."""
        self._wanted.discard(node)
        copy = self._copies.pop(node, None)
        if copy is not None:
            self.tier.forget(copy)

    def is_read(self, nodes: Iterable[Node]) -> bool:
        """Whether the copy of any of them is on its way back."""
        return any(node in self._copies and self.tier.is_read(self._copies[node]) for node in nodes)

    def renew(self, nodes: Iterable[Node]) -> None:
        """The copies of these nodes are of use now."""
        self.tier.renew(self._copies[node] for node in nodes)

    def reserve(self, nodes: Iterable[Node]) -> None:
        """Keep the copies of these nodes until they are read."""
        self.tier.reserve(self._copies[node] for node in nodes)

    def read(self, nodes: Sequence[Node], blocks: Sequence[int], request: int) -> None:
        """Read the reserved copies of these nodes into these blocks, which `settle` gives back."""
        for node, block in zip(nodes, blocks, strict=True):
            self.tier.read(self._copies[node], (block,), request)
            self.tier.hold(((block,),))

    def settle(self, failed: Iterable[int]) -> Settled[WindowCopy]:
        """See `Tier.settle`; copies that are lost are forgotten, and only those of nodes that live are `done`."""
        if not self.tier.ever:
            return Settled(0, (), (), ())
        settled = self.tier.settle(failed)
        for copy in settled.lost:
            if self._copies.get(copy.node) is copy:
                del self._copies[copy.node]
                if copy.place >= 0:
                    self.tier.forget(copy)
        return settled._replace(
            done=tuple(each for each in settled.done if self._copies.get(each.node.node) is each.node)
        )

    def _make_place(self) -> bool:
        if self.tier.num_free:
            return True
        oldest = self.tier.oldest()
        if oldest is None:
            return False
        self.tier.forget(oldest)
        del self._copies[oldest.node]
        return True
