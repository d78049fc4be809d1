"""A worker that is started before anybody knows which model it shall load, and imports meanwhile.

Reading a command line takes a good part of the time in which a server gives its first token, and so do a worker's
imports. A worker gets its orders over its stdin, and one that gets none, because the command line has a mistake or only
asks for help, ends without a word. This file imports as little as it can.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

# An environment variable. numpy's OpenBLAS has threads that would spin for a tenth of a second as soon as they are
# there, on CPUs that others import on. Nothing that it computes depends on how soon they go to sleep.
QUIET_BLAS = "OPENBLAS_THREAD_TIMEOUT", "4"

_begun: list[subprocess.Popen[bytes]] = []


def begin_worker() -> None:
    """Start the worker that the next `take_worker` returns, unless the system refuses, which that one will tell."""
    with contextlib.suppress(OSError):
        _begun.append(_start())


def take_worker() -> subprocess.Popen[bytes]:
    """A worker that waits for its orders: the one that was begun, or a new one."""
    while _begun:
        worker = _begun.pop()
        if worker.poll() is None:
            return worker
    return _start()


def _start() -> subprocess.Popen[bytes]:
    """The process, with Ctrl-C blocked from its first instruction on: it belongs to us, and we tell the engine to stop.

    A process inherits what the thread that starts it blocks. Here it comes through as soon as it is let in again.
    """
    command = [sys.executable, "-P", "-m", f"{__package__}.worker"]
    surroundings = dict([QUIET_BLAS]) | os.environ
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, env=surroundings)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
