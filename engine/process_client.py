"""`ProcessClient`: an engine in a process of its own, reached over a local socket."""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from ..kernels import errors
from ..kernels.errors import EngineDead, LlmctlError
from .config import EngineConfig
from .load.progress import Progress
from .messages import (
    Abort,
    Command,
    EngineInfo,
    EngineStats,
    Event,
    Failed,
    GetStates,
    GetStats,
    Loading,
    Opened,
    Outputs,
    Ready,
    Shutdown,
    States,
    Stats,
    Submit,
)  # fmt: skip
from .open_requests import OnOutput, OpenRequests, Tickets, answer_or_raise
from .process import EngineProcess
from .request import Request
from .schedule.states import SequenceState

log = logging.getLogger(__name__)

_FAULT = "this is a fault of llmctl itself: what it was asked and `llmctl doctor` would help to find it"
_KILLED_BY: dict[int, str] = {
    signal.SIGBUS: "a file that it had mapped, such as the packed weights, was cut short or cannot be read from disk",
    signal.SIGKILL: "the system kills what takes more memory than there is: `dmesg` tells; a smaller "
    "--kv-cache-memory-bytes leaves more",
    signal.SIGTERM: "somebody ended it: to end llmctl, signal the process that was started",
    **dict.fromkeys((signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE), _FAULT),
}
CLOSE_S = 10.0  # how long an engine process may take to end when it is told to, before it is killed


class ProcessClient:
    """Runs the engine in a process of its own and reaches it over a fresh local socket.

    The constructor waits until the model is loaded; setting `cancelled` makes it give up and raise EngineDead. A
    process that was `started` already for this very config is taken over, and `epoch` is then its own. `opened` is
    called with the folder that has the model's tokenizer, while the engine is still being built.
    """

    def __init__(
        self,
        config: EngineConfig,
        epoch: int = 1,
        progress: Progress | None = None,
        cancelled: threading.Event | None = None,
        started: EngineProcess | None = None,
        opened: Callable[[Path], None] | None = None,
    ) -> None:
        self._engine = EngineProcess(config, epoch) if started is None else started
        self._process, self._socket, self._context = self._engine.process, self._engine.socket, self._engine.context
        self._wake = f"inproc://wake-{id(self)}"
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
        try:
            self.info = self._await_ready(progress, cancelled or threading.Event(), opened)
        except BaseException:
            self._engine.end()
            raise
        self._open, self._tickets = OpenRequests(self._engine.epoch), Tickets()
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
        found = answer_or_raise(answer, self._open)
        assert isinstance(found, Stats), found
        return found.stats

    def states(self) -> tuple[SequenceState, ...]:
        """See EngineClient."""
        self._open.check_process()
        ticket, answer = self._tickets.open()
        self._send(GetStates(ticket))
        found = answer_or_raise(answer, self._open)
        assert isinstance(found, States), found
        return found.states

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

    def _send(self, command: Command) -> None:
        self._commands.put(command)
        with self._wake_lock:
            if self._running:
                with contextlib.suppress(zmq.Again):  # full of calls that were not answered yet: one more says nothing
                    self._sender.send(b"", zmq.NOBLOCK)

    def _await_ready(
        self, progress: Progress | None, cancelled: threading.Event, opened: Callable[[Path], None] | None
    ) -> EngineInfo:
        while True:
            while not self._socket.poll(200) or cancelled.is_set():
                if cancelled.is_set():
                    raise EngineDead("the engine was stopped while it was loading")
                if (code := self._process.poll()) is not None and not self._socket.poll(0):
                    raise _ended(code, " while it was loading")
            match self._decoder.decode(self._socket.recv()):
                case Ready(info):
                    return info
                case Loading(description, done, total):
                    if progress is not None:
                        progress(description, done, total)
                case Opened(folder):
                    if opened is not None:
                        opened(Path(folder))
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
                    reason = _ended(code)
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
            case Stats() | States() as stats:
                self._tickets.answer(stats)
            case Failed(kind, message, _):
                self._open.die(EngineDead(f"the engine stopped: {kind}: {message}"))
                self._process.wait()
                return True
        return False


def _ended(code: int, when: str = "") -> EngineDead:
    """The error for a process that ended unasked, with what its signal usually means."""
    names = {-number: f" ({signal.Signals(number).name})" for number in _KILLED_BY}
    message = f"the engine process ended with exit code {code}{names.get(code, '')}{when}"
    return EngineDead(message, _KILLED_BY.get(-code, ""))


def _rebuild(failed: Failed) -> LlmctlError:
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, LlmctlError):
        return kind(failed.message, failed.hint)
    return EngineDead(f"the engine could not start: {failed.kind}: {failed.message}", failed.hint)
