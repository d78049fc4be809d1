"""From requests to figures, and from rounds to ratios.

A round of a subject in which any request failed, had another length than asked for, or was answered from a cache, has
no figures: the others ran on a machine with less to do. Ratios are made within a round, whose subjects ran within
minutes of one another, and only then is their median taken.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

import msgspec

from ..drive import OK, Observation, Round
from ..measures import elapsed_s, gaps_ms, output_tokens, percentile, tpot_ms, ttft_ms
from ..workload import SALT_TOKENS, Item
from .scenarios import Scenario

SHOWN_FAULTS = 3


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is measured: what tables call it, and whether more of it is better."""

    name: str
    label: str
    more_is_better: bool


MEASURES = {
    measure.name: measure
    for measure in (
        Measure(name="prefill_tps", label="prompt tokens/s", more_is_better=True),
        Measure(name="decode_tps", label="tokens/s", more_is_better=True),
        Measure(name="output_tps", label="output tokens/s", more_is_better=True),
        Measure(name="ttft_p50_ms", label="TTFT p50, ms", more_is_better=False),
        Measure(name="itl_p50_ms", label="ITL p50, ms", more_is_better=False),
        Measure(name="itl_p99_ms", label="ITL p99, ms", more_is_better=False),
        Measure(name="peak_pss_mb", label="peak PSS, MB", more_is_better=False),
        Measure(name="first_token_s", label="start to first token, s", more_is_better=False),
    )
}


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds while one subject answered, which took `elapsed_s`.

    server_s   of its server, None where it is not on this machine
    client_s   of this program
    idle_s     of the other subjects' servers, which should have rested
    foreign_s  of anybody else on the CPUs in use
    """

    elapsed_s: float
    server_s: float | None
    client_s: float
    idle_s: float
    foreign_s: float


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One subject in one round of one scenario: figures by measure (none if there are faults), and every request."""

    subject: str
    scenario: str
    round: int
    figures: dict[str, float]
    faults: tuple[str, ...]
    failed: int
    asked: int
    cpu: Cpu
    observations: tuple[Observation, ...]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A subject's median over rounds, with the lowest and the highest."""

    subject: str
    median: float
    low: float
    high: float
    rounds: int


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """The first subject's figure divided by that of `against`, round by round."""

    against: str
    median: float
    low: float
    high: float
    rounds: int


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One measure of one scenario for every subject that has it."""

    scenario: str
    measure: str
    cells: tuple[Cell, ...]
    ratios: tuple[Ratio, ...]


def sample(
    scenario: Scenario, items: Sequence[Item], seen: Round, subject: str, cpu: Cpu, first_token_s: float | None = None
) -> Sample:
    """The round's figures, or its faults. `first_token_s` counts from the start of the process."""
    faults = [fault for one in seen.observations if (fault := fault_of(one, items[one.index]))]
    missing = len(items) - len(seen.observations)
    figures = {}
    if not faults and not missing:
        figures = dict(_figures(scenario, items, seen, first_token_s))
    return Sample(
        subject=subject,
        scenario=scenario.name,
        round=seen.number,
        figures=figures,
        faults=tuple(dict.fromkeys(faults)),
        failed=len(faults) + missing,
        asked=len(items),
        cpu=cpu,
        observations=seen.observations,
    )


def fault_of(seen: Observation, item: Item) -> str:
    """Why this answer is not the one that was asked for, "" if it is."""
    if seen.outcome != OK:
        return seen.error or seen.outcome
    if seen.prompt_tokens not in (None, len(item.prompt)):
        return f"the server counted {seen.prompt_tokens} prompt tokens of {len(item.prompt)}"
    if seen.output_tokens not in (None, item.max_tokens):
        return f"{seen.output_tokens} tokens of answer where {item.max_tokens} were asked for"
    if seen.streamed_tokens not in (None, item.max_tokens):
        return f"{seen.streamed_tokens} tokens were streamed where {item.max_tokens} were asked for"
    if (seen.cached_tokens or 0) > SALT_TOKENS:
        return f"{seen.cached_tokens} prompt tokens came from a cache"
    return ""


def compare(samples: Sequence[Sample], subjects: Sequence[str]) -> tuple[Line, ...]:
    """A line per scenario and measure, in order of appearance; ratios are the first subject's."""
    lines = []
    for scenario in dict.fromkeys(one.scenario for one in samples):
        of_scenario = [one for one in samples if one.scenario == scenario]
        for measure in MEASURES:
            values = {
                subject: {
                    one.round: one.figures[measure]
                    for one in of_scenario
                    if one.subject == subject and measure in one.figures
                }
                for subject in subjects
            }
            if any(values.values()):
                lines.append(
                    Line(scenario=scenario, measure=measure, cells=_cells(values), ratios=tuple(_ratios(values)))
                )
    return tuple(lines)


def _cells(values: dict[str, dict[int, float]]) -> tuple[Cell, ...]:
    return tuple(
        Cell(
            subject=subject,
            median=statistics.median(found.values()),
            low=min(found.values()),
            high=max(found.values()),
            rounds=len(found),
        )
        for subject, found in values.items()
        if found
    )


def _ratios(values: dict[str, dict[int, float]]) -> Iterator[Ratio]:
    first, *others = values
    for other in others:
        both = sorted(values[first].keys() & values[other].keys())
        found = [values[first][number] / values[other][number] for number in both if values[other][number]]
        if found:
            yield Ratio(
                against=other, median=statistics.median(found), low=min(found), high=max(found), rounds=len(found)
            )


def _figures(
    scenario: Scenario, items: Sequence[Item], seen: Round, first_token_s: float | None
) -> Iterator[tuple[str, float]]:
    yield from _KINDS[scenario.kind](items, seen)
    if scenario.kind == "startup" and first_token_s is not None:
        yield "first_token_s", first_token_s
    if scenario.kind == "mixed" and scenario.alone and seen.peak_pss_bytes is not None:
        yield "peak_pss_mb", seen.peak_pss_bytes / 1e6


def _prefill(items: Sequence[Item], seen: Round) -> Iterator[tuple[str, float]]:
    yield (
        "prefill_tps",
        statistics.median(len(items[one.index].prompt) * 1000 / ttft_ms(one) for one in seen.observations),
    )


def _decode(items: Sequence[Item], seen: Round) -> Iterator[tuple[str, float]]:
    times = [value for one in seen.observations if (value := tpot_ms(one))]
    if times:
        yield "decode_tps", 1000 / statistics.median(times)


def _mixed(items: Sequence[Item], seen: Round) -> Iterator[tuple[str, float]]:
    yield "output_tps", sum(map(output_tokens, seen.observations)) / elapsed_s(seen)
    yield "ttft_p50_ms", percentile(sorted(map(ttft_ms, seen.observations)), 50)
    if gaps := sorted(gap for one in seen.observations for gap in gaps_ms(one)):
        yield "itl_p50_ms", percentile(gaps, 50)
        yield "itl_p99_ms", percentile(gaps, 99)


def _nothing(items: Sequence[Item], seen: Round) -> Iterator[tuple[str, float]]:
    return iter(())


_KINDS: dict[str, Callable[[Sequence[Item], Round], Iterator[tuple[str, float]]]] = {
    "prefill": _prefill,
    "decode": _decode,
    "mixed": _mixed,
    "startup": _nothing,
}
