"""What waits, and the heap that it waits in."""

from __future__ import annotations

import heapq
import math
from typing import NamedTuple


class Ticket(NamedTuple):
    """One waiting sequence. `order` is its arrival number, unique; `prompt` counts tokens that no cache serves yet.

    `due`: it is urgent, the more the lower; infinite for what can wait.
    """

    order: int
    tenant: str
    priority: int
    prompt: int
    max_tokens: int
    step: int
    resumed: bool = False
    due: float = math.inf


class TicketHeap:
    """Tickets by key, then by order of arrival. Removed ones are skipped when they come up."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[float, ...], int, Ticket]] = []
        self._held: dict[int, Ticket] = {}  # by order

    def __len__(self) -> int:
        return len(self._held)

    def push(self, key: tuple[float, ...], ticket: Ticket) -> None:
        self._held[ticket.order] = ticket
        heapq.heappush(self._entries, (key, ticket.order, ticket))

    def head(self) -> Ticket | None:
        while self._entries and not self._holds(self._entries[0]):
            heapq.heappop(self._entries)
        return self._entries[0][2] if self._entries else None

    def pop(self) -> Ticket:
        ticket = self.head()
        assert ticket is not None, "the queue is empty"
        heapq.heappop(self._entries)
        del self._held[ticket.order]
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Take out a ticket that is in the heap."""
        del self._held[ticket.order]
        if len(self._entries) > 64 + 2 * len(self._held):
            self._entries = list(filter(self._holds, self._entries))
            heapq.heapify(self._entries)

    def _holds(self, entry: tuple[tuple[float, ...], int, Ticket]) -> bool:
        return self._held.get(entry[1]) is entry[2]
