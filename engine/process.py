"""The engine's process from the moment it has its orders, and this side's end of its socket.

Loading takes a while, and so does importing an HTTP server: whoever needs both gives the orders first, does the rest
meanwhile, and hands the process to `ProcessClient`. Hence this file imports next to nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import msgspec
import zmq

from .config import EngineConfig
from .early import take_worker


def new_epoch() -> int:
    """A number that no earlier start of an engine on this machine had."""
    return time.time_ns()


PREFIX = "llmctl-engine-"
_LOCK = "lock"


class Orders(msgspec.Struct, frozen=True):
    """What a worker needs to know, as JSON on its stdin.

    address  of the socket where it is awaited
    parent   the process that started it and sends this: without it the worker ends
    """

    address: str
    parent: int
    epoch: int
    config: EngineConfig


class EngineProcess:
    """A process that loads this model, reached over a fresh local socket. Its holder must `end` or `release` it."""

    def __init__(self, config: EngineConfig, epoch: int) -> None:
        self.epoch = epoch
        sweep()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = _lock(self.folder)
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        address = f"ipc://{self.folder}/engine"
        self.socket.bind(address)
        self.process = take_worker()
        _give_orders(self.process, Orders(address, os.getpid(), epoch, config))
        self._ended = False

    def kill(self) -> None:
        """Stop the process at once; its client tells the open requests that it ended."""
        self.process.kill()

    def end(self) -> None:
        """Stop the process if it still runs, and clear away what belongs to it. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        self.process.terminate()
        self.release()

    def release(self) -> None:
        """Clear away what belongs to a process that ends by itself, once it has."""
        self._ended = True
        self.socket.close()
        self.context.term()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def sweep() -> None:
    """Remove the socket folders of processes that ended without doing so: those whose lock nobody holds."""
    for lock in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{_LOCK}"):
        try:
            handle = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:  # another user's, or removed meanwhile
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(handle)


def _lock(folder: Path) -> int:
    """A descriptor of the folder's lock, held until it is closed or the process ends. It appears already locked."""
    handle = os.open(folder / "new", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_EX)
    os.rename(folder / "new", folder / _LOCK)
    return handle


def _give_orders(worker: subprocess.Popen[bytes], orders: Orders) -> None:
    """Tell the worker what to do. One that has ended meanwhile shows when its client waits for it."""
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError), worker.stdin as stdin:
        stdin.write(msgspec.json.encode(orders))
