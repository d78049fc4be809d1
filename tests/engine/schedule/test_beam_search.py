"""The rules of a beam search against a search by brute force, and its sequences on shared blocks, in any company."""

from __future__ import annotations

import math
import random

import pytest

from llmctl.engine.request import FinishReason, Request, SamplingParams
from llmctl.engine.schedule.beam_search import BeamSearch
from llmctl.engine.schedule.windows import WindowLimit
from llmctl.kernels.errors import CapacityError

from .builders import check_invariants, config, request
from .fake_runner import START, FakeModel, Loop, extend

MODEL = FakeModel(vocab=24)
STOPS = (3, 5)


def search(id: str, prompt, width: int, max_tokens: int, n: int | None = None, **more) -> Request:
    sampling = SamplingParams(n=n or width, best_of=width, use_beam_search=True, **more)
    return Request(id=id, prompt=tuple(prompt), sampling=sampling, seed=1, stop_ids=STOPS, max_tokens=max_tokens)


def expected(asked: Request, model: FakeModel = MODEL) -> list[tuple[int, ...]]:
    """The tokens of the best hypotheses, by a search that keeps whole distributions and nothing else."""
    sampling, width = asked.sampling, asked.sampling.beam_width
    beams, done = [((), 0.0)], []
    for length in range(1, asked.max_tokens + 1):
        every = []
        for place, (tokens, total) in enumerate(beams):
            history = START
            for token in (*asked.prompt, *tokens):
                history = extend(history, token)
            for token, logprob in zip(*model.ranked(history, model.vocab)):
                if length > sampling.min_tokens or token not in STOPS:
                    every.append((-(total + logprob), place, token))
        every.sort()
        last = length == asked.max_tokens
        grown = [(cost, (*beams[place][0], token), token in STOPS or last) for cost, place, token in every]
        for cost, tokens, ends in grown[:width]:
            if ends:
                done.append((-cost / length**sampling.length_penalty, tokens))
        done = sorted(done, key=lambda one: -one[0])[:width]
        beams = [(tokens, -cost) for cost, tokens, ends in grown if not ends][:width]
        if not beams:
            break
        never = sampling.early_stopping == "never" and sampling.length_penalty > 0
        bound = beams[0][1] / (asked.max_tokens if never else length) ** sampling.length_penalty
        if len(done) == width and (sampling.early_stopping is True or bound <= done[-1][0]):
            break
    return [tokens for _, tokens in done[: sampling.n]]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5, -1.0])
@pytest.mark.parametrize("min_tokens", [0, 4])
def test_the_hypotheses_are_those_of_a_search_by_brute_force(early_stopping, length_penalty, min_tokens):
    for width in (1, 2, 3, 5):
        loop = Loop(config(num_blocks=200, max_num_seqs=6), MODEL)
        asked = search(
            "a", range(7), width, 12,
            early_stopping=early_stopping, length_penalty=length_penalty, min_tokens=min_tokens,
        )  # fmt: skip
        loop.add(asked)
        received = loop.run()
        assert [tuple(received["a", index].tokens) for index in range(width)] == expected(asked)
        for got in received.values():
            assert got.finish is (FinishReason.STOP if got.tokens[-1] in STOPS else FinishReason.LENGTH)


def test_no_length_penalty_prefers_what_is_short_and_a_large_one_what_is_long():
    def best(length_penalty: float) -> int:
        asked = search("a", [1], 2, 3, length_penalty=length_penalty, early_stopping="never")
        beams = BeamSearch(asked, 3)
        beams.advance([((3, 7), (-1.0, -1.2))])
        beams.advance([((8, 9), (-0.2, -9.0))])
        assert not beams.advance([((8, 9), (-0.2, -9.0)), ((8, 9), (-9.0, -9.0))])
        hypothesis = beams.best(1)[0]
        assert hypothesis.score == pytest.approx(hypothesis.total / len(hypothesis.tokens) ** length_penalty)
        return len(hypothesis.tokens)

    assert best(0.0) == 1
    assert best(2.0) == 3


def test_ties_go_to_the_better_beam_and_then_to_the_lower_token():
    beams = BeamSearch(search("a", [1], 2, 9), 9)
    half = math.log(0.5)
    assert [each.token for each in beams.advance([((7, 9, 11, 12), (half, half, half, half))])] == [7, 9]
    going = beams.advance([((9, 8, 2, 1), (half, half, half, half)), ((0, 1, 2, 4), (half, half, half, half))])
    assert [(each.parent, each.token) for each in going] == [(0, 1), (0, 2)]


def company(width: int = 3) -> list[Request]:
    asked: list[Request] = []
    for i in range(4):
        asked.append(search(f"b{i}", [9, *range(3 + 5 * i)], width, 10 + i, length_penalty=0.5 * i, min_tokens=6))
        asked.append(request(f"r{i}", [9, *range(2 + 4 * i)], max_tokens=9, n=1 + i % 2, seed=i))
    return asked


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("blocks", "seqs", "budget", "windows"),
    [
        (200, 8, 64, ()), (200, 3, 64, ()), (200, 4, 5, ()), (26, 8, 64, ()), (20, 7, 9, ()), (18, 3, 3, ()),
        (200, 8, 64, (WindowLimit(6, 60),)), (26, 8, 9, (WindowLimit(3, 20), WindowLimit(9, 30))),
    ],
)  # fmt: skip
def test_beams_give_the_same_in_any_company_and_leave_nothing_behind(caching, depth, blocks, seqs, budget, windows):
    limits = config(
        blocks, 4, seqs, budget, max_model_len=64, enable_prefix_caching=caching, depth=depth, windows=windows
    )
    loop = Loop(limits, MODEL)
    asked = company()
    loop.add(*asked)
    steps = 0
    while loop.scheduler.has_work:
        loop.step()
        check_invariants(loop.scheduler)
        steps += 1
        assert steps < 3000
    for each in asked:
        if each.sampling.use_beam_search:
            got = [tuple(loop.received[each.id, index].tokens) for index in range(3)]
            assert got == expected(each)
    stats = loop.scheduler.stats()
    total = blocks + sum(each.num_blocks for each in windows)
    assert stats.blocks_active == 0 and stats.blocks_free + stats.blocks_cached == total


@pytest.mark.parametrize("depth", [1, 2])
def test_searches_that_outgrow_the_pool_together_end_one_after_the_other(depth):
    loop = Loop(config(44, 4, 9, 64, max_model_len=80, enable_prefix_caching=False, depth=depth), MODEL)
    asked = [search(f"{i}", [i, *range(9)], 3, 40, min_tokens=36) for i in range(3)]
    loop.add(*asked)
    while loop.scheduler.has_work:
        loop.step()
        check_invariants(loop.scheduler)
    assert loop.scheduler.stats().preemptions > 0
    for each in asked:
        assert [tuple(loop.received[each.id, index].tokens) for index in range(3)] == expected(each)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_searches_preempted_at_any_moment_go_on_where_they_were(caching, depth):
    rng = random.Random(5)
    for _ in range(8):
        loop = Loop(config(60, 4, 7, 12, max_model_len=64, enable_prefix_caching=caching, depth=depth), MODEL)
        asked = company()
        loop.add(*asked)
        while loop.scheduler.has_work:
            running = list(loop.scheduler._roster.running.values())
            if running and rng.random() < 0.2:
                loop.scheduler._roster.preempt(rng.choice(running))
            loop.step()
            check_invariants(loop.scheduler)
        for each in asked:
            if each.sampling.use_beam_search:
                assert [tuple(loop.received[each.id, index].tokens) for index in range(3)] == expected(each)


@pytest.mark.parametrize("caching", [True, False])
def test_the_memory_of_beams_is_one_prompt_and_what_they_do_not_share(caching):
    prompt, new, size, width = 42, 20, 4, 4
    loop = Loop(config(200, size, 4, 64, enable_prefix_caching=caching), MODEL)
    loop.add(search("a", range(prompt), width, new, min_tokens=new))
    most = 0
    while loop.scheduler.has_work:
        loop.step()
        stats = loop.scheduler.stats()
        group = loop.scheduler._roster.beams._groups.get(0)
        if group is not None and stats.running == width:
            distinct = {tuple(seq.tokens[:end]) for seq in group.holders for end in range(size, seq.computed + 1, size)}
            assert stats.blocks_active <= len(distinct) + 2 * width
        most = max(most, stats.blocks_active)
    assert most <= prompt // size + width * -(-(prompt % size + new) // size)
    assert most < width * (prompt + new) // size / 2
    assert loop.runner.computed_tokens <= prompt + width * (new - 1)


def test_beams_that_could_not_run_at_once_are_refused():
    loop = Loop(config(20, 4, 4, 64), MODEL)
    with pytest.raises(CapacityError, match="5 beams run at once"):
        loop.add(search("a", range(4), 5, 4))
    with pytest.raises(CapacityError, match="may need 41 KV blocks"):
        loop.add(search("a", range(4), 4, 40))


def test_an_abort_ends_all_beams_and_an_index_alone_ends_none():
    loop = Loop(config(), MODEL)
    loop.add(search("a", range(9), 3, 12, n=2, min_tokens=12))
    for _ in range(4):
        loop.step()
    assert loop.scheduler.abort("a", 1) == ()
    ended = loop.scheduler.abort("a")
    assert [(output.index, output.finish) for output in ended] == [(0, FinishReason.ABORT), (1, FinishReason.ABORT)]
    assert not loop.scheduler.has_work
    check_invariants(loop.scheduler)


def test_a_beam_that_is_not_finite_fails_its_search_alone():
    model = FakeModel(vocab=24, bad_every=40)
    failed = 0
    for seed in range(12):
        loop = Loop(config(), model)
        loop.add(search("a", [seed, 1, 2], 3, 12, min_tokens=12), request("b", [seed, 7], max_tokens=3))
        received = loop.run()
        check_invariants(loop.scheduler)
        if received["a", 0].finish is FinishReason.ERROR:
            failed += 1
            assert all("NaN" in received["a", index].error for index in range(3))
    assert failed > 2
