"""`Frontend.stream` for an event loop, and for several requests at once (a list of prompts is one API call).

What a delta is, and when a sequence ends, is `Generation`'s matter; here outputs only change threads: the client's
callback hands them to the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterator, Sequence

from ...engine.frontend import Frontend, Generation, TextDelta
from ...engine.request import FinishReason, Output, Request
from .errors import of_failed_sequence


class Deltas:
    """The texts of open requests as they come. Made by `opened`, for the loop that it was made on."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[tuple[int, Output] | None] = asyncio.Queue()  # None: nothing came for a while
        self._generations: list[Generation] = []
        self._alarm: asyncio.TimerHandle | None = None
        self._waiting_since: float | None = None

    def open(self, request: Request) -> None:
        """Submit one more request. Raises EngineDead if the engine has stopped."""
        carry = functools.partial(self._carry, len(self._generations))
        self._generations.append(self._frontend.open(request, carry))

    def close(self) -> None:
        """Abort what has not ended."""
        if self._alarm is not None:
            self._alarm.cancel()
        for generation in self._generations:
            generation.close()

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""
        return all(generation.finished for generation in self._generations)

    async def next(self, patience_s: float) -> tuple[int, TextDelta] | None:
        """(which request, its next delta), or None if nothing came for `patience_s`.

        A sequence that ends with an error raises ApiError: a part of an answer is no answer.
        """
        if self._alarm is None:
            self._alarm = self._loop.call_later(patience_s, self._ring, patience_s)
        while True:
            self._waiting_since = self._loop.time()
            item = await self._outputs.get()
            self._waiting_since = None
            if item is None:
                return None
            which, output = item
            delta = self._generations[which].take(output)
            if delta is None:
                continue
            if delta.finish in (FinishReason.ERROR, FinishReason.ABORT):
                message = delta.error or "the request was aborted"
                raise of_failed_sequence(message, self._frontend.client.failure)
            return which, delta

    def _ring(self, patience_s: float) -> None:
        """One alarm for all waits, which looks how long the present one lasts: a timer per token costs too much."""
        waited_s = 0.0 if self._waiting_since is None else self._loop.time() - self._waiting_since
        if waited_s >= patience_s:
            self._outputs.put_nowait(None)
            waited_s = 0.0
        self._alarm = self._loop.call_later(patience_s - waited_s, self._ring, patience_s)

    def _carry(self, which: int, output: Output) -> None:
        """Called on the client's thread. A loop that has closed meanwhile has nobody who waits."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, (which, output))


@contextlib.contextmanager
def opened(frontend: Frontend, requests: Sequence[Request]) -> Iterator[Deltas]:
    """The deltas of these requests; leaving the block, however it happens, aborts what has not ended."""
    deltas = Deltas(frontend)
    try:
        for request in requests:
            deltas.open(request)
        yield deltas
    finally:
        deltas.close()
