"""The age of the engine's last step, also when the engine does not answer."""

import asyncio
import queue

from llmctl.cli.api.monitor import Monitor
from llmctl.engine.messages import EngineStats
from llmctl.kernels.errors import EngineDead


class Client:
    """Answers what it is told to, and not before."""

    def __init__(self):
        self.answers = queue.SimpleQueue()
        self.failure = None

    def stats(self):
        answer = self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_question_that_stays_open_is_the_age_of_the_last_step():
    async def scenario():
        client, now = Client(), 0.0
        monitor = Monitor(client, clock=lambda: now)
        client.answers.put(EngineStats(steps=3, last_step_age_s=0.25))
        await monitor.refresh(patience_s=60)
        assert (monitor.stats.steps, monitor.last_step_age_s) == (3, 0.25)
        await monitor.refresh(patience_s=0)
        now = 100.0
        await monitor.refresh(patience_s=0)  # no second question while one is open
        assert (monitor.stats.steps, monitor.last_step_age_s) == (3, 100.0)
        client.answers.put(EngineStats(steps=4))
        await monitor.refresh(patience_s=60)
        assert (monitor.stats.steps, monitor.last_step_age_s) == (4, 0.0)
        monitor.close()

    asyncio.run(scenario())


def test_an_engine_that_dies_leaves_the_last_figures():
    async def scenario():
        client = Client()
        monitor = Monitor(client)
        client.answers.put(EngineStats(steps=3))
        await monitor.refresh(patience_s=60)
        client.answers.put(EngineDead("gone"))
        await monitor.refresh(patience_s=60)
        assert monitor.stats.steps == 3
        client.failure = EngineDead("gone")
        await monitor.watch()
        monitor.close()

    asyncio.run(scenario())
