"""What makes figures unfit to be quoted. A benchmark that knows it measured something else must not print a headline.

A finding that `refuses` withholds the headline unless --allow-tainted is given; the others are printed with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import msgspec

from .drive import OK, Observation, Round
from .measures import BenchResult, percentile
from .workload import SALT_TOKENS, Item, form_of

FAILURES = 0.05  # of all requests: beyond it the rest ran on a machine with less to do
SHOWN = 3
BUSY = 0.5  # runnable processes per core
CLOCK_SLACK_S = 1e-6  # a timer may fire early by the resolution of the clock

# Prompt tokens per request that a prefix cache may serve although the prompt is salted: the salt itself, by luck; what
# comes before any text (BOS); and in a conversation the template's own head, up to a default system prompt.
UNSALTED = {"ids": SALT_TOKENS, "text": 2 * SALT_TOKENS, "chat": 96}


class Finding(msgspec.Struct, frozen=True):
    """Something wrong with the figures of a backend, or of all if `backend` is empty."""

    guard: str
    backend: str
    message: str
    refuses: bool


def check(result: BenchResult, rounds: Sequence[Round], items: Sequence[Item], *, salted: bool, ignore_eos: bool) -> (
    tuple[Finding, ...]
):  # fmt: skip
    """Everything that is wrong with this backend's rounds."""
    seen = [one for run in rounds for one in run.observations]
    done = [one for one in seen if one.outcome == OK]
    found: list[tuple[str, str, bool]] = [
        *_failures(seen, done),
        *(_cached(done, items) if salted else ()),
        *_counts(done, ignore_eos),
        *_clock(seen),
    ]
    if done:
        found += _client(result, rounds, done)
    return tuple(Finding(guard, result.backend, message, refuses) for guard, message, refuses in found)


def busy(load_average: float, cores: int) -> tuple[Finding, ...]:
    """Whether others kept the machine busy when the run began."""
    if load_average < BUSY * cores:
        return ()
    message = f"the load was {load_average:.1f} on {cores} cores when the run began: other work takes part of the time"
    return (Finding("busy machine", "", message, False),)


def _failures(seen: Sequence[Observation], done: Sequence[Observation]) -> Iterable[tuple[str, str, bool]]:
    lost = [one for one in seen if one.outcome != OK]
    if not done:
        yield "failures", f"no request was answered{_examples(one.error for one in lost)}", True
    elif lost:
        yield (
            "failures",
            f"{len(lost)} of {len(seen)} requests failed or timed out{_examples(one.error for one in lost)}",
            len(lost) > FAILURES * len(seen),
        )


def _cached(done: Sequence[Observation], items: Sequence[Item]) -> Iterable[tuple[str, str, bool]]:
    excess = [one for one in done if (one.cached_tokens or 0) > UNSALTED[form_of(items[one.index % len(items)].prompt)]]
    if excess:
        total = sum(one.cached_tokens or 0 for one in excess)
        yield "warm cache", f"{total} prompt tokens of {len(excess)} requests came from a cache despite salt", True


def _counts(done: Sequence[Observation], ignore_eos: bool) -> Iterable[tuple[str, str, bool]]:
    """The target's count of tokens against what was streamed and what was asked for."""
    wrong = []
    for one in done:
        counted, streamed, pieces = one.output_tokens, one.streamed_tokens, len(one.arrivals_s)
        if counted is None:
            continue
        if streamed is not None and streamed != counted:
            wrong.append(f"counted {counted} tokens, streamed {streamed}")
        elif pieces > counted + 1:  # one more may bring what the decoder had held back
            wrong.append(f"counted {counted} tokens, streamed {pieces} pieces of at least one")
        elif counted > one.asked_tokens or (ignore_eos and counted < one.asked_tokens):
            wrong.append(f"counted {counted} tokens where {one.asked_tokens} were asked for")
    if wrong:
        yield "token counts", f"{len(wrong)} requests do not add up{_examples(wrong)}", True
    if missing := sum(one.output_tokens is None and one.streamed_tokens is None for one in done):
        yield "token counts", f"{missing} answers came without usage: each piece counts as one token", False


def _clock(seen: Sequence[Observation]) -> Iterable[tuple[str, str, bool]]:
    for one in seen:
        times = (one.due_s, one.sent_s, *one.arrivals_s, one.end_s)
        if any(after < before - CLOCK_SLACK_S for before, after in pairwise(times)):
            yield "clock", f"the times of request {one.index} do not ascend", True
            return


def _client(
    result: BenchResult, rounds: Sequence[Round], done: Sequence[Observation]
) -> Iterable[tuple[str, str, bool]]:
    """Whether this program kept up: an event loop that wakes up late stamps what came earlier."""
    lags = sorted(lag * 1000 for run in rounds for lag in run.lags_s)
    finest = result.itl_ms or result.e2e_ms
    assert finest is not None
    if lags and (worst := percentile(lags, 99)) > finest.median / 2:
        yield (
            "client",
            f"the measuring loop ran up to {worst:.1f} ms late (p99), where {finest.median:.1f} ms lie between tokens",
            percentile(lags, 50) > finest.median,
        )
    late = sorted((one.sent_s - one.due_s) * 1000 for one in done)
    assert result.e2e_ms is not None
    if (delay := percentile(late, 99)) > result.e2e_ms.median / 20:
        yield (
            "schedule",
            f"requests were sent up to {delay:.0f} ms after they were due (p99); that wait is part of their times",
            False,
        )


def _examples(messages: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(message for message in messages if message))
    return f": {'; '.join(distinct[:SHOWN])}" + (" ..." if len(distinct) > SHOWN else "") if distinct else ""
