"""SIGTERM as Ctrl-C, so that a long command that is ended by a supervisor cleans up as it does for a person.

Whatever handles Ctrl-C at the moment is called: Python's handler, or asyncio's while a loop runs. Only the exit code
differs. Commands that have an end of their own (`serve`) or go on after a Ctrl-C (`chat`) do not use this.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from .console import Console
from .exits import ExitCode


@contextmanager
def sigterm_like_ctrl_c(console: Console) -> Iterator[None]:
    """A block that SIGTERM interrupts, which then ends the command with ExitCode.TERMINATED.

    Where SIGTERM is ignored it stays so, and so it does on a thread that takes no signals.
    """
    before = signal.getsignal(signal.SIGTERM)
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    ended = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ended
        ended = True
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            handler(signal.SIGINT, frame)
        else:  # a shell has us ignore Ctrl-C, as it does for what runs in the background
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        if not ended:
            raise
        console.say("terminated")
        raise typer.Exit(ExitCode.TERMINATED) from None
    except typer.Exit as leaving:
        if ended and leaving.exit_code == ExitCode.INTERRUPTED:
            raise typer.Exit(ExitCode.TERMINATED) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
