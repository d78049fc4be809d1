"""Requests that can wait only so long: when they become urgent, and when to give them up.

A request is urgent when half of its time is over. Sooner would let every short limit pass the policy by, and later
leaves little time to begin in.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from .request import Request

_PRUNE_AT = 1024  # requests that are remembered before those that have ended are looked for


class Deadlines:
    """Times until which requests may wait for their turn. Reads no clock."""

    def __init__(self) -> None:
        self._urgent: list[tuple[float, float, str]] = []  # (when it is, when it is due, request id)
        self._due: list[tuple[float, str, float]] = []  # (when, request id, seconds it could wait)
        self._prune_at = _PRUNE_AT

    def add(self, request: Request, now: float) -> None:
        """Take note of a request that comes now."""
        if request.max_wait_s is not None:
            due = now + request.max_wait_s
            heapq.heappush(self._urgent, (now + request.max_wait_s / 2, due, request.id))
            heapq.heappush(self._due, (due, request.id, request.max_wait_s))

    def prune(self, is_open: Callable[[str], bool]) -> None:
        """Now and then, forget the requests that are not open any more: some could have waited for days."""
        if len(self._due) < self._prune_at:
            return
        self._urgent = [entry for entry in self._urgent if is_open(entry[2])]
        self._due = [entry for entry in self._due if is_open(entry[1])]
        heapq.heapify(self._urgent)
        heapq.heapify(self._due)
        self._prune_at = max(_PRUNE_AT, 2 * len(self._due))

    def urgent(self, now: float) -> Iterator[tuple[str, float]]:
        """Ids of requests that have become urgent, whether they still wait or not, and when they are due."""
        while self._urgent and self._urgent[0][0] <= now:
            _, due, request_id = heapq.heappop(self._urgent)
            yield request_id, due

    def overdue(self, now: float) -> Iterator[tuple[str, str]]:
        """Ids of requests whose time is over, whether they still wait or not, with what to tell them."""
        while self._due and self._due[0][0] <= now:
            _, request_id, wait_s = heapq.heappop(self._due)
            yield request_id, f"its turn did not come within the {wait_s:g} s that the request could wait"
