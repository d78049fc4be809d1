"""`Frontend.stream` for an event loop, and for several requests at once (a list of prompts is one API call).

What a delta is, and when a sequence ends, is `Generation`'s matter; here outputs only change threads. Waking the loop
is dear, and a step of the engine brings an output for every open stream: what comes together is handed over with one
call.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from ...engine.frontend import Frontend, Generation, TextDelta
from ...engine.request import FinishReason, Output, Request
from .errors import ApiError, of_failed_sequence, overdue


class Mailbox:
    """Carries outputs from the client's thread to the loop that it was made on, in order, for all streams there."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._letters: deque[tuple[Callable[[Output], None], Output]] = deque()
        self._called = False

    def put(self, receive: Callable[[Output], None], output: Output) -> None:
        """Let the loop call `receive(output)`. A loop that has closed meanwhile has nobody who waits."""
        self._letters.append((receive, output))
        if not self._called:
            self._called = True
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._called = False  # before anything is taken: what comes from now on calls again, maybe for nothing
        letters = self._letters
        while letters:
            receive, output = letters.popleft()
            receive(output)


class Deltas:
    """The texts of open requests as they come. Made by `opened`, for the mailbox's loop."""

    def __init__(self, frontend: Frontend, mailbox: Mailbox) -> None:
        self._frontend, self._mailbox = frontend, mailbox
        self._loop = asyncio.get_running_loop()
        self._outputs: list[tuple[int, Output]] = []
        self._waiter: asyncio.Future[None] | None = None
        self._generations: list[Generation] = []
        self._unfinished = 0
        self._error: ApiError | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._waiting_since: float | None = None

    def open(self, request: Request) -> None:
        """Submit one more request. Raises EngineDead if the engine has stopped."""
        receive = functools.partial(self._receive, len(self._generations))
        self._generations.append(self._frontend.open(request, functools.partial(self._mailbox.put, receive)))
        self._unfinished += 1

    def close(self) -> None:
        """Abort what has not ended."""
        if self._alarm is not None:
            self._alarm.cancel()
        for generation in self._generations:
            generation.close()

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended and all of it was told."""
        return not self._unfinished and self._error is None

    async def next(self, patience_s: float) -> list[tuple[int, TextDelta]]:
        """All that came since the last call, as (which request, delta); nothing if nothing came for `patience_s`.

        A sequence that ends with an error raises ApiError after what came before: a part of an answer is no answer.
        """
        if self._alarm is None:
            self._alarm = self._loop.call_later(patience_s, self._ring, patience_s)
        while self._error is None:
            if not self._outputs:
                self._waiter, self._waiting_since = self._loop.create_future(), self._loop.time()
                try:
                    await self._waiter
                finally:
                    self._waiter = self._waiting_since = None
                if not self._outputs:
                    return []
            outputs, self._outputs = self._outputs, []
            if deltas := self._take(outputs):
                return deltas
        raise self._error

    def _take(self, outputs: Sequence[tuple[int, Output]]) -> list[tuple[int, TextDelta]]:
        deltas = []
        for which, output in outputs:
            generation = self._generations[which]
            delta = generation.take(output)
            if delta is None:
                continue
            if delta.finish is not None:
                if delta.finish is FinishReason.OVERDUE:
                    self._error = overdue(delta.error)
                    break
                if delta.finish in (FinishReason.ERROR, FinishReason.ABORT):
                    message = delta.error or "the request was aborted"
                    self._error = of_failed_sequence(message, self._frontend.client.failure)
                    break
                if generation.finished:
                    self._unfinished -= 1
            deltas.append((which, delta))
        return deltas

    def _ring(self, patience_s: float) -> None:
        """One alarm for all waits, which looks how long the present one lasts: a timer per token costs too much."""
        waited_s = 0.0 if self._waiting_since is None else self._loop.time() - self._waiting_since
        if waited_s >= patience_s:
            self._wake()
            waited_s = 0.0
        self._alarm = self._loop.call_later(patience_s - waited_s, self._ring, patience_s)

    def _receive(self, which: int, output: Output) -> None:
        self._outputs.append((which, output))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@contextlib.contextmanager
def opened(frontend: Frontend, mailbox: Mailbox, requests: Sequence[Request]) -> Iterator[Deltas]:
    """The deltas of these requests; leaving the block, however it happens, aborts what has not ended."""
    deltas = Deltas(frontend, mailbox)
    try:
        for request in requests:
            deltas.open(request)
        yield deltas
    finally:
        deltas.close()
