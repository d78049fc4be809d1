"""SIGTERM in the middle of something: what is unfinished is cleared away, and the process ends by it all the same."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class _Terminated(BaseException):
    """SIGTERM, on its way through the block's `finally`s."""


@contextmanager
def cleared_by_sigterm() -> Iterator[None]:
    """A block that SIGTERM leaves as an exception does, after which the process ends by SIGTERM as it would have.

    Where somebody handles SIGTERM already, or it is ignored, it stays so, and so it does on a thread that takes no
    signals. A second SIGTERM, as a process gets it whose whole group is ended, does not stop the clearing.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL or (
        threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    told = False

    def leave(number: int, frame: FrameType | None) -> None:
        nonlocal told
        told = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Terminated

    try:
        signal.signal(signal.SIGTERM, leave)
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if told:
            signal.raise_signal(signal.SIGTERM)
