"""`LocalClient`: an engine on a thread of this process."""

from __future__ import annotations

import atexit
import logging
import queue
import threading
from collections.abc import Iterable

from ..kernels.device import give_back_freed_memory
from ..kernels.errors import EngineDead
from .engine import Core
from .loop import run_loop
from .messages import (
    Abort,
    Command,
    EngineInfo,
    EngineStats,
    Event,
    GetStates,
    GetStats,
    Outputs,
    Shutdown,
    States,
    Stats,
    Submit,
)
from .open_requests import OnOutput, OpenRequests, Tickets, answer_or_raise
from .request import Request
from .schedule.states import SequenceState

log = logging.getLogger(__name__)


class LocalClient:
    """Runs the engine on a thread of this process."""

    def __init__(self, engine: Core, info: EngineInfo) -> None:
        self.info = info
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._open, self._tickets = OpenRequests(info.epoch), Tickets()
        self._thread = threading.Thread(target=self._run, args=(engine,), name="llmctl-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread in the middle of a step would take the exiting process down

    def submit(self, request: Request, on_output: OnOutput) -> None:
        """See EngineClient."""
        self._open.add(request, on_output)
        self._commands.put(Submit(request))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """See EngineClient."""
        self._commands.put(Abort(request_id, index))

    @property
    def failure(self) -> EngineDead | None:
        """See EngineClient."""
        return self._open.error

    def stats(self) -> EngineStats:
        """See EngineClient."""
        self._open.check_process()
        ticket, answer = self._tickets.open()
        self._commands.put(GetStats(ticket))
        found = answer_or_raise(answer, self._open)
        assert isinstance(found, Stats), found
        return found.stats

    def states(self) -> tuple[SequenceState, ...]:
        """See EngineClient."""
        self._open.check_process()
        ticket, answer = self._tickets.open()
        self._commands.put(GetStates(ticket))
        found = answer_or_raise(answer, self._open)
        assert isinstance(found, States), found
        return found.states

    def close(self) -> None:
        """See EngineClient."""
        if self._open.is_ours:
            atexit.unregister(self.close)
            self._commands.put(Shutdown())
            self._thread.join()
            give_back_freed_memory()

    def _run(self, engine: Core) -> None:
        """Serve until told to end. The engine lives in this call alone, so that its memory goes with it."""
        reason = EngineDead("the engine was closed")
        try:
            run_loop(engine, self.info.epoch, self._inbox, self._emit)
        except Exception as error:  # a bug in the core surfaces here: every open request must learn of it
            log.exception("the engine stopped")
            reason = EngineDead(f"the engine stopped: {type(error).__name__}: {error}")
        finally:
            self._open.die(reason)
            self._tickets.close()
            engine.close()

    def _inbox(self, wait: bool) -> Iterable[Command]:
        commands = [self._commands.get()] if wait else []
        while not self._commands.empty():
            commands.append(self._commands.get())
        return commands

    def _emit(self, event: Event) -> None:
        match event:
            case Outputs(outputs):
                self._open.deliver(outputs)
            case Stats() | States():
                self._tickets.answer(event)
