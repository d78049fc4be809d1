"""Tier 2: places outside the KV pool for blocks that eviction takes, and the moves to and from them.

A block that leaves the pool is written to a place unless its copy there is good already, which it is once written: what
the tree publishes never changes. A prompt that needs it again has it read back, before it is admitted. Only ints are
here; the runner moves the bytes, in the order in which the moves were decided, and says which of them failed.

When all places are taken, the copy goes that was of use longest ago: what comes back to the pool keeps its copy for
some time, so that it can leave again without a write. A node's copy is always younger than those of its children that
have nothing else, so the one that goes has nothing below it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from .blocks import IllegalTransition
from .node import Column, Residency
from .step import Swap


class Kept(Protocol):
    """What can have a copy: a node of the tree, or what it has in a group with a window (`window_tier.py`)."""

    place: int
    blocks: Column

    @property
    def residency(self) -> Residency:
        """Where its content is."""
        ...


T = TypeVar("T", bound=Kept)


class Read(NamedTuple, Generic[T]):
    """A node on its way back, into `column`, for the sake of `request`."""

    node: T
    place: int
    column: Column
    request: int


class Settled(NamedTuple, Generic[T]):
    """What a step's moves, so many, brought: copies that are `lost`, reads that are `done`, columns `held` for them."""

    moves: int
    lost: tuple[T, ...]
    done: tuple[Read[T], ...]
    held: tuple[Column, ...]


class Tier(Generic[T]):
    """Which node has its copy at which place. Without places it does nothing and takes nothing.

    Its places are numbered from `first_place` on, so that those of several tiers can be told apart.
    """

    def __init__(self, num_places: int = 0, first_place: int = 0) -> None:
        self.ever = num_places > 0  # whether there is a tier 2, or was before its disk was full
        self.num_places = num_places
        self._own = range(first_place, first_place + num_places)
        self._free = list(reversed(self._own))  # the lowest first: the file stays as short as it can
        self._nodes: OrderedDict[int, T] = OrderedDict()  # by place, the one of use longest ago first
        self._reading: set[T] = set()
        self._next = _Moves[T]()
        self._in_flight: deque[_Moves[T]] = deque()
        self.written = 0
        self.clean_drops = 0
        self.read_back = 0
        self.failed = 0

    def __iter__(self) -> Iterator[tuple[int, T]]:
        return iter(self._nodes.items())

    @property
    def num_used(self) -> int:
        """Places that hold a copy."""
        return len(self._nodes)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def due(self) -> bool:
        """Whether the next step has to read something, so that it is worth making without any chunk."""
        return bool(self._next.reads)

    def is_read(self, node: T) -> bool:
        """Whether the node is on its way back."""
        return node in self._reading

    def oldest(self) -> T | None:
        """Whose copy to give up for another one; None if there is none, or all are being read."""
        return next((node for node in self._nodes.values() if node not in self._reading), None)

    def write(self, node: T) -> None:
        """Copy the node's blocks to a free place in the next step."""
        if node.place >= 0 or node.residency is not Residency.BLOCKS:
            raise IllegalTransition(f"a node in {node.residency.value} at place {node.place} cannot be written")
        if not self._free:
            raise IllegalTransition(f"all {self.num_places} places of tier 2 are taken")
        place = node.place = self._free.pop()
        self._nodes[place] = node
        self._next.swaps.append(Swap(place, node.blocks, True))
        self._next.writes.append((place, node))
        self.written += 1

    def keep(self, node: T) -> None:
        """The node's blocks go, and its copy is good already."""
        if node.place < 0:
            raise IllegalTransition("a node without a copy in tier 2 cannot be dropped as clean")
        self._nodes.move_to_end(node.place)
        self.clean_drops += 1

    def forget(self, node: T) -> None:
        """Give the place of the node's copy away."""
        if node.place < 0:
            raise IllegalTransition("a node without a copy in tier 2 has no place to give away")
        del self._nodes[node.place]
        self._free.append(node.place)
        node.place = -1

    def renew(self, nodes: Iterable[T]) -> None:
        """The copies of these nodes, parents first, are of use now."""
        for node in reversed(tuple(nodes)):
            self._nodes.move_to_end(node.place)

    def reserve(self, nodes: Iterable[T]) -> None:
        """Keep the copies of these nodes, parents first, until they are read."""
        nodes = tuple(nodes)
        for node in nodes:
            if node in self._reading or node.residency is not Residency.TIER:
                raise IllegalTransition(f"a node in {node.residency.value} cannot be read from tier 2")
            self._reading.add(node)
        self.renew(nodes)

    def cancel(self, node: T) -> None:
        """A node that was reserved will not be read."""
        self._reading.remove(node)

    def read(self, node: T, column: Column, request: int) -> None:
        """Read the copy of a reserved node into `column` in the next step."""
        self._next.swaps.append(Swap(node.place, column, False))
        self._next.reads.append(Read(node, node.place, column, request))

    def hold(self, columns: Iterable[Column]) -> None:
        """`settle` of the next step gives these columns back."""
        self._next.held.extend(columns)

    def take_moves(self) -> tuple[Swap, ...]:
        """The moves that the step now made starts with, in their order."""
        if not self.ever:
            return ()
        moves, self._next = self._next, _Moves[T]()
        self._in_flight.append(moves)
        return tuple(moves.swaps)

    def settle(self, failed: Iterable[int]) -> Settled[T]:
        """The oldest step in flight has been run, and the moves of the places `failed` went wrong, others' among them.

        A place that could not be written is not used again: the disk has no room for it. One that was read in vain is.
        """
        moves = self._in_flight.popleft()
        bad = {place for place in failed if place in self._own}
        self._reading.difference_update(read.node for read in moves.reads)
        unwritten = [(place, node) for place, node in moves.writes if place in bad and node.place == place]
        unread = [read for read in moves.reads if read.place in bad]
        self.failed += len(bad)
        lost = [node for _, node in unwritten] + [read.node for read in unread if read.node.place == read.place]
        for place, node in unwritten:
            self.forget(node)
            self._free.remove(place)
            self.num_places -= 1
        done = tuple(read for read in moves.reads if read.place not in bad)
        self.read_back += len(done)
        return Settled(len(moves.swaps), tuple(dict.fromkeys(lost)), done, tuple(moves.held))


class _Moves(Generic[T]):
    """The moves of one step, and what is held until they are made."""

    __slots__ = ("held", "reads", "swaps", "writes")

    def __init__(self) -> None:
        self.swaps: list[Swap] = []
        self.writes: list[tuple[int, T]] = []
        self.reads: list[Read[T]] = []
        self.held: list[Column] = []
