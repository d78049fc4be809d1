"""What makes figures unfit to be quoted is found, and nothing else."""

import msgspec
import pytest

from llmctl.cli.bench.guards import busy, check
from llmctl.cli.bench.http_target import CHAT
from llmctl.cli.bench.measures import summarize
from llmctl.cli.bench.workload import Item

from .virtual import Answer

IDS, TEXT, TALK = (1, 2, 3), "a text", ({"role": "user", "content": "hi"},)


@pytest.fixture
def findings(bombard):
    def go(script, count=10, *, salted=True, ignore_eos=True, prompt=IDS, asked=11, **how):
        if prompt is TALK:
            how["path"] = CHAT
        seen, _ = bombard(script, count, prompt=prompt, asked=asked, **how)
        items = [Item(prompt, asked)] * count
        found = check(summarize([seen], 0), [seen], items, salted=salted, ignore_eos=ignore_eos)
        return [(finding.guard, finding.refuses) for finding in found]

    return go


def test_nothing_is_found_in_good_figures(findings):
    assert findings(lambda _: Answer()) == []
    assert findings(lambda _: Answer(cached_tokens=None)) == []


@pytest.mark.parametrize(("prompt", "luck", "warm"), [(IDS, 4, 5), (TEXT, 8, 9), (TALK, 96, 97)])
def test_cached_tokens_despite_salt_refuse_the_headline(findings, prompt, luck, warm):
    def script(cached):
        return lambda i: Answer(cached_tokens=cached if i == 3 else 0)

    assert findings(script(luck), prompt=prompt) == [], "a salt by luck, or what stands before it"
    assert findings(script(warm), prompt=prompt) == [("warm cache", True)]
    assert findings(script(warm), prompt=prompt, salted=False) == [], "who wants a warm cache may have it"


def test_few_failures_are_told_and_many_refuse(findings):
    assert findings(lambda i: Answer(status=500 if i == 0 else 200), 40) == [("failures", False)]
    assert findings(lambda i: Answer(status=500 if i < 3 else 200), 40) == [("failures", True)]
    assert findings(lambda _: Answer(status=500)) == [("failures", True)]


@pytest.mark.parametrize(
    "wrong",
    [
        Answer(counted=10),  # fewer than asked although EOS is ignored
        Answer(counted=12),  # more than asked
        Answer(pieces=13, counted=11),  # more pieces than tokens
    ],
)
def test_counts_that_do_not_add_up_refuse(findings, wrong):
    assert findings(lambda i: wrong if i == 5 else Answer()) == [("token counts", True)]


def test_answers_may_be_shorter_where_eos_counts(findings):
    assert findings(lambda _: Answer(pieces=4), ignore_eos=False) == []


def test_missing_usage_is_told(findings):
    assert findings(lambda _: Answer(usage=False)) == [("token counts", False)]


def test_streamed_tokens_that_differ_from_usage_refuse(bombard):
    seen, _ = bombard(lambda _: Answer(), 2)
    first = msgspec.structs.replace(seen.observations[0], streamed_tokens=10)
    seen = msgspec.structs.replace(seen, observations=(first, *seen.observations[1:]))
    found = check(summarize([seen], 0), [seen], [Item(IDS, 11)] * 2, salted=True, ignore_eos=True)
    assert [(one.guard, one.refuses) for one in found] == [("token counts", True)]
    assert "counted 11 tokens, streamed 10" in found[0].message


def test_times_that_go_backwards_refuse(bombard):
    seen, _ = bombard(lambda _: Answer(), 2)
    arrivals = seen.observations[0].arrivals_s
    first = msgspec.structs.replace(seen.observations[0], arrivals_s=(arrivals[1], arrivals[0], *arrivals[2:]))
    seen = msgspec.structs.replace(seen, observations=(first, *seen.observations[1:]))
    found = check(summarize([seen], 0), [seen], [Item(IDS, 11)] * 2, salted=True, ignore_eos=True)
    assert ("clock", True) in [(one.guard, one.refuses) for one in found]


def test_client_that_cannot_keep_up_is_told_and_at_worst_refuses(bombard):
    seen, _ = bombard(lambda _: Answer(), 2)
    items = [Item(IDS, 11)] * 2
    for lags, expected in (((0.001,) * 50, []), ((0.001,) * 49 + (0.2,), [False]), ((0.2,) * 50, [True])):
        late = msgspec.structs.replace(seen, lags_s=lags)
        found = check(summarize([late], 0), [late], items, salted=True, ignore_eos=True)
        assert [one.refuses for one in found if one.guard == "client"] == expected


def test_requests_that_were_sent_late_are_told(findings):
    assert findings(lambda _: Answer(), request_rate=100.0, max_concurrency=1) == [("schedule", False)]


def test_machine_that_others_keep_busy_is_told():
    assert busy(0.9, 2) == ()
    (finding,) = busy(3.0, 2)
    assert finding.guard == "busy machine" and not finding.refuses and "3.0 on 2 cores" in finding.message
