"""`EngineClient`: how everything above the core reaches an engine, in this process or in another.

Outputs are handed to the request's callback on the client's own thread; a callback must be quick and must not raise.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec
import zmq

from ..kernels import errors
from ..kernels.errors import EngineDead, LlmctlError
from .config import EngineConfig
from .engine import Engine
from .load.progress import Progress
from .loop import run_loop
from .messages import (
    Abort,
    Command,
    EngineInfo,
    EngineStats,
    Event,
    Failed,
    GetStats,
    Loading,
    Outputs,
    Ready,
    Shutdown,
    Stats,
    Submit,
)  # fmt: skip
from .process import EngineProcess
from .request import FinishReason, Output, Request

log = logging.getLogger(__name__)

OnOutput = Callable[[Output], None]

CLOSE_S = 10.0  # how long an engine process may take to end when it is told to, before it is killed


class EngineClient(Protocol):
    """Submit requests, get outputs, end requests. Thread-safe."""

    info: EngineInfo

    def submit(self, request: Request, on_output: OnOutput) -> None:
        """Queue the request; every Output of it goes to `on_output`. Raises EngineDead if the engine has stopped."""

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request (or one of its sequences); it gets an Output with FinishReason.ABORT if it was still open."""

    @property
    def failure(self) -> EngineDead | None:
        """Why the engine stopped, None while it runs."""

    def stats(self) -> EngineStats:
        """The engine's counters as they are now."""

    def close(self) -> None:
        """Stop the engine; open requests are ended."""


class _Open:
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
        self.check_process()
        with self._lock:
            if self._dead is not None:
                raise EngineDead(self._dead.message, self._dead.hint)
            if request.id in self._requests:
                raise errors.UsageError(f"request id `{request.id}` is in use", "use another id, or none")
            self._requests[request.id] = on_output, set(range(request.sampling.n))

    def deliver(self, outputs: Iterable[Output]) -> None:
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
        with self._lock:
            return self._dead


class _Tickets:
    """Pending answers to GetStats."""

    def __init__(self) -> None:
        self._next = itertools.count()
        self._lock, self._closed = threading.Lock(), False
        self._waiting: dict[int, queue.SimpleQueue[EngineStats | None]] = {}

    def open(self) -> tuple[int, queue.SimpleQueue[EngineStats | None]]:
        ticket, answer = next(self._next), queue.SimpleQueue[EngineStats | None]()
        with self._lock:
            if self._closed:
                answer.put(None)
            else:
                self._waiting[ticket] = answer
        return ticket, answer

    def answer(self, event: Stats) -> None:
        with self._lock:
            waiting = self._waiting.pop(event.ticket, None)
        if waiting is not None:
            waiting.put(event.stats)

    def close(self) -> None:
        """Answer None to all that wait, and to all that come."""
        with self._lock:
            self._closed = True
            while self._waiting:
                self._waiting.popitem()[1].put(None)


class LocalClient:
    """Runs the engine on a thread of this process."""

    def __init__(self, engine: Engine, info: EngineInfo) -> None:
        self.info = info
        self._engine = engine
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._open, self._tickets = _Open(info.epoch), _Tickets()
        self._thread = threading.Thread(target=self._run, name="llmctl-engine", daemon=True)
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
        return _stats_or_raise(answer, self._open)

    def close(self) -> None:
        """See EngineClient."""
        if self._open.is_ours:
            atexit.unregister(self.close)
            self._commands.put(Shutdown())
            self._thread.join()

    def _run(self) -> None:
        reason = EngineDead("the engine was closed")
        try:
            run_loop(self._engine, self.info.epoch, self._inbox, self._emit)
        except Exception as error:  # a bug in the core surfaces here: every open request must learn of it
            log.exception("the engine stopped")
            reason = EngineDead(f"the engine stopped: {type(error).__name__}: {error}")
        finally:
            self._open.die(reason)
            self._tickets.close()
            self._engine.close()

    def _inbox(self, wait: bool) -> Iterable[Command]:
        commands = [self._commands.get()] if wait else []
        while not self._commands.empty():
            commands.append(self._commands.get())
        return commands

    def _emit(self, event: Event) -> None:
        match event:
            case Outputs(outputs):
                self._open.deliver(outputs)
            case Stats():
                self._tickets.answer(event)


class ProcessClient:
    """Runs the engine in a process of its own and reaches it over a fresh local socket.

    The constructor waits until the model is loaded; setting `cancelled` makes it give up and raise EngineDead. A
    process that was `started` already for this very config is taken over, and `epoch` is then its own.
    """

    def __init__(
        self,
        config: EngineConfig,
        epoch: int = 1,
        progress: Progress | None = None,
        cancelled: threading.Event | None = None,
        started: EngineProcess | None = None,
    ) -> None:
        self._engine = EngineProcess(config, epoch) if started is None else started
        self._process, self._socket, self._context = self._engine.process, self._engine.socket, self._engine.context
        self._wake = f"inproc://wake-{id(self)}"
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
        try:
            self.info = self._await_ready(progress, cancelled or threading.Event())
        except BaseException:
            self._engine.end()
            raise
        self._open, self._tickets = _Open(self._engine.epoch), _Tickets()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._wake_lock, self._running = threading.Lock(), True
        self._receiver = self._context.socket(zmq.PAIR)
        self._receiver.bind(self._wake)
        self._sender = self._context.socket(zmq.PAIR)
        self._sender.connect(self._wake)
        self._thread = threading.Thread(target=self._run, name="llmctl-engine-client", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @property
    def pid(self) -> int:
        """The engine process."""
        return self._process.pid

    def submit(self, request: Request, on_output: OnOutput) -> None:
        """See EngineClient."""
        self._open.add(request, on_output)
        self._send(Submit(request))

    def abort(self, request_id: str, index: int | None = None) -> None:
        """See EngineClient."""
        self._send(Abort(request_id, index))

    @property
    def failure(self) -> EngineDead | None:
        """See EngineClient."""
        return self._open.error

    def stats(self) -> EngineStats:
        """See EngineClient."""
        self._open.check_process()
        ticket, answer = self._tickets.open()
        self._send(GetStats(ticket))
        return _stats_or_raise(answer, self._open)

    def close(self) -> None:
        """See EngineClient. An engine that does not end by itself is killed."""
        if not self._open.is_ours:
            return
        atexit.unregister(self.close)
        self._send(Shutdown())
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            log.warning("the engine process did not end within %g s and is killed", CLOSE_S)
            self._process.kill()
            self._thread.join()

    def kill(self) -> None:
        """Stop the engine process at once; open requests are told that it ended."""
        self._process.kill()

    def _send(self, command: Command) -> None:
        self._commands.put(command)
        with self._wake_lock:
            if self._running:
                with contextlib.suppress(zmq.Again):  # full of calls that were not answered yet: one more says nothing
                    self._sender.send(b"", zmq.NOBLOCK)

    def _await_ready(self, progress: Progress | None, cancelled: threading.Event) -> EngineInfo:
        while True:
            while not self._socket.poll(200) or cancelled.is_set():
                if cancelled.is_set():
                    raise EngineDead("the engine was stopped while it was loading")
                if (code := self._process.poll()) is not None and not self._socket.poll(0):
                    raise EngineDead(f"the engine process ended with exit code {code} while it was loading")
            match self._decoder.decode(self._socket.recv()):
                case Ready(info):
                    return info
                case Loading(description, done, total):
                    if progress is not None:
                        progress(description, done, total)
                case Failed() as failed:
                    self._process.wait()
                    raise _rebuild(failed)

    def _run(self) -> None:
        """The only thread that touches the engine's socket: carries commands out and events in until one side ends."""
        reason = EngineDead("the engine was closed")
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._receiver, zmq.POLLIN)
        closing = False
        while True:
            ready = dict(poller.poll(500))
            if self._receiver in ready:
                self._receiver.recv()
            while not self._commands.empty():
                command = self._commands.get()
                closing = closing or isinstance(command, Shutdown)
                with contextlib.suppress(zmq.Again):  # there is no limit to what may wait: the other side is gone
                    self._socket.send(self._encoder.encode(command), zmq.NOBLOCK)
            if self._socket in ready and not self._receive():
                continue
            if (code := self._process.poll()) is not None and not self._socket.poll(0):
                if not closing:
                    reason = EngineDead(f"the engine process ended with exit code {code}")
                break
        self._open.die(reason)
        self._tickets.close()
        with self._wake_lock:
            self._running = False
            self._sender.close()
        self._receiver.close()
        self._engine.release()

    def _receive(self) -> bool:
        """Handle one event; whether it says that the engine failed."""
        match self._decoder.decode(self._socket.recv()):
            case Outputs(outputs):
                self._open.deliver(outputs)
            case Stats() as stats:
                self._tickets.answer(stats)
            case Failed(kind, message, _):
                self._open.die(EngineDead(f"the engine stopped: {kind}: {message}"))
                self._process.wait()
                return True
        return False


def _rebuild(failed: Failed) -> LlmctlError:
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, LlmctlError):
        return kind(failed.message, failed.hint)
    return EngineDead(f"the engine could not start: {failed.kind}: {failed.message}", failed.hint)


def _stats_or_raise(answer: queue.SimpleQueue[EngineStats | None], requests: _Open) -> EngineStats:
    stats = answer.get()
    return stats if stats is not None else _raise(requests)


def _raise(requests: _Open) -> EngineStats:
    raise requests.error or EngineDead("the engine was closed")
