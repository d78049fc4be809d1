"""What every client keeps, however its engine is reached: open requests, and questions that wait for an answer."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable

from ..kernels.errors import EngineDead, UsageError
from .messages import States, Stats
from .request import FinishReason, Output, Request

log = logging.getLogger(__name__)

OnOutput = Callable[[Output], None]


class OpenRequests:
    """The open requests of a client: who gets the outputs, and which sequences have not ended."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._lock = threading.Lock()
        self._requests: dict[str, tuple[OnOutput, set[int]]] = {}
        self._dead: EngineDead | None = None
        self._pid = os.getpid()

    def check_process(self) -> None:
        """Raise EngineDead in a process that was forked from the one that has the engine: its threads are not here."""
        if os.getpid() != self._pid:
            raise EngineDead(
                f"this engine belongs to process {self._pid}, from which this one was forked",
                "make the LLM after the fork, or start processes with the method `spawn`",
            )

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that has the engine."""
        return os.getpid() == self._pid

    def add(self, request: Request, on_output: OnOutput) -> None:
        """Take note of a request; EngineDead if the engine has stopped, UsageError if its id is in use."""
        self.check_process()
        with self._lock:
            if self._dead is not None:
                raise EngineDead(self._dead.message, self._dead.hint)
            if request.id in self._requests:
                raise UsageError(f"request id `{request.id}` is in use", "use another id, or none")
            self._requests[request.id] = on_output, set(range(request.sampling.n))

    def deliver(self, outputs: Iterable[Output]) -> None:
        """Hand outputs to their callbacks, without those of ended sequences and of earlier starts."""
        for output in outputs:
            with self._lock:
                entry = self._requests.get(output.request_id)
                if entry is None or output.epoch != self._epoch or output.index not in entry[1]:
                    continue
                if output.finish is not None:
                    entry[1].discard(output.index)
                    if not entry[1]:
                        del self._requests[output.request_id]
            self._hand(entry[0], output)

    @staticmethod
    def _hand(on_output: OnOutput, output: Output) -> None:
        """A callback that raises harms its own request only."""
        try:
            on_output(output)
        except Exception:
            log.exception("the callback of request %s raised", output.request_id)

    def die(self, error: EngineDead) -> None:
        """Fail every open request and refuse new ones."""
        with self._lock:
            self._dead = self._dead or error
            ended, self._requests = self._requests, {}
        for request_id, (on_output, indices) in ended.items():
            for index in sorted(indices):
                end = Output(
                    request_id=request_id, index=index, epoch=self._epoch, first=0, tokens=(),
                    finish=FinishReason.ERROR, error=error.message,
                )  # fmt: skip
                self._hand(on_output, end)

    @property
    def error(self) -> EngineDead | None:
        """Why the engine stopped, None while it runs."""
        with self._lock:
            return self._dead


Answer = Stats | States


class Tickets:
    """Pending answers to GetStats and GetStates."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._lock, self._closed = threading.Lock(), False
        self._waiting: dict[int, queue.SimpleQueue[Answer | None]] = {}

    def open(self) -> tuple[int, queue.SimpleQueue[Answer | None]]:
        """(ticket, where its answer will be)."""
        ticket, answer = next(self._next), queue.SimpleQueue[Answer | None]()
        with self._lock:
            if self._closed:
                answer.put(None)
            else:
                self._waiting[ticket] = answer
        return ticket, answer

    def answer(self, event: Answer) -> None:
        """Hand the answer to whoever holds the ticket."""
        with self._lock:
            waiting = self._waiting.pop(event.ticket, None)
        if waiting is not None:
            waiting.put(event)

    def close(self) -> None:
        """Answer None to all that wait, and to all that come."""
        with self._lock:
            self._closed = True
            while self._waiting:
                self._waiting.popitem()[1].put(None)


def answer_or_raise(answer: queue.SimpleQueue[Answer | None], requests: OpenRequests) -> Answer:
    """The answer to a ticket once it is there; EngineDead if the engine stops before."""
    found = answer.get()
    if found is None:
        raise requests.error or EngineDead("the engine was closed")
    return found
