"""Against a server of known delays every figure is what it must be."""

import random

import pytest

from llmctl.cli.bench.drive import FAILED, OK, TIMED_OUT
from llmctl.cli.bench.measures import summarize

from .virtual import Answer

PERCENT = 0.01


def close(value):
    return pytest.approx(value, rel=PERCENT)


def test_closed_loop_figures_are_those_of_the_server(bombard):
    answer = Answer(ttft_s=0.2, gap_s=0.05, pieces=11)
    seen, server = bombard(lambda _: answer, 6, max_concurrency=2)
    result = summarize([seen], 2)
    assert result.elapsed_sec == close(3 * 0.7)
    assert result.qps == close(6 / 2.1)
    assert (result.num_requests, result.output_tokens, result.prompt_tokens) == (6, 66, 600)
    assert result.tokens_per_sec == close(66 / 2.1)
    assert result.total_tokens_per_sec == close(666 / 2.1)
    assert result.ttft_ms.mean == close(200) and result.ttft_ms.max == close(200)
    assert result.itl_ms.median == close(50) and result.itl_ms.count == 60
    assert result.tpot_ms.p99 == close(50)
    assert result.e2e_ms.p90 == close(700)
    assert (result.concurrency, result.peak_concurrency) == (2, 2)
    assert (result.failed, result.timed_out, result.unfinished) == (0, 0, 0)
    assert server.open == 0


def test_percentiles_are_those_of_the_delays_that_were_made(bombard):
    delays = [0.1 * (i + 1) for i in range(101)]
    random.Random(3).shuffle(delays)
    seen, _ = bombard(lambda i: Answer(ttft_s=delays[i]), 101)
    ttft = summarize([seen], 0).ttft_ms
    assert (ttft.mean, ttft.median, ttft.p50) == (close(5100), close(5100), close(5100))
    assert (ttft.p90, ttft.p95, ttft.p99, ttft.max) == (close(9100), close(9600), close(10000), close(10100))


def test_bursts_of_gaps_show_in_itl_but_not_in_tpot(bombard):
    """Pieces of four tokens every 80 ms are 20 ms per token: by usage, and without it by pieces."""
    seen, _ = bombard(lambda _: Answer(gap_s=0.08, pieces=6, tokens_per_piece=4), 3, asked=24)
    result = summarize([seen], 0)
    assert result.output_tokens == 72 and result.token_source == "usage"
    assert result.itl_ms.mean == close(80)
    assert result.tpot_ms.mean == close(5 * 80 / 23)


def test_open_loop_counts_from_when_a_request_was_due(bombard):
    """One answer a second, two requests a second: each waits half a second more than the one before.

    A client that sends the next one when it has the last answer would see one second every time.
    """
    answer = Answer(ttft_s=0.5, gap_s=0.05, pieces=11)
    for where in ({"max_concurrency": 1}, {"capacity": 1}):
        seen, _ = bombard(lambda _: answer, 8, request_rate=2.0, **where)
        result = summarize([seen], 0)
        waits = [0.5 * i for i in range(8)]
        assert [one.due_s for one in seen.observations] == [close(wait) for wait in waits]
        assert result.ttft_ms.mean == close(1000 * (0.5 + sum(waits) / 8))
        assert result.e2e_ms.max == close(4500)
        assert result.elapsed_sec == close(8)
        assert result.tpot_ms.max == close(50), "tokens come as fast as ever"


def test_idle_gaps_of_an_open_loop_are_part_of_the_elapsed_time(bombard):
    seen, _ = bombard(lambda _: Answer(), 5, request_rate=0.1)
    result = summarize([seen], 0)
    assert result.elapsed_sec == close(40.7) and result.qps == close(5 / 40.7)
    assert result.peak_concurrency == 1


@pytest.mark.parametrize(
    ("bad", "outcome", "error"),
    [
        (Answer(status=503), FAILED, "HTTP 503: overloaded"),
        (Answer(error_after=3), FAILED, "error in the stream: out of memory"),
        (Answer(cut_after=3), FAILED, "the stream ended before the answer was finished"),
        (Answer(pieces=0), FAILED, "the answer has no tokens"),
        (Answer(ttft_s=99), TIMED_OUT, "no complete answer within 5 s"),
        (Answer(gap_s=99), TIMED_OUT, "no complete answer within 5 s"),
    ],
)
def test_requests_that_are_not_answered_are_counted_apart_and_change_no_figure(bombard, bad, outcome, error):
    good = Answer(ttft_s=1.0)
    seen, server = bombard(lambda i: bad if i % 3 == 1 else good, 9, timeout_s=5)
    lost = [one for one in seen.observations if one.outcome != OK]
    assert [(one.index, one.outcome, one.error) for one in lost] == [(i, outcome, error) for i in (1, 4, 7)]
    alone, _ = bombard(lambda _: good, 6, timeout_s=5)
    with_bad, without = summarize([seen], 0), summarize([alone], 0)
    assert with_bad.failed + with_bad.timed_out == 3
    for name in ("num_requests", "output_tokens", "elapsed_sec", "tokens_per_sec", "ttft_ms", "itl_ms", "e2e_ms"):
        assert getattr(with_bad, name) == getattr(without, name), name
    assert server.open == 0, "what timed out is ended at the server as well"


def test_ctrl_c_keeps_what_was_answered_and_counts_the_rest_as_unfinished(bombard):
    seen, server = bombard(lambda _: Answer(), 10, max_concurrency=2, interrupt_s=1.5)  # 0.7 s each
    assert seen.interrupted
    assert [one.index for one in seen.observations] == [0, 1, 2, 3] and seen.unfinished == 6
    result = summarize([seen], 2)
    assert result.num_requests == 4 and result.failed == 0
    assert result.elapsed_sec == close(1.4)
    assert server.open == 0


def test_server_without_usage_leaves_counts_unknown(bombard):
    seen, _ = bombard(lambda _: Answer(usage=False), 2)
    result = summarize([seen], 0)
    assert result.prompt_tokens is None and result.cached_tokens is None and result.total_tokens_per_sec is None
    assert result.token_source == "pieces" and result.output_tokens == 22


def test_rounds_add_up(bombard):
    slow, _ = bombard(lambda _: Answer(ttft_s=0.5), 2)
    fast, _ = bombard(lambda _: Answer(ttft_s=0.1), 2)
    both = summarize([slow, fast], 0)
    assert both.elapsed_sec == close(1.0 + 0.6)
    assert both.ttft_ms.mean == close(300) and both.num_requests == 4


def test_goodput_counts_answers_that_keep_every_limit(bombard):
    seen, _ = bombard(lambda i: Answer(ttft_s=0.1 * (i + 1), gap_s=0.05 if i < 6 else 0.06), 10)
    kept = summarize([seen], 0, {"ttft": 850.0, "tpot": 55.0})
    assert kept.goodput == close(6 / kept.elapsed_sec)
    assert summarize([seen], 0, {"itl": 40.0}).goodput == 0
    assert summarize([seen], 0, {"e2e": 10_000.0}).goodput == close(kept.qps)
    assert summarize([seen], 0).goodput is None


def test_requests_that_wait_while_nothing_comes_are_told_with_how_long(bombard):
    told = []

    def note(requests, seconds):
        told.append((requests, round(seconds)))

    stalls = Answer(pieces=2, gap_s=1000)
    round_, _ = bombard(lambda _: stalls, 3, timeout_s=75, on_quiet=note)
    assert [seen.outcome for seen in round_.observations] == [TIMED_OUT] * 3
    assert [requests for requests, _ in told] == [3, 3, 3]
    assert [seconds // 10 for _, seconds in told] == [1, 2, 4]
    told.clear()
    bombard(lambda _: Answer(pieces=20, gap_s=5), 3, on_quiet=note)
    assert told == []
