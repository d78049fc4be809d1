"""Rounds of two backends are interleaved and get the same prompts; ratios are taken round by round."""

import asyncio
import math

import pytest

from llmctl.cli.bench.http_target import COMPLETIONS, Endpoint, OpenAIServer, make_client
from llmctl.cli.bench.load_shape import Load
from llmctl.cli.bench.session import Plan, measure
from llmctl.cli.bench.workload import Item, Workload

from .conftest import GREEDY
from .virtual import Answer, Server, run

POOL = tuple(range(100, 1000))


@pytest.fixture
def compare():
    """A run of two servers; `order` is in which they were asked."""

    def go(
        ours, theirs, *, rounds=3, num_warmups=1, salt="s", prompts=4, interrupt=None, progress=lambda *_: None, **plan
    ):
        async def main():
            order, servers = [], []

            class Noted(OpenAIServer):
                def send(self, item):
                    order.append(self.backend)
                    if interrupt is not None and len(order) == interrupt:
                        asyncio.get_running_loop().call_soon(main_task.cancel)
                    return super().send(item)

            main_task = asyncio.current_task()
            clients = []
            targets = []
            for number, script in enumerate((ours, theirs)):
                servers.append(Server(script))
                clients.append(make_client(servers[-1]))
                targets.append(Noted(clients[-1], Endpoint(f"http://side{number}{COMPLETIONS}", False, "m"), GREEDY))
            items = tuple(Item(tuple(range(10)), 11) for _ in range(prompts))
            workload = Workload("d", "s", False, True, items)
            settings = {"load": Load(1), "timeout_s": 60.0, "seed": 0, "limits_ms": {}} | plan
            measured = await measure(
                targets,
                workload,
                Plan(num_warmups=num_warmups, rounds=rounds, salt=salt, **settings),
                POOL,
                progress,
            )
            for client in clients:
                await client.aclose()
            return measured, servers, order

        return run(main())

    return go


def test_ratios_are_those_of_the_servers(compare):
    measured, _, _ = compare(lambda _: Answer(), lambda _: Answer(ttft_s=0.6, gap_s=0.15), rounds=3)
    ratios = {ratio.measure: ratio for ratio in measured.ratios}
    for name, value in (("tokens_per_sec", 3), ("qps", 3), ("ttft_ms", 1 / 3), ("tpot_ms", 1 / 3), ("e2e_ms", 1 / 3)):
        assert ratios[name].median == pytest.approx(value, rel=0.01), name
        assert ratios[name].low <= ratios[name].median <= ratios[name].high
        assert ratios[name].against == "side1"
    assert "peak_pss_bytes" not in ratios, "nobody's memory can be seen"
    assert [result.num_requests for result in measured.results] == [12, 12]
    assert not measured.partial and not measured.refused


def test_rounds_take_turns_and_warm_ups_are_not_counted(compare):
    measured, _, order = compare(lambda _: Answer(), lambda _: Answer(), rounds=2, num_warmups=2, prompts=3)
    turns = [name for name, before in zip(order, [None, *order], strict=False) if name != before]
    assert turns == ["side1", "side0", "side1", "side0"], "warm-up 1 0, round 0 1, round 1 0, joined where they meet"
    assert len(order) == 2 * (2 + 2 * 3)
    assert [(run.backend, run.number) for run in measured.rounds] == [
        ("side0", 0), ("side1", 0), ("side1", 1), ("side0", 1),
    ]  # fmt: skip


def test_both_get_the_same_prompts_and_nobody_the_same_twice(compare):
    _, (ours, theirs), _ = compare(lambda _: Answer(), lambda _: Answer())
    prompts = [[tuple(body["prompt"]) for body in server.bodies] for server in (ours, theirs)]
    assert prompts[0] == prompts[1]
    assert len({prompt[0] for prompt in prompts[0]}) == len(prompts[0]) == 1 + 3 * 4
    _, (ours, _), _ = compare(lambda _: Answer(), lambda _: Answer(), salt="")
    assert {tuple(body["prompt"]) for body in ours.bodies} == {tuple(range(10))}


def test_tainted_side_refuses_the_whole_headline(compare):
    measured, _, _ = compare(lambda _: Answer(cached_tokens=80), lambda _: Answer())
    assert measured.refused and [finding.backend for finding in measured.findings] == ["side0"]


def test_interrupted_run_has_what_was_answered_and_ratios_of_whole_rounds_only(compare):
    measured, _, _ = compare(
        lambda _: Answer(), lambda _: Answer(), interrupt=2 + 8 + 6
    )  # in the second round, on its second side
    assert measured.partial
    assert [(run.number, run.interrupted) for run in measured.rounds] == [(0, False), (0, False), (1, False), (1, True)]
    assert sum(result.num_requests for result in measured.results) == 8 + 4 + 1
    assert {ratio.measure for ratio in measured.ratios} >= {"tokens_per_sec"}


@pytest.mark.parametrize("answer", [Answer(), Answer(pieces=4), Answer(error_after=3), Answer(status=500)])
def test_progress_counts_tokens_that_came_or_will_not_come_any_more(compare, answer):
    told = []
    compare(lambda _: answer, lambda _: answer, rounds=1, num_warmups=0, progress=lambda *step: told.append(step))
    ours = [(done, total) for title, done, total in told if title.startswith("side0")]
    assert {total for _, total in ours} == {4 * 11} and ours[-1][0] == 44
    assert ours == sorted(set(ours)) and all(done % 11 for done, _ in ours[1:4] if answer == Answer())


def test_same_arrivals_in_every_round(compare):
    measured, _, _ = compare(lambda _: Answer(), lambda _: Answer(), load=Load(0, 2.0, 1.0), prompts=6)
    dues = {tuple(round(seen.due_s, 9) for seen in run.observations) for run in measured.rounds}
    assert len(dues) == 1 and not math.isnan(sum(next(iter(dues))))
