"""SIGTERM or SIGHUP in the middle of something: what is unfinished is cleared away, then the process ends by it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = (signal.SIGTERM, signal.SIGHUP)


class _Terminated(BaseException):
    """A signal that ends the process, on its way through the block's `finally`s."""


@contextmanager
def cleared_by_signals() -> Iterator[None]:
    """A block that SIGTERM and SIGHUP leave as an exception does, after which the process ends by it as it would have.

    Where somebody handles one of them already, or it is ignored, it stays so, and so do both on a thread that takes no
    signals. A second one, as a process gets it whose whole group is ended, does not stop the clearing.
    """
    mine = [each for each in _ENDING if signal.getsignal(each) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        mine = []
    told = 0

    def leave(number: int, frame: FrameType | None) -> None:
        nonlocal told
        told = number
        for each in mine:
            signal.signal(each, signal.SIG_IGN)
        raise _Terminated

    try:
        for each in mine:
            signal.signal(each, leave)
        yield
    finally:
        for each in mine:
            signal.signal(each, signal.SIG_DFL)
        if told:
            signal.raise_signal(told)


@contextmanager
def undisturbed() -> Iterator[None]:
    """A short block that ends before a signal that ends it is heard of."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *_ENDING))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
