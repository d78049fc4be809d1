"""KV groups of layers with a window: what goes when the window has passed, what stays cached, what a hit can use."""

from __future__ import annotations

import random

import pytest

from llmctl.engine.config import SpeculativeConfig
from llmctl.engine.request import FinishReason, Request, SamplingParams
from llmctl.engine.schedule.limits import SchedulerConfig
from llmctl.engine.schedule.windows import WindowLimit, blocks_behind
from llmctl.kernels.errors import CapacityError

from .builders import check_invariants, config, request
from .fake_runner import FakeModel, Loop, calm_run


def windowed(num_blocks: int, *windows: tuple[int, int], **more: object) -> SchedulerConfig:
    """A configuration with groups of (window, blocks) beside the one of `num_blocks` that keeps everything."""
    return config(num_blocks, windows=tuple(WindowLimit(*each) for each in windows), **more)


def run_checked(loop: Loop) -> None:
    while loop.scheduler.has_work:
        loop.step()
        check_invariants(loop.scheduler)


def test_a_long_answer_holds_no_more_than_its_window() -> None:
    loop = Loop(windowed(64, (8, 12), block_size=4, max_model_len=200, enable_prefix_caching=False))
    loop.add(request("a", [1, 2, 3], max_tokens=150))
    most = 0
    while loop.scheduler.has_work:
        loop.step()
        check_invariants(loop.scheduler)
        most = max(most, loop.scheduler._memory.windows.pools[0].num_active)
    assert most <= blocks_behind(8, 4) == 5
    assert len(loop.received["a", 0].tokens) == 150


def test_a_prompt_longer_than_the_pool_of_a_window_is_computed_in_parts() -> None:
    prompt = [random.Random(3).randrange(12) for _ in range(180)]
    loop = Loop(windowed(64, (8, 9), block_size=4, max_num_batched_tokens=16, max_model_len=200))
    loop.add(request("a", prompt, max_tokens=5))
    run_checked(loop)
    assert loop.received["a", 0].tokens == calm_run(request("a", prompt, 5), 0, 200, loop.runner.model)[0]


def test_the_next_turn_of_a_conversation_finds_its_window() -> None:
    loop = Loop(windowed(64, (8, 12), block_size=4, max_model_len=200))
    prompt = [random.Random(4).randrange(12) for _ in range(90)]
    loop.add(request("a", prompt, max_tokens=6))
    run_checked(loop)
    turn = [*prompt, *loop.received["a", 0].tokens, 7, 7]
    loop.add(request("b", turn, max_tokens=6))
    run_checked(loop)
    assert loop.received["b", 0].cached_tokens == 95  # all whose KV exists: that of the last token never did


def test_a_hit_ends_where_some_window_still_has_what_its_next_position_sees() -> None:
    loop = Loop(windowed(64, (8, 12), block_size=4, max_model_len=200))
    prompt = [random.Random(5).randrange(12) for _ in range(90)]
    loop.add(request("a", prompt, max_tokens=1))
    run_checked(loop)
    loop.add(request("b", [*prompt[:40], 11, 11], max_tokens=1))  # the blocks before 40 went to make room
    run_checked(loop)
    assert loop.received["b", 0].cached_tokens == 0
    loop.add(request("c", [*prompt[:40], 11, 10], max_tokens=1))  # now they are there again
    run_checked(loop)
    assert loop.received["c", 0].cached_tokens == 41


def test_samples_of_one_prompt_share_the_end_of_its_window() -> None:
    for caching in (True, False):
        loop = Loop(windowed(96, (8, 60), max_num_seqs=4, max_model_len=200, enable_prefix_caching=caching))
        prompt = [random.Random(6).randrange(12) for _ in range(50)]
        loop.add(request("a", prompt, max_tokens=20, n=4))
        run_checked(loop)
        assert loop.runner.computed_tokens == 50 + 3 + 4 * 19
        for index in range(4):
            expected = calm_run(request("a", prompt, 20, n=4), index, 200, loop.runner.model)[0]
            assert loop.received["a", index].tokens == expected


def test_beams_that_need_more_blocks_of_a_window_than_there_are_are_refused() -> None:
    limits = windowed(640, (8, 16), max_num_seqs=8, max_model_len=200)
    sampling = SamplingParams(n=4, use_beam_search=True, temperature=0)
    beams = Request(id="a", prompt=(1,) * 50, sampling=sampling, seed=1, stop_ids=(), max_tokens=20)
    with pytest.raises(CapacityError, match="4 beams may need 20 KV blocks .* window of 8, there are 16"):
        limits.check(beams)


@pytest.mark.parametrize("seed", range(30))
def test_any_company_gives_what_each_sequence_gives_alone(seed: int) -> None:
    rng = random.Random(seed)
    block_size = rng.choice((1, 2, 4, 8))
    depth, budget = rng.choice((1, 1, 2, 3)), rng.choice((1, 3, 8, 64))
    windows = []
    for window in rng.choice(((1,), (3,), (7,), (2, 9))):
        least = blocks_behind(window, block_size) + -(-budget * depth // block_size)
        windows.append((window, least + rng.choice((0, 1, 20))))
    caching = rng.random() < 0.8
    tier = rng.choice((0, 30, 30)) if caching else 0
    windows = [(*each, rng.choice((2, 30)) if tier else 0) for each in windows]
    model = FakeModel(
        vocab=12, bad_every=rng.choice((0, 0, 25)), repeats=rng.choice((0, 5)), lost_every=rng.choice((0, 0, 4)),
        disk=rng.choice((1 << 30, 9)),
    )  # fmt: skip
    num_blocks = -(-60 // block_size) + rng.choice((0, 3, 40))
    loop = Loop(
        windowed(
            num_blocks,
            *windows,
            block_size=block_size,
            max_num_seqs=rng.randrange(1, 6),
            max_num_batched_tokens=budget,
            max_model_len=60,
            depth=depth,
            enable_prefix_caching=caching,
            tier_blocks=tier,
            preemption_mode=rng.choice(("auto", "swap", "recompute")),
            speculation=SpeculativeConfig(method=rng.choice(("ngram", "none")), prompt_lookup_min=1),
        ),
        model,
    )
    stems = [[rng.randrange(12) for _ in range(30)] for _ in range(2)]
    requests = {}
    for number in range(12):
        prompt = [*rng.choice(stems)[: rng.randrange(30)], *(rng.randrange(3) for _ in range(rng.randrange(1, 8)))]
        asked = request(
            str(number), prompt, rng.randrange(0, 20), n=rng.choice((1, 1, 3)), seed=number,
            prompt_logprobs=rng.choice((None, None, 0)),
        )  # fmt: skip
        requests[asked.id] = asked
        loop.add(asked)
        for _ in range(rng.randrange(4)):
            loop.step()
            check_invariants(loop.scheduler)
        if rng.random() < 0.1:
            loop.abort(asked.id)
    run_checked(loop)
    stats = loop.scheduler.stats()
    assert stats.blocks_active == 0
    assert stats.blocks_free + stats.blocks_cached == num_blocks + sum(count for _, count, _ in windows)
    for asked in requests.values():
        for index in range(asked.sampling.n):
            got = loop.received[asked.id, index]
            tokens, finish = calm_run(asked, index, 60, model)
            assert got.finish is FinishReason.ABORT or (got.tokens, got.finish) == (tokens, finish)


LONG = {name: [random.Random(seed).randrange(12) for _ in range(90)] for seed, name in enumerate("abc")}


def swapping(*, model: FakeModel | None = None, depth: int = 1, places: int = 40, **more: object) -> Loop:
    """Room for one long prompt, in a pool and in a window's; what goes may be in tier 2."""
    limits = windowed(
        26, (8, 24 if depth == 1 else 40, places), block_size=4, max_model_len=100, tier_blocks=90, depth=depth, **more
    )
    return Loop(limits, model)


def ask(loop: Loop, name: str, prompt: list[int], max_tokens: int = 6) -> int:
    """How many tokens of the prompt were cached; its answer is checked."""
    asked = request(name, prompt, max_tokens)
    loop.add(asked)
    run_checked(loop)
    assert (loop.received[name, 0].tokens, FinishReason.LENGTH) == calm_run(asked, 0, 100, loop.runner.model)
    return loop.received[name, 0].cached_tokens


def window_tier(loop: Loop):
    return loop.scheduler._memory.windows._groups[0].copies.tier


@pytest.mark.parametrize("depth", [1, 2])
def test_the_next_turn_finds_its_window_in_tier_2(depth: int) -> None:
    loop = swapping(depth=depth)
    for name, prompt in LONG.items():
        ask(loop, name, prompt)
    turn = [*LONG["a"], *loop.received["a", 0].tokens]
    before = loop.runner.computed_tokens
    assert ask(loop, "next", [*turn, 7], max_tokens=1) == 95
    assert loop.runner.computed_tokens - before == 2
    assert ask(loop, "prompt of b again", LONG["b"], max_tokens=1) == 89
    assert loop.scheduler.stats().tier_failures == 0
    assert ask(swapping(places=0), "a", LONG["a"]) == 0


def test_without_places_of_its_own_a_window_s_hits_end_where_its_pool_ends() -> None:
    loop = swapping(places=0)
    for name, prompt in LONG.items():
        ask(loop, name, prompt)
    assert ask(loop, "again", LONG["a"]) == 0
    assert loop.scheduler._memory.tier.read_back == 0, "what no window could go on from was read"


def test_of_a_window_no_more_is_written_than_hits_may_end_in() -> None:
    loop = swapping()
    for name, prompt in LONG.items():
        ask(loop, name, prompt)
    stats = loop.scheduler.stats()
    assert 0 < window_tier(loop).written <= 3 * 2 * blocks_behind(8, 4) < stats.tier_writes
    assert stats.tier_writes == loop.scheduler._memory.tier.written + window_tier(loop).written


def test_a_window_s_block_that_came_back_leaves_again_without_a_write() -> None:
    loop = swapping()
    for turn in range(4):
        ask(loop, f"other {turn}", [turn] * 90, max_tokens=1)  # takes most of the pool
        assert ask(loop, f"a{turn}", LONG["a"], max_tokens=1) == (89 if turn else 0)
    tier = window_tier(loop)
    assert tier.read_back >= 2 * 3 and tier.clean_drops > 0
    assert tier.written <= 5 * 4, "once for each prompt"


def test_a_copy_of_a_window_s_block_that_is_lost_is_computed_again() -> None:
    for lost_every, disk in ((1, 1 << 30), (3, 1 << 30), (0, 5)):
        loop = swapping(model=FakeModel(vocab=12, lost_every=lost_every, disk=disk))
        for turn in range(2):
            for name, prompt in LONG.items():
                ask(loop, f"{name}{turn}", prompt)
        assert loop.scheduler.stats().tier_failures > 0
        assert loop.scheduler.stats().blocks_active == 0


def test_a_preempted_sequence_comes_back_by_the_blocks_of_its_window() -> None:
    limits = windowed(
        30, (8, 10, 40), block_size=4, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=100, tier_blocks=90,
        preemption_mode="swap", policy="fcfs",
    )  # fmt: skip
    loop = Loop(limits)
    asked = [request("a", range(8), max_tokens=90), request("b", range(10, 40), max_tokens=60)]
    loop.add(*asked)
    run_checked(loop)
    stats = loop.scheduler.stats()
    assert stats.preemptions > 0 and stats.recomputed_tokens <= 4 and window_tier(loop).read_back > 0
    for each in asked:
        assert loop.received[each.id, 0].tokens == calm_run(each, 0, 100, loop.runner.model)[0]
