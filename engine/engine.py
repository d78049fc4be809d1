"""The core loop: schedule, run, update. Ints in, ints out; no text, no threads, no sockets."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from .deadlines import Deadlines
from .request import Output, Request
from .schedule.scheduler import Scheduler
from .schedule.states import SequenceState
from .schedule.stats import SchedulerStats
from .schedule.step import Step, StepResult


class Pending(Protocol):
    """A step that was submitted; `result` waits for it."""

    def result(self) -> StepResult: ...


class StepRunner(Protocol):
    """Runs Steps in the order of submission."""

    def submit(self, step: Step) -> Pending: ...

    def close(self) -> None: ...


class Core(Protocol):
    """What drives an engine sees of it, see Engine."""

    @property
    def has_work(self) -> bool: ...

    def add(self, request: Request) -> None: ...

    def abort(self, request_id: str, index: int | None = None) -> tuple[Output, ...]: ...

    def step(self) -> tuple[Output, ...]: ...

    def stats(self) -> SchedulerStats: ...

    def states(self) -> tuple[SequenceState, ...]: ...

    def close(self) -> None: ...


class Engine:
    """Requests to outputs. At most `depth` steps are in flight; depth 2 gives the tokens of depth 1."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        depth: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._scheduler, self._runner, self._depth, self._clock = scheduler, runner, depth, clock
        self._pending: deque[tuple[Pending, float]] = deque()  # with the time it was submitted at
        self._last_result = 0.0
        self._scheduler_s = self._step_s = 0.0
        self._deadlines = Deadlines()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._pending) or self._scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request. Raises CapacityError if it could never run."""
        self._scheduler.add(request)
        self._deadlines.add(request, self._clock())
        self._deadlines.prune(self._scheduler.knows)

    def abort(self, request_id: str, index: int | None = None) -> tuple[Output, ...]:
        """End a request (or one of its sequences); its blocks are free at once. Unknown ids do nothing."""
        return self._scheduler.abort(request_id, index)

    def step(self) -> tuple[Output, ...]:
        """Keep `depth` steps in flight and return what the oldest of them produced."""
        started = begin = self._clock()
        for request_id, due in self._deadlines.urgent(started):
            self._scheduler.hurry(request_id, due)
        while len(self._pending) < self._depth and (step := self._scheduler.schedule()) is not None:
            submitted = self._clock()
            self._scheduler_s += submitted - begin
            self._pending.append((self._runner.submit(step), submitted))
            begin = self._clock()
        expired: tuple[Output, ...] = ()
        for request_id, told in self._deadlines.overdue(started):  # who has just begun is in time
            expired += self._scheduler.expire(request_id, told)
        if not self._pending:
            return expired
        pending, submitted = self._pending.popleft()
        result = pending.result()
        done = self._clock()
        seconds = done - max(submitted, self._last_result)  # a step begins when the one before it ends
        outputs = self._scheduler.update(result, seconds)
        self._last_result = done
        ended = self._clock()
        self._scheduler_s += ended - done
        self._step_s += ended - started
        return expired + outputs

    def stats(self) -> SchedulerStats:
        """Counters of the scheduler and the KV pool as they are now."""
        stats = self._scheduler.stats()
        return dataclasses.replace(stats, scheduler_s=self._scheduler_s - stats.draft_s, step_s=self._step_s)

    def states(self) -> tuple[SequenceState, ...]:
        """Every unfinished sequence in order of arrival, after those that ended last."""
        return self._scheduler.ended() + self._scheduler.states()

    def close(self) -> None:
        """Wait for the steps in flight, whose tokens nobody awaits any more, and release the runner."""
        while self._pending:
            pending, _ = self._pending.popleft()
            with contextlib.suppress(Exception):  # one that fails has stopped the engine, which says so
                pending.result()
        self._runner.close()
