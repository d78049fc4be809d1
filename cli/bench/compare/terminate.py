"""SIGTERM as a cancellation, so that a command that is ended ends what it started."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def cancelled_by_sigterm(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; SIGTERM cancels it, as Ctrl-C does, and if it does not return then, KeyboardInterrupt."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    signals: list[signal.Signals] = []

    def end() -> None:
        signals.append(signal.SIGTERM)
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, end)
    try:
        return await work
    except asyncio.CancelledError:
        if signals:
            raise KeyboardInterrupt from None
        raise
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
