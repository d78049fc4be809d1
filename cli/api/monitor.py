"""What is known of the engine's progress, also when the engine does not answer.

The engine answers between two steps, so a question that stays open is the age of its last step. One question is open
at a time; it is asked once a second and whenever someone wants to know.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ...engine.client import EngineClient
from ...engine.messages import EngineStats
from ...engine.schedule.states import SequenceState
from ...kernels.errors import EngineDead

PERIOD_S = 1.0
STATES_S = 30.0  # how long one who asks for states waits: a step may take that long
PATIENCE_S = 0.5  # how long an endpoint waits for fresh figures before it shows the last ones


class Monitor:
    """The engine's counters. For one event loop; `close` after the client is closed, which answers what is open."""

    def __init__(self, client: EngineClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._clock = client, clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llmctl-monitor")
        self._question: asyncio.Future[EngineStats] | None = None
        self._asked = 0.0
        self._stats = EngineStats()

    @property
    def stats(self) -> EngineStats:
        """The counters as they were last told."""
        return self._stats

    @property
    def last_step_age_s(self) -> float:
        """Seconds since the engine last finished a step, 0 if it has nothing to do."""
        open_s = 0.0 if self._question is None else self._clock() - self._asked
        return max(self._stats.last_step_age_s, open_s)

    async def refresh(self, patience_s: float = PATIENCE_S) -> None:
        """Ask for the counters and wait for them, but not longer than this."""
        if self._question is None:
            self._asked = self._clock()
            self._question = asyncio.get_running_loop().run_in_executor(self._thread, self._client.stats)
        await asyncio.wait({self._question}, timeout=patience_s)
        if self._question is not None and self._question.done():
            question, self._question = self._question, None
            if not isinstance(question.exception(), EngineDead):  # the client's `failure` tells of that
                self._stats = question.result()

    async def states(self, patience_s: float = STATES_S) -> tuple[SequenceState, ...] | None:
        """Every sequence's state, None if the engine does not answer in time."""
        try:
            async with asyncio.timeout(patience_s):
                return await asyncio.get_running_loop().run_in_executor(self._thread, self._client.states)
        except (TimeoutError, EngineDead):
            return None

    async def watch(self) -> None:
        """Ask again and again, until cancelled or the engine has ended."""
        while self._client.failure is None:
            await self.refresh()
            await asyncio.sleep(PERIOD_S)

    def close(self) -> None:
        """Release the thread."""
        self._thread.shutdown(wait=False)
