"""Who may come in: not more than the queue holds, and nobody while the server drains.

The engine has no limit of its own, so what is refused here never costs it anything. Counted are sequences, since n
samples take the place of n requests. Retry-After is the time that the backlog takes at the pace of late.

A tenant may have a limit of its own, on what of it waits, so that nobody fills the queue for everybody. A sequence
waits until its first token if all places were taken when it came; only the engine's policy knows whose turn is next.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator

from .errors import RETRY_S, ApiError, overdue, shutting_down
from .settings import NO_LIMITS, TenantLimits

MAX_RETRY_S = 600
WINDOW = 16  # answers that the running mean of durations remembers, roughly


class Place:
    """The sequences of one request. Those without a first token wait, but for as many as found a place free."""

    def __init__(self, sequences: int, free: int) -> None:
        self._sequences, self._room, self._begun = sequences, min(sequences, max(0, free)), set[int]()

    def begin(self, sequence: int) -> None:
        """This sequence's first token came; later ones change nothing."""
        self._begun.add(sequence)

    @property
    def waiting(self) -> int:
        """Sequences whose turn has not come."""
        return self._sequences - max(self._room, len(self._begun))


class Admission:
    """Counts the open sequences: `running` at once in the engine, `waiting` besides. For one event loop."""

    def __init__(
        self,
        running: int,
        waiting: int,
        tenants: TenantLimits = NO_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._running, self._limit, self._tenants, self._clock = running, running + waiting, tenants, clock
        self._places: dict[str, list[Place]] = {}  # of tenants that have some
        self._open = 0
        self._mean_s: float | None = None
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def draining(self) -> bool:
        """Whether nobody is let in any more."""
        return self._draining

    @property
    def open(self) -> int:
        """Sequences whose answer is not complete."""
        return self._open

    def has_room(self, sequences: int, tenant: str = "") -> bool:
        """Whether so many more of this tenant may come in now."""
        return self._open + sequences <= self._limit and not self._too_many(sequences, tenant)

    def waiting(self, tenant: str) -> int:
        """Sequences of this tenant whose turn has not come."""
        return sum(place.waiting for place in self._places.get(tenant, ()))

    @contextlib.contextmanager
    def admit(self, sequences: int, max_wait_s: float | None = None, tenant: str = "") -> Iterator[Place]:
        """Hold places for these sequences. ApiError 503 while draining, 429 if there is no room, 400 if never.

        429 as well if the backlog will not have let them begin within `max_wait_s`, or if the tenant has as many
        waiting as may.
        """
        self.check_open()
        if sequences > self._limit:
            raise ApiError(
                400, f"{sequences} sequences are asked for, this server holds at most {self._limit} at once", param="n"
            )
        if self._open + sequences > self._limit:
            raise ApiError(
                429,
                f"the queue is full: {self._open} sequences are open, at most {self._limit} may be",
                code="queue_full",
                retry_s=self.retry_s,
            )
        if self._too_many(sequences, tenant):
            raise self._tenant_full(sequences, tenant)
        if max_wait_s is not None and (wait_s := self._wait_s(sequences)) > max_wait_s:
            raise overdue(
                f"the backlog takes about {wait_s:.1f} s, the request can wait {max_wait_s:g} s", self.retry_s
            )
        place = Place(sequences, self._running - self._open)
        self._places.setdefault(tenant, []).append(place)
        self._open += sequences
        self._empty.clear()
        started = self._clock()
        try:
            yield place
            self._learn(self._clock() - started)
        finally:
            self._leave(tenant, place)
            self._open -= sequences
            if self._open == 0:
                self._empty.set()

    def check_open(self) -> None:
        """ApiError 503 while draining."""
        if self._draining:
            raise shutting_down("the server is shutting down")

    @property
    def retry_s(self) -> int:
        """Seconds until the present backlog is done, as far as one can tell."""
        if self._mean_s is None:
            return RETRY_S
        return min(MAX_RETRY_S, max(1, math.ceil(self._mean_s * self._open / self._running)))

    def _wait_s(self, sequences: int) -> float:
        """Seconds until so many more can begin, as far as one can tell."""
        ahead = self._open + sequences - self._running
        return max(0, ahead) * (self._mean_s or 0.0) / self._running

    async def drain(self, timeout_s: float) -> int:
        """Let nobody in and wait until all have left, at most so long; how many sequences are still open."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        return self._open

    def _too_many(self, sequences: int, tenant: str) -> bool:
        limit = self._tenants.of(tenant)
        new = max(0, sequences - max(0, self._running - self._open))  # that find no place free
        return bool(limit and new and self.waiting(tenant) + new > limit)

    def _tenant_full(self, sequences: int, tenant: str) -> ApiError:
        limit = self._tenants.of(tenant)
        whose = f"tenant `{tenant}`" if tenant else "who names no `user`"
        if sequences > self._running + limit:
            most = self._running + limit
            return ApiError(
                400, f"{sequences} sequences are asked for, {whose} may have at most {most} at once here", param="n"
            )
        return ApiError(
            429,
            f"the queue of {whose} is full: {self.waiting(tenant)} sequences wait, at most {limit} may",
            code="tenant_queue_full",
            retry_s=self.retry_s,
        )

    def _leave(self, tenant: str, place: Place) -> None:
        places = self._places[tenant]
        places.remove(place)
        if not places:
            del self._places[tenant]

    def _learn(self, duration_s: float) -> None:
        mean = self._mean_s
        self._mean_s = duration_s if mean is None else mean + (duration_s - mean) / WINDOW
