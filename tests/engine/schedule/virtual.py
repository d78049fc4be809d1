"""An engine on a virtual clock: steps take what a cost model says, and nothing else takes any time."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

from llmctl.engine.engine import Engine
from llmctl.engine.request import Output, Request
from llmctl.engine.schedule.limits import SchedulerConfig
from llmctl.engine.schedule.scheduler import Scheduler
from llmctl.engine.schedule.step import ChunkResult, Step, StepResult


@dataclass(frozen=True)
class Cost:
    """Seconds of a step: `base`, and more for each decode and each prompt token."""

    base: float = 0.005
    decode: float = 0.0013
    token: float = 0.0008


class Result:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def result(self) -> StepResult:
        return self._result


@dataclass
class Simulation:
    """Requests by their times through a real scheduler. All times are in virtual seconds."""

    config: SchedulerConfig
    cost: Cost = field(default_factory=Cost)
    seed: int = 1

    def __post_init__(self) -> None:
        self.now = 0.0
        self.steps: list[Step] = []
        self.arrived: dict[str, float] = {}
        self.came: dict[str, list[float]] = {}  # when each token did
        self.ended: dict[str, Output] = {}
        self.ended_at: dict[str, float] = {}
        self._random = random.Random(self.seed)
        self.engine = Engine(Scheduler(self.config), self, self.config.depth, clock=lambda: self.now)

    def submit(self, step: Step) -> Result:
        decodes = sum(chunk.count == 1 for chunk in step.chunks)
        tokens = sum(chunk.count for chunk in step.chunks) - decodes
        self.now += self.cost.base + self.cost.decode * decodes + self.cost.token * tokens
        self.steps.append(step)
        return Result(
            StepResult(
                step.index,
                tuple(
                    ChunkResult(chunk.slot, (self._random.randrange(2, 1000),) * (chunk.logits_from < chunk.count))
                    for chunk in step.chunks
                ),
            )
        )

    def close(self) -> None:
        pass

    def add(self, request: Request) -> None:
        self.arrived[request.id] = self.now
        self.engine.add(request)

    def step(self) -> tuple[Output, ...]:
        outputs = self.engine.step()
        for output in outputs:
            self.came.setdefault(output.request_id, []).extend([self.now] * len(output.tokens))
            if output.finish is not None:
                self.ended[output.request_id], self.ended_at[output.request_id] = output, self.now
        return outputs

    def run(self, arrivals: list[tuple[float, Request]] | None = None) -> None:
        """Until all have ended; requests come at their times, or when nothing else is to do."""
        coming = sorted(arrivals or [], key=lambda pair: pair[0], reverse=True)
        while coming or self.engine.has_work:
            while coming and (coming[-1][0] <= self.now or not self.engine.has_work):
                self.now = max(self.now, coming[-1][0])
                self.add(coming.pop()[1])
            self.step()

    def latency(self, name: str) -> float:
        return self.ended_at[name] - self.arrived[name]

    @property
    def pauses(self) -> list[float]:
        """Between the tokens of each request, sorted."""
        return sorted(later - sooner for times in self.came.values() for sooner, later in pairwise(times))
