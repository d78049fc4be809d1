"""A whole run: warm up, take every backend through the same rounds in turn, look after memory, write the report."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ...engine.load.progress import Progress
from .drive import Round, drive
from .guards import Finding, check
from .load_shape import Load
from .measures import BenchResult, summarize
from .memory import PeakMemory
from .report import Ratio, ratios
from .targets import Target
from .workload import Salter, Workload

DRAWINGS = 200  # of a round's progress, at most


@dataclass(frozen=True, slots=True)
class Plan:
    """How a run goes. `salt` "" sends prompts as they are; `limits_ms` are those of goodput."""

    load: Load
    num_warmups: int
    rounds: int
    timeout_s: float
    seed: int
    salt: str
    limits_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Measured:
    """What came out: per backend one result over its rounds (backends without a complete answer have none)."""

    rounds: tuple[Round, ...]
    results: tuple[BenchResult, ...]
    ratios: tuple[Ratio, ...]
    findings: tuple[Finding, ...]
    partial: bool

    @property
    def refused(self) -> bool:
        return any(finding.refuses for finding in self.findings)


async def measure(
    targets: Sequence[Target], workload: Workload, plan: Plan, pool: Sequence[int], progress: Progress
) -> Measured:
    """Every target's rounds, interleaved: in each round all targets get the same prompts, in an order that turns round.

    The first target is ours where there are two; ratios are those of it. `pool` are token ids for salts. Ctrl-C ends
    the run with what there is.
    """
    salter = Salter(plan.salt, pool)
    arrivals = plan.load.arrivals(len(workload.items), random.Random(f"arrivals {plan.seed}"))
    rounds: list[Round] = []
    warm = Load(max_concurrency=plan.load.max_concurrency)
    for number in range(-1, plan.rounds):
        warming = number < 0
        asked = workload.items[: plan.num_warmups] if warming else workload.items
        if not asked:
            continue
        items = [salter.apply(item) for item in asked]
        for target in targets if number % 2 == 0 else targets[::-1]:
            title = f"{target.backend}: " + ("warm-up" if warming else f"round {number + 1} of {plan.rounds}")
            bar = _Bar(progress, title, sum(item.max_tokens for item in items), plan.timeout_s)
            memory = PeakMemory(target.pids, [pid for other in targets if other is not target for pid in other.pids])
            try:
                seen = await drive(
                    target,
                    items,
                    arrivals,
                    warm if warming else plan.load,
                    plan.timeout_s,
                    number,
                    bar.advance,
                    bar.wait,
                )
            finally:
                peak = memory.stop()
            if not warming:
                rounds.append(_with_peak(seen, peak))
            if seen.interrupted:
                return _measured(targets, workload, plan, rounds, partial=True)
    return _measured(targets, workload, plan, rounds, partial=False)


class _Bar:
    """How far a round is, in tokens: of a backend that answers many requests at once, many are done at once."""

    def __init__(self, progress: Progress, title: str, total: int, timeout_s: float) -> None:
        self._progress, self._title, self._total, self._done = progress, title, total, 0
        self._timeout_s, self._told = timeout_s, 0
        progress(title, 0, total)

    def advance(self, tokens: int) -> None:
        """So many more are done. Drawing takes time from what is measured, so it is seldom."""
        self._done += tokens
        if self._done == self._total or (self._done - self._told) * DRAWINGS >= self._total:
            self._told = self._done
            self._progress(self._title, self._done, self._total)

    def wait(self, requests: int, seconds: float) -> None:
        """A line of its own each time: it is what somebody looks for who wonders whether anything still happens."""
        self._progress(
            f"{self._title}: {requests} request{'s' * (requests > 1)} waiting, nothing has come for {seconds:.0f} s "
            f"(--request-timeout is {self._timeout_s:g} s)",
            self._done,
            self._total,
        )


def _with_peak(seen: Round, peak: int | None) -> Round:
    return msgspec.structs.replace(seen, peak_pss_bytes=peak)


def _measured(
    targets: Sequence[Target], workload: Workload, plan: Plan, rounds: list[Round], *, partial: bool
) -> Measured:
    results: list[BenchResult] = []
    findings: list[Finding] = []
    by_round: list[dict[int, BenchResult]] = []
    for target in targets:
        own = [run for run in rounds if run.backend == target.backend]
        if not any(run.observations for run in own):
            continue
        result = summarize(own, plan.load.max_concurrency, plan.limits_ms)
        results.append(result)
        findings += check(result, own, workload.items, salted=bool(plan.salt), ignore_eos=workload.ignore_eos)
        by_round.append({run.number: summarize([run], plan.load.max_concurrency, plan.limits_ms) for run in own})
    found: tuple[Ratio, ...] = ()
    if len(by_round) == 2:
        both = sorted(by_round[0].keys() & by_round[1].keys())
        found = ratios([by_round[0][n] for n in both], [by_round[1][n] for n in both])
    return Measured(tuple(rounds), tuple(results), found, tuple(findings), partial)
