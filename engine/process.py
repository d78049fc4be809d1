"""The engine's process from the moment it has its orders, and this side's end of its socket.

Loading takes a while, and so does importing an HTTP server: whoever needs both gives the orders first, does the rest
meanwhile, and hands the process to `ProcessClient`. Hence this file imports next to nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import msgspec
import zmq

from ..kernels.errors import CapacityError, UsageError
from .config import EngineConfig
from .early import take_worker


def new_epoch() -> int:
    """A number that no earlier start of an engine on this machine had."""
    return time.time_ns()


PREFIX = "llmctl-engine-"
_LOCK, _SOCKET = "lock", "engine"
_RANDOM = "x" * 8  # what mkdtemp adds
_SHORT = "/tmp"
OPEN_FILES = 48  # that an engine needs at most, in this process or in its own, before the first client; half are spare


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
        _check_open_files()
        sweep()
        self.folder = _make_folder()
        self._lock = _lock(self.folder)
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        address = f"ipc://{self.folder}/{_SOCKET}"
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
    for lock in _place().glob(f"{PREFIX}*/{_LOCK}"):
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


def _place() -> Path:
    """Where folders for sockets are made: among temporary files, or in /tmp if a path there would be too long."""
    usual = tempfile.gettempdir()
    longest = len(os.fsencode(f"{usual}/{PREFIX}{_RANDOM}/{_SOCKET}"))
    return Path(usual if longest <= zmq.IPC_PATH_MAX_LEN else _SHORT)


def _make_folder() -> Path:
    """A new folder for a socket; UsageError if there is no place for one."""
    place = _place()
    try:
        return Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    except OSError as error:
        usual = tempfile.gettempdir()
        if str(place) == usual:
            raise UsageError(f"cannot make a folder in `{usual}`: {error.strerror}", "set TMPDIR to another") from error
        raise UsageError(
            f"`{usual}` is too long for a socket's path, which may have {zmq.IPC_PATH_MAX_LEN} bytes, and a folder in "
            f"`{place}` cannot be made: {error.strerror}",
            "set TMPDIR to a shorter one",
        ) from error


def _check_open_files() -> None:
    """CapacityError if this process may not open what an engine takes: a library would abort where it is refused."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    try:
        used = len(os.listdir("/proc/self/fd")) - 1  # one is for looking
    except OSError:  # there is not even one left to look with
        used = limit
    if limit != resource.RLIM_INFINITY and limit - used < OPEN_FILES:
        raise CapacityError(
            f"an engine needs up to {OPEN_FILES} open files, this process has {used} and may have {limit}",
            f"allow more, as with `ulimit -n {max(1024, 2 * (used + OPEN_FILES))}`",
        )


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
