"""From what was seen to figures. Only requests that were answered in full count; the others are counted apart.

Definitions (times of a request count from when it was due, see `drive.py`):
TTFT   to the first piece of the answer
ITL    between two pieces of one answer, all gaps of all answers together
TPOT   from the first to the last piece, per token after the first
E2E    to the last piece
elapsed from the start of a round to the end of its last complete answer; rounds add up
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from .drive import FAILED, OK, TIMED_OUT, Observation, Round


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution in milliseconds. Percentiles are interpolated linearly between the values around them."""

    count: int
    mean: float
    median: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one backend did. Counts and rates are of complete answers only; latencies are in milliseconds.

    num_requests        complete answers
    concurrency         open requests at most, as asked for (all of them where there was no limit)
    qps                 complete answers per second
    tokens_per_sec      output tokens per second, prompts' time included
    cached_tokens       prompt tokens from the target's prefix cache, None where it does not say
    token_source        "usage" (the target's count), or "pieces" where it gives none: each piece counts as one token
    goodput             complete answers per second that kept every limit, None without limits
    peak_pss_bytes      of the target's processes, None where they are not on this machine
    """

    backend: str
    num_requests: int
    concurrency: int
    elapsed_sec: float
    qps: float
    output_tokens: int
    tokens_per_sec: float
    total_tokens_per_sec: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    failed: int
    timed_out: int
    unfinished: int
    peak_concurrency: int
    token_source: str
    ttft_ms: Spread | None
    itl_ms: Spread | None
    tpot_ms: Spread | None
    e2e_ms: Spread | None
    goodput: float | None = None
    peak_pss_bytes: int | None = None


def summarize(rounds: Sequence[Round], concurrency: int, limits_ms: Mapping[str, float] | None = None) -> BenchResult:
    """The rounds of one backend as one result."""
    done = [seen for run in rounds for seen in run.observations if seen.outcome == OK]
    elapsed = sum(elapsed_s(run) for run in rounds)
    output = sum(map(output_tokens, done))
    prompts = _sum(seen.prompt_tokens for seen in done)
    kept = [seen for seen in done if all(_within(seen, name, limit) for name, limit in (limits_ms or {}).items())]
    peaks = [run.peak_pss_bytes for run in rounds if run.peak_pss_bytes is not None]
    return BenchResult(
        backend=rounds[0].backend,
        num_requests=len(done),
        concurrency=concurrency or max(len(run.observations) + run.unfinished for run in rounds),
        elapsed_sec=elapsed,
        qps=_rate(len(done), elapsed),
        output_tokens=output,
        tokens_per_sec=_rate(output, elapsed),
        total_tokens_per_sec=None if prompts is None else _rate(output + prompts, elapsed),
        prompt_tokens=prompts,
        cached_tokens=_sum(seen.cached_tokens for seen in done),
        failed=_count(rounds, FAILED),
        timed_out=_count(rounds, TIMED_OUT),
        unfinished=sum(run.unfinished for run in rounds),
        peak_concurrency=max(peak_concurrency(run) for run in rounds),
        token_source="usage" if all(seen.output_tokens is not None for seen in done) else "pieces",
        ttft_ms=spread(map(ttft_ms, done)),
        itl_ms=spread(gap for seen in done for gap in gaps_ms(seen)),
        tpot_ms=spread(value for seen in done if (value := tpot_ms(seen)) is not None),
        e2e_ms=spread(map(e2e_ms, done)),
        goodput=_rate(len(kept), elapsed) if limits_ms else None,
        peak_pss_bytes=max(peaks) if peaks else None,
    )


def output_tokens(seen: Observation) -> int:
    """Tokens of the answer: as the target counts them, else as they were streamed, else one per piece."""
    if seen.output_tokens is not None:
        return seen.output_tokens
    return len(seen.arrivals_s) if seen.streamed_tokens is None else seen.streamed_tokens


def ttft_ms(seen: Observation) -> float:
    """Milliseconds to the first piece."""
    return (seen.arrivals_s[0] - seen.due_s) * 1000


def e2e_ms(seen: Observation) -> float:
    """Milliseconds to the last piece."""
    return (seen.arrivals_s[-1] - seen.due_s) * 1000


def gaps_ms(seen: Observation) -> list[float]:
    """Milliseconds between the pieces."""
    return [(after - before) * 1000 for before, after in pairwise(seen.arrivals_s)]


def tpot_ms(seen: Observation) -> float | None:
    """Milliseconds per token after the first, None for an answer of one token."""
    after_first = output_tokens(seen) - 1
    return (seen.arrivals_s[-1] - seen.arrivals_s[0]) * 1000 / after_first if after_first > 0 else None


def elapsed_s(run: Round) -> float:
    """From the round's start to the end of its last complete answer; 0 without one."""
    return max((seen.end_s for seen in run.observations if seen.outcome == OK), default=0.0)


def peak_concurrency(run: Round) -> int:
    """Requests that were open at the same time, at most."""
    changes = sorted((time, step) for seen in run.observations for time, step in ((seen.sent_s, 1), (seen.end_s, -1)))
    peak = now = 0
    for _, step in changes:
        now += step
        peak = max(peak, now)
    return peak


def spread(values: Iterable[float]) -> Spread | None:
    """How these values are distributed, None if there are none."""
    found = sorted(values)
    if not found:
        return None
    return Spread(
        count=len(found),
        mean=statistics.fmean(found),
        median=statistics.median(found),
        p50=percentile(found, 50),
        p90=percentile(found, 90),
        p95=percentile(found, 95),
        p99=percentile(found, 99),
        max=found[-1],
    )


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The value that `percent` % of the ordered values are not above, interpolated linearly."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _within(seen: Observation, name: str, limit: float) -> bool:
    if name == "itl":
        return all(gap <= limit for gap in gaps_ms(seen))
    value = {"ttft": ttft_ms, "tpot": tpot_ms, "e2e": e2e_ms}[name](seen)
    return value is None or value <= limit


def _rate(amount: int, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _sum(values: Iterable[int | None]) -> int | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if len(known) == len(found) else None


def _count(rounds: Sequence[Round], outcome: str) -> int:
    return sum(seen.outcome == outcome for run in rounds for seen in run.observations)
