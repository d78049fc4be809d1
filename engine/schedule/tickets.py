"""What waits, and the heap that it waits in."""

from __future__ import annotations

import heapq
from typing import NamedTuple


class Ticket(NamedTuple):
    """One waiting sequence. `order` is its arrival number, unique; `prompt` counts tokens that no cache serves yet.

    `wait`: it should not be passed by what comes more than so many steps after it.
    """

    order: int
    tenant: str
    priority: int
    prompt: int
    max_tokens: int
    step: int
    resumed: bool = False
    wait: int | None = None


class TicketHeap:
    """Tickets by key, then by order of arrival. Removed ones are skipped when they come up."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[float, ...], int, Ticket]] = []
        self._gone: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries) - len(self._gone)

    def push(self, key: tuple[float, ...], ticket: Ticket) -> None:
        heapq.heappush(self._entries, (key, ticket.order, ticket))

    def head(self) -> Ticket | None:
        while self._entries and self._entries[0][1] in self._gone:
            self._gone.remove(heapq.heappop(self._entries)[1])
        return self._entries[0][2] if self._entries else None

    def pop(self) -> Ticket:
        ticket = self.head()
        assert ticket is not None, "the queue is empty"
        heapq.heappop(self._entries)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Take out a ticket that is in the heap."""
        self._gone.add(ticket.order)
        if len(self._gone) > 64 and 2 * len(self._gone) > len(self._entries):
            self._entries = [entry for entry in self._entries if entry[1] not in self._gone]
            heapq.heapify(self._entries)
            self._gone.clear()
