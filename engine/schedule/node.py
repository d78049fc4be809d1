"""`Node`: some tokens of the prefix tree, and where their KV is."""

from __future__ import annotations

import enum
from bisect import bisect_left

Column = tuple[int, ...]  # one block id per KV group: the same tokens seen by every group's layers


class Residency(enum.Enum):
    """Where the KV of a node is. Blocks may have a copy in tier 2 besides, then they can be dropped without a write."""

    BLOCKS = "blocks"
    TIER = "tier 2"
    NOWHERE = "nowhere"  # a root, or a node that was removed


class Node:
    """Some tokens after those of `parent`.

    blocks    that hold their KV; () if tier 2 alone does, for a root and for a removed node
    place     of their copy in tier 2, which is final as all published content is; -1 if there is none
    resident  children that have blocks. A node without any has none that do, so what has blocks is a tree itself
    volatile  not worth a write to tier 2: it was left by a sequence that shall compute it again
    """

    __slots__ = (
        "alive",
        "before",
        "blocks",
        "children",
        "ghost_key",
        "history",
        "keys",
        "owner",
        "parent",
        "place",
        "resident",
        "tokens",
        "volatile",
    )

    def __init__(self, parent: Node | None, tokens: tuple[int, ...], ghost_key: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.blocks: Column = ()
        self.place = -1
        self.ghost_key = ghost_key
        self.keys: list[tuple[int, ...]] = []  # the children's tokens, sorted; `children` runs in parallel
        self.children: list[Node] = []
        self.resident = 0
        self.history: tuple[int, ...] = ()  # times of the last K references, latest first
        self.before: tuple[int, ...] = ()  # the history without the last reference, until that is known to be one
        self.owner = -1  # the request that made the latest one
        self.volatile = False
        self.alive = True

    @property
    def residency(self) -> Residency:
        """Where the node's KV is."""
        if self.blocks:
            return Residency.BLOCKS
        return Residency.TIER if self.place >= 0 else Residency.NOWHERE

    def closest(self, tokens: tuple[int, ...]) -> tuple[Node | None, int]:
        """The child that shares the most leading tokens with `tokens`, and how many."""
        place = bisect_left(self.keys, tokens)
        best: Node | None = None
        most = 0
        for index in (place, place - 1):
            if 0 <= index < len(self.keys):
                common = _common(self.keys[index], tokens)
                if common > most:
                    best, most = self.children[index], common
        return best, most


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    count = 0
    for one, other in zip(left, right):
        if one != other:
            break
        count += 1
    return count
