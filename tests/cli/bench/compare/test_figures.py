"""Medians, ratios and their spread are worked out per round, and what failed is kept out of them."""

import pytest

from llmctl.cli.bench.compare.figures import Cpu, Sample, compare, fault_of, sample
from llmctl.cli.bench.compare.run import findings, turned
from llmctl.cli.bench.compare.scenarios import Scenario
from llmctl.cli.bench.drive import FAILED, OK, Observation, Round
from llmctl.cli.bench.workload import Item

CPU = Cpu(elapsed_s=10.0, server_s=15.0, client_s=1.0, idle_s=0.0, foreign_s=0.0)


def seen(index, arrivals, *, prompt=10, asked=None, **changes):
    asked = len(arrivals) if asked is None else asked
    facts = {"outcome": OK, "error": "", "output_tokens": len(arrivals), "prompt_tokens": prompt, "cached_tokens": 0}
    facts |= {"streamed_tokens": None} | changes
    return Observation(
        index=index, due_s=0.0, sent_s=0.0, end_s=arrivals[-1], arrivals_s=tuple(arrivals), asked_tokens=asked, **facts
    )


def made(kind, items, observations, *, alone=False, pss=None, first_token_s=None):
    run = Round(
        backend="x", number=2, observations=tuple(observations), unfinished=0, lags_s=(), peak_pss_bytes=pss
    )  # fmt: skip
    return sample(Scenario("s", kind, tuple(items), 1, alone), items, run, "ours", CPU, first_token_s)


def test_prefill_is_prompt_tokens_over_time_to_first_token():
    items = [Item((1,) * 500, 1)] * 3
    found = made("prefill", items, [seen(i, [t], prompt=500) for i, t in enumerate((0.5, 1.0, 5.0))])
    assert found.figures == {"prefill_tps": pytest.approx(500.0)} and found.round == 2


def test_decode_counts_the_tokens_after_the_first():
    items = [Item((1,) * 10, 5)]
    found = made("decode", items, [seen(0, [3.0, 3.1, 3.2, 3.3, 3.4])])
    assert found.figures == {"decode_tps": pytest.approx(10.0)}


def test_mixed_requests_give_throughput_latencies_and_memory_where_the_server_was_alone():
    items = [Item((1,) * 10, 3), Item((1,) * 10, 2)]
    both = [seen(0, [1.0, 2.0, 4.0]), seen(1, [2.0, 2.5])]
    found = made("mixed", items, both, pss=5_000_000).figures
    assert found["output_tps"] == pytest.approx(5 / 4) and found["ttft_p50_ms"] == pytest.approx(1500)
    assert found["itl_p50_ms"] == pytest.approx(1000) and "peak_pss_mb" not in found
    assert made("mixed", items, both, alone=True, pss=5_000_000).figures["peak_pss_mb"] == 5.0


def test_startup_counts_from_the_start_of_the_process():
    items = [Item((1,) * 10, 1)]
    assert made("startup", items, [seen(0, [0.1])], first_token_s=1.5).figures == {"first_token_s": 1.5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outcome": FAILED, "error": "HTTP 500"}, "HTTP 500"),
        ({"output_tokens": 4}, "4 tokens of answer where 5 were asked for"),
        ({"streamed_tokens": 6}, "6 tokens were streamed where 5"),
        ({"prompt": 11}, "counted 11 prompt tokens of 10"),
        ({"cached_tokens": 9}, "9 prompt tokens came from a cache"),
        ({"cached_tokens": 4}, ""),
        ({"output_tokens": None, "prompt_tokens": None, "cached_tokens": None}, ""),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_a_fault(changes, message):
    fault = fault_of(seen(0, [1, 2, 3, 4, 5], **changes), Item((1,) * 10, 5))
    assert message in fault and bool(message) == bool(fault)


def test_a_round_with_a_fault_or_a_missing_answer_has_no_figures():
    items = [Item((1,) * 10, 2)] * 2
    found = made("mixed", items, [seen(0, [1, 2]), seen(1, [1, 2], output_tokens=1)])
    assert found.figures == {} and found.failed == 1 and found.asked == 2 and "1 tokens of answer" in found.faults[0]
    found = made("mixed", items, [seen(0, [1, 2])])
    assert found.figures == {} and found.failed == 1 and found.faults == ()


def point(subject, number, value, scenario="a", **changes):
    figures = {} if value is None else {"decode_tps": value}
    return Sample(
        subject=subject, scenario=scenario, round=number, figures=figures, faults=changes.get("faults", ()),
        failed=changes.get("failed", 0), asked=1, cpu=changes.get("cpu", CPU), observations=(),
    )  # fmt: skip


def test_ratios_are_of_one_round_and_only_of_rounds_that_both_have():
    samples = [
        *(point("ours", number, value) for number, value in enumerate((10.0, 30.0, 20.0, 50.0))),
        *(point("peer", number, value) for number, value in enumerate((5.0, 10.0, 20.0, None))),
    ]
    (line,) = compare(samples, ["ours", "peer"])
    assert [(cell.subject, cell.median, cell.low, cell.high, cell.rounds) for cell in line.cells] == [
        ("ours", 25.0, 10.0, 50.0, 4),
        ("peer", 10.0, 5.0, 20.0, 3),
    ]
    (ratio,) = line.ratios
    assert (ratio.against, ratio.median, ratio.low, ratio.high, ratio.rounds) == ("peer", 2.0, 1.0, 3.0, 3)


def test_every_other_subject_gets_a_ratio_and_a_lost_one_gets_none():
    samples = [point("ours", 0, 8.0), point("x", 0, 4.0), point("y", 0, 2.0), point("lost", 0, None)]
    (line,) = compare(samples, ["ours", "x", "y", "lost"])
    assert [(ratio.against, ratio.median) for ratio in line.ratios] == [("x", 2.0), ("y", 4.0)]
    assert [line.scenario for line in compare([*samples, point("x", 0, 1.0, "b")], ["ours", "x", "y"])] == ["a", "b"]


def test_each_subject_is_first_in_turn():
    assert ["".join(turned("abc", number)) for number in range(4)] == ["abc", "bca", "cab", "abc"]


def test_failures_restless_servers_and_foreign_work_are_told():
    restless = Cpu(elapsed_s=10.0, server_s=1.0, client_s=0.0, idle_s=0.5, foreign_s=4.0)
    samples = [point("ours", 0, 1.0, cpu=restless), point("peer", 0, None, faults=("HTTP 500",), failed=1)]
    messages = {finding.guard: (finding.backend, finding.message) for finding in findings(samples)}
    assert messages["failures"] == ("peer", "1 of 1 requests failed, their rounds do not count: HTTP 500")
    assert messages["restless servers"] == ("ours", "the other servers took 0.05 CPUs while it was asked")
    assert messages["busy machine"][1].startswith(
        "other programs kept 0.20 of the CPUs in use busy, most during a of ours in round 1 (0.40), a of peer"
    )
    assert findings([point("ours", 0, 1.0)]) == []
