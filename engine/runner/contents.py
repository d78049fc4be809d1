"""What the blocks of a KV arena hold, remembered by the tokens that it was computed for.

This is for a cache that uses another one's block tables and is not told what becomes of the blocks. A block is taken
for what was last written to it, and that is compared with what is wanted: its own tokens one by one, and a hash of all
that stood before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Contents:
    """By block: the tokens whose K and V it holds from its beginning on, and what they followed."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._held: dict[int, _Held] = {}

    def found(self, blocks: Sequence[int], tokens: Sequence[int]) -> int:
        """How many of these tokens have what they need in these blocks, which are a sequence's in order."""
        size, before, found = self._block_size, 0, 0
        for block in blocks:
            held = self._held.get(block)
            if held is None or held.before != before:
                break
            part = tuple(tokens[found : found + size])
            same = _common(held.tokens, part)
            found += same
            if same < size:
                break
            before = hash((before, part))
        return found

    def note(self, blocks: Sequence[int], first: int, tokens: Sequence[int]) -> None:
        """What these blocks hold is for `tokens` now: those from `first` on were computed, what is before stands."""
        size = self._block_size
        place = first // size * size
        before = self._hash(blocks, place)
        while place < len(tokens):
            part = tuple(tokens[place : place + size])
            self._held[blocks[place // size]] = _Held(before, part)
            before = hash((before, part))
            place += size

    def _hash(self, blocks: Sequence[int], place: int) -> int:
        """Of the tokens before a block's beginning: what follows the block before it."""
        if place == 0:
            return 0
        held = self._held[blocks[place // self._block_size - 1]]
        return hash(held)


class _Held(NamedTuple):
    before: int
    tokens: tuple[int, ...]


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """How many tokens the two begin with alike."""
    for count, (one, other) in enumerate(zip(left, right)):
        if one != other:
            return count
    return min(len(left), len(right))
