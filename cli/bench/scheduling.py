"""CPU time that scheduler and prefix tree take for a step, with a runner that computes nothing.

Sequences of random prompts decode side by side, and whenever one ends another enters, so that admission, the tree and
the ends are in the mean as they are in a server. No prompt begins like another: the tree is looked up and filled, and
never serves a token. What it costs is the difference to a run without it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import msgspec

from ...engine.config import EngineConfig
from ...engine.request import Request, SamplingParams
from ...engine.schedule.limits import SchedulerConfig
from ...engine.schedule.scheduler import Scheduler
from ...engine.schedule.step import Chunk, ChunkResult, Step, StepResult

RUNNING = (1, 64, 256)
PROMPT, ANSWER = 128, 256  # tokens; answers are this long in the mean, from half of it to half more
STEPS = 1000

Clock = Callable[[], int]


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds per step with `running` sequences: of `schedule`, of `update`, of both (total), and what of the
    total is the prefix tree's."""

    running: int
    steps: int
    schedule_us: float
    update_us: float
    total_us: float
    tree_us: float


def step_cost(config: EngineConfig, running: int, steps: int = STEPS, clock: Clock = time.thread_time_ns) -> StepCost:
    """What a step costs with so many sequences. `clock` counts nanoseconds of this thread's CPU time."""
    schedule, update = _run(config, running, steps, config.enable_prefix_caching, clock)
    bare = sum(_run(config, running, steps, False, clock)) if config.enable_prefix_caching else schedule + update
    return StepCost(
        running=running,
        steps=steps,
        schedule_us=schedule,
        update_us=update,
        total_us=schedule + update,
        tree_us=max(0.0, schedule + update - bare),
    )


def _run(config: EngineConfig, running: int, steps: int, caching: bool, clock: Clock) -> tuple[float, float]:
    """Microseconds of `schedule` and of `update` per step, in the mean."""
    longest = PROMPT + 2 * ANSWER
    limits = SchedulerConfig(
        max_num_seqs=running,
        max_num_batched_tokens=max(config.max_num_batched_tokens, running + PROMPT),
        block_size=config.block_size,
        num_blocks=(-(-longest // config.block_size) * (running + 1) * 2,),
        max_model_len=longest,
        enable_prefix_caching=caching,
        policy=config.scheduling_policy,
        eviction_k=config.eviction_k,
        speculation=config.speculative_config,
    )
    scheduler = Scheduler(limits)
    source = random.Random(1)
    runner = _NullRunner(source)
    names = iter(range(1 << 60))

    def add(length: int) -> None:
        prompt = tuple(source.randrange(1 << 15) for _ in range(PROMPT))
        scheduler.add(
            Request(
                id=str(next(names)),
                prompt=prompt,
                sampling=SamplingParams(temperature=0.0),
                seed=1,
                stop_ids=(),
                max_tokens=length,
            )
        )

    for _ in range(running):  # as if they had begun at different times
        add(source.randrange(1, ANSWER))
    in_schedule = in_update = 0
    for number in range(-running, steps):  # all have entered when the count begins
        begin = clock()
        step = scheduler.schedule()
        middle = clock()
        assert step is not None, "there is always somebody to run"
        result = runner.run(step)
        resumed = clock()
        outputs = scheduler.update(result)
        end = clock()
        if number >= 0:
            in_schedule += middle - begin
            in_update += end - resumed
        for output in outputs:
            if output.finish is not None:
                add(source.randrange(ANSWER // 2, ANSWER + ANSWER // 2))
    return in_schedule / steps / 1000, in_update / steps / 1000


class _NullRunner:
    """Samples random tokens and accepts no draft."""

    def __init__(self, source: random.Random) -> None:
        self._source = source

    def run(self, step: Step) -> StepResult:
        return StepResult(step.index, tuple(map(self._result, step.chunks)))

    def _result(self, chunk: Chunk) -> ChunkResult:
        if chunk.logits_from == chunk.count:
            return ChunkResult(chunk.slot)
        return ChunkResult(chunk.slot, (self._source.randrange(1 << 15),))
