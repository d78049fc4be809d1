"""Who may come in: not more than the queue holds, and nobody while the server drains.

The engine has no limit of its own, so what is refused here never costs it anything. Counted are sequences, since n
samples take the place of n requests. Retry-After is the time that the backlog takes at the pace of late.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator

from .errors import RETRY_S, ApiError, overdue, shutting_down

MAX_RETRY_S = 600
WINDOW = 16  # answers that the running mean of durations remembers, roughly


class Admission:
    """Counts the open sequences: `running` at once in the engine, `waiting` besides. For one event loop."""

    def __init__(self, running: int, waiting: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._running, self._limit, self._clock = running, running + waiting, clock
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

    def has_room(self, sequences: int) -> bool:
        """Whether so many more may come in now."""
        return self._open + sequences <= self._limit

    @contextlib.contextmanager
    def admit(self, sequences: int, max_wait_s: float | None = None) -> Iterator[None]:
        """Hold places for these sequences. ApiError 503 while draining, 429 if there is no room, 400 if never.

        429 as well if the backlog will not have let them begin within `max_wait_s`.
        """
        self.check_open()
        if sequences > self._limit:
            raise ApiError(
                400, f"{sequences} sequences are asked for, this server holds at most {self._limit} at once", param="n"
            )
        if not self.has_room(sequences):
            raise ApiError(
                429,
                f"the queue is full: {self._open} sequences are open, at most {self._limit} may be",
                code="queue_full",
                retry_s=self.retry_s,
            )
        if max_wait_s is not None and (wait_s := self._wait_s(sequences)) > max_wait_s:
            raise overdue(
                f"the backlog takes about {wait_s:.1f} s, the request can wait {max_wait_s:g} s", self.retry_s
            )
        self._open += sequences
        self._empty.clear()
        started = self._clock()
        try:
            yield
            self._learn(self._clock() - started)
        finally:
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

    def _learn(self, duration_s: float) -> None:
        mean = self._mean_s
        self._mean_s = duration_s if mean is None else mean + (duration_s - mean) / WINDOW
