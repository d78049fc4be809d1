"""Which places tier 2 has: shelves of them, one after the other, each for one block of every group on it.

The groups that keep everything share places, for they are swapped together; each group with a window has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .cache import GroupCache


@dataclass(frozen=True, slots=True)
class Shelf:
    """So many places, each for one block of every one of these groups."""

    groups: tuple[GroupCache, ...]
    num_places: int

    @property
    def stride(self) -> int:
        """Bytes of a place."""
        return sum(cache.bytes_per_block for cache in self.groups)


class Spot(NamedTuple):
    """A place: its groups, and where it begins, in bytes from the first shelf on."""

    groups: tuple[GroupCache, ...]
    offset: int


class Shelves:
    """All places, numbered shelf after shelf as the scheduler does."""

    def __init__(self, shelves: Sequence[Shelf]) -> None:
        self._shelves = tuple(shelves)

    @property
    def num_bytes(self) -> int:
        """Bytes of all places."""
        return sum(shelf.num_places * shelf.stride for shelf in self._shelves)

    def __str__(self) -> str:
        return " + ".join(str(shelf.num_places) for shelf in self._shelves)

    def spot(self, place: int) -> Spot:
        """Where this place is."""
        offset = 0
        for shelf in self._shelves:
            if place < shelf.num_places:
                return Spot(shelf.groups, offset + place * shelf.stride)
            place -= shelf.num_places
            offset += shelf.num_places * shelf.stride
        raise IndexError(f"there are {self} places, none is {place} behind them")


def shelves_of(groups: tuple[GroupCache, ...], num_places: int) -> Shelves:
    """The places of an engine: so many of the first group, and of the others as many as each says."""
    return Shelves([Shelf(groups[:1], num_places), *(Shelf((cache,), cache.group.tier_blocks) for cache in groups[1:])])
