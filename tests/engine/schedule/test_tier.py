"""Tier 2: what eviction takes comes back as it was, or is computed again, and nobody can tell from the tokens."""

import pytest

from llmctl.engine.schedule.blocks import IllegalTransition
from llmctl.engine.schedule.node import Node, Residency
from llmctl.engine.schedule.sequence import Phase
from llmctl.engine.schedule.swapping import SwapCost
from llmctl.engine.schedule.tier import Tier

from .builders import check_invariants, config, request
from .fake_runner import FakeModel, Loop
from .test_preemption import expect_calm, load, run_until_preempted

A, B, C = (range(start, start + 22) for start in (100, 200, 300))


def run_one(loop, name, prompt, max_tokens=1):
    asked = request(name, prompt, max_tokens=max_tokens)
    loop.add(asked)
    while loop.scheduler.has_work:
        loop.step()
        check_invariants(loop.scheduler)
    expect_calm([asked], loop.received, model=loop.runner.model)
    return loop.received[name, 0]


def small(model=None, tier_blocks=20, **more):
    return Loop(config(num_blocks=8, max_model_len=32, tier_blocks=tier_blocks, **more), model)


@pytest.mark.parametrize("depth", [1, 2])
def test_what_was_evicted_is_read_back_and_not_computed_again(depth):
    loop = small(depth=depth)
    run_one(loop, "a", A)
    run_one(loop, "b", B)
    before = loop.runner.computed_tokens
    assert run_one(loop, "again", A).cached_tokens == 21
    assert loop.runner.computed_tokens - before == 1
    stats = loop.scheduler.stats()
    assert stats.tier_hits > 0 and stats.evicted_reused >= stats.tier_hits and stats.tier_failures == 0


def test_a_hit_in_tier_2_is_exact_to_the_token():
    loop = small()
    run_one(loop, "a", A)
    run_one(loop, "b", B)
    assert run_one(loop, "again", [*A[:10], 1, 2]).cached_tokens == 10


def test_what_came_back_leaves_again_without_a_write():
    loop = small()
    for turn in range(3):
        run_one(loop, f"a{turn}", A)
        run_one(loop, f"b{turn}", B)
    stats = loop.scheduler.stats()
    assert stats.tier_writes <= 12 and stats.tier_clean_drops >= 2 * 6
    assert stats.evictions == stats.tier_writes + stats.tier_clean_drops


def test_a_longer_tail_has_no_copy_and_gives_the_place_of_the_shorter_one_back():
    loop = small()
    run_one(loop, "a", A[:6])
    run_one(loop, "b", range(200, 232), max_tokens=0)
    assert loop.scheduler.stats().tier_blocks_used == 2
    run_one(loop, "longer", A[:7])
    tails = [node.tokens for _, node in loop.scheduler._memory.tier if len(node.tokens) < 4]
    assert tuple(A[4:6]) not in tails and len(tails) <= 1
    run_one(loop, "c", range(300, 332), max_tokens=0)
    assert run_one(loop, "again", A[:8]).cached_tokens == 7


def test_a_copy_that_has_changed_is_a_miss_that_is_counted():
    loop = small(FakeModel(lost_every=1, disk=1 << 20))
    run_one(loop, "a", A)
    run_one(loop, "b", B)
    assert run_one(loop, "again", A).cached_tokens <= 8
    assert loop.scheduler.stats().tier_failures > 0


def test_a_full_disk_makes_tier_2_as_small_as_the_disk_is_and_stops_nobody():
    loop = small(FakeModel(disk=2))
    for turn in range(3):
        for name, prompt in (("a", A), ("b", B), ("c", C)):
            run_one(loop, f"{name}{turn}", prompt)
    stats = loop.scheduler.stats()
    assert stats.tier_blocks == stats.tier_blocks_used == 2
    assert stats.tier_failures == 18 and stats.blocks_active == 0


def test_when_all_places_are_taken_the_copy_of_use_longest_ago_goes():
    loop = small(tier_blocks=6)
    for name, prompt in (("a", A), ("b", B), ("c", C)):
        run_one(loop, name, prompt)
    assert run_one(loop, "b again", B).cached_tokens == 21
    assert run_one(loop, "a again", A).cached_tokens < 21


def test_what_is_computed_again_takes_the_place_of_its_copy():
    loop = small()
    run_one(loop, "a", A)
    run_one(loop, "b", B)
    loop.add(request("first", A, max_tokens=1))
    (seq,) = loop.scheduler._roster.requests["first"]
    seq.woken = 99  # as if tier 2 had been asked in vain
    loop.run()
    check_invariants(loop.scheduler)
    stats = loop.scheduler.stats()
    assert stats.tier_hits == 0
    run_one(loop, "b again", B)
    assert loop.scheduler.stats().tier_clean_drops > stats.tier_clean_drops


def test_two_that_need_the_same_have_it_read_once():
    loop = small(max_num_seqs=2)
    run_one(loop, "a", A[:16])
    run_one(loop, "b", [*B, 1, 2, 3, 4, 5, 6])
    asked = [request("one", [*A[:16], 1], max_tokens=2), request("two", [*A[:16], 2], max_tokens=2)]
    loop.add(*asked)
    loop.run()
    expect_calm(asked, loop.received)
    assert {loop.received[name, 0].cached_tokens for name in ("one", "two")} == {16}
    assert loop.scheduler.stats().tier_hits <= 4


@pytest.mark.parametrize("depth", [1, 2])
def test_who_leaves_while_its_blocks_are_read_leaves_nothing_behind(depth):
    loop = small(depth=depth)
    run_one(loop, "a", A)
    run_one(loop, "b", B)
    loop.add(request("gone", A))
    step = loop.launch()
    assert step.swaps and not step.chunks
    loop.abort("gone")
    check_invariants(loop.scheduler)
    loop.run()
    check_invariants(loop.scheduler)
    stats = loop.scheduler.stats()
    assert stats.blocks_active == 0 and stats.blocks_free + stats.blocks_cached == 8
    assert run_one(loop, "again", A).cached_tokens == 21


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
@pytest.mark.parametrize("depth", [1, 2])
def test_with_a_third_of_the_memory_needed_every_mode_gives_the_same_tokens(mode, depth, caching):
    asked = load()
    demand = sum(-(-(len(each.prompt) + each.max_tokens) // 4) for each in asked)
    loop = Loop(
        config(
            demand * 3 // 10, max_num_seqs=16, depth=depth, tier_blocks=80 * caching, preemption_mode=mode,
            enable_prefix_caching=caching, bytes_per_block=1000,
        )
    )  # fmt: skip
    loop.add(*asked)
    while loop.scheduler.has_work:
        loop.step()
        check_invariants(loop.scheduler)
    expect_calm(asked, loop.received)
    stats = loop.scheduler.stats()
    assert stats.preemptions > 0
    assert (stats.swapped_out_bytes, stats.swapped_in_bytes) == (1000 * stats.tier_writes, 1000 * stats.tier_hits)


def preempt_one(mode):
    """A loop in which `b` makes room for `a`, whose blocks all go, and comes back."""
    loop = Loop(
        config(num_blocks=12, max_num_seqs=2, max_model_len=48, tier_blocks=30, preemption_mode=mode, policy="fcfs")
    )
    asked = [request("a", range(8), max_tokens=40), request("b", range(10, 22), max_tokens=20)]
    loop.add(*asked)
    (preempted,) = run_until_preempted(loop)
    assert preempted.request_id == "b"
    loop.run()
    expect_calm(asked, loop.received)
    return loop.scheduler.stats()


def test_swap_brings_a_preempted_sequence_back_and_recompute_writes_nothing_of_it():
    swapped, recomputed = preempt_one("swap"), preempt_one("recompute")
    assert swapped.tier_hits > 0 and swapped.recomputed_tokens == 0
    assert recomputed.tier_hits == 0 and recomputed.recomputed_tokens > 8
    assert recomputed.tier_writes < swapped.tier_writes


def test_auto_takes_what_is_cheaper_by_the_last_measures():
    cost = SwapCost("auto", block_size=32)
    assert cost.swap_is_cheaper  # tried before anything is known
    cost.learn(swap_us=4000, moves=4, compute_us=64_000, tokens=64)
    assert cost.swap_is_cheaper  # 2 x 1 ms against 32 ms
    cost.learn(swap_us=0, moves=0, compute_us=50_000, tokens=2)
    assert cost.swap_is_cheaper  # a few decodes say nothing about prompts
    for _ in range(30):
        cost.learn(swap_us=20_000, moves=1, compute_us=0, tokens=0)
    assert not cost.swap_is_cheaper  # the disk has become slow
    assert SwapCost("swap", 32).swap_is_cheaper and not SwapCost("recompute", 32).swap_is_cheaper


def test_reads_are_cut_so_that_no_step_takes_long_for_them():
    cost = SwapCost("auto", block_size=32)
    cost.learn(swap_us=4000, moves=4, compute_us=0, tokens=0)
    assert cost.blocks_at_once == 10
    cost.learn(swap_us=10_000_000, moves=1, compute_us=0, tokens=0)
    assert cost.blocks_at_once == 1
    loop = Loop(config(num_blocks=64, block_size=2, max_model_len=128, tier_blocks=80))
    run_one(loop, "a", range(1000, 1120))
    run_one(loop, "b", range(2000, 2120))
    first = len(loop.steps)
    loop.scheduler._memory._cost._block_us = 2000.0  # 5 blocks in 10 ms
    assert run_one(loop, "again", range(1000, 1120)).cached_tokens == 119
    reads = [sum(not swap.out for swap in step.swaps) for step in loop.steps[first:]]
    assert reads[0] == 5 and sum(reads) > 50 and len(reads) > 3, reads


def test_illegal_moves_raise():
    tier = Tier(1)
    root = Node(None, (), 0)
    node, other = Node(root, (1,), 1), Node(root, (2,), 2)
    assert root.residency is node.residency is Residency.NOWHERE
    for move in (tier.write, tier.keep, tier.forget, lambda each: tier.reserve([each])):
        with pytest.raises(IllegalTransition):
            move(node)
    node.blocks = other.blocks = (0,)
    assert node.residency is Residency.BLOCKS
    tier.write(node)
    for move in (lambda: tier.write(node), lambda: tier.write(other), lambda: tier.reserve([node])):
        with pytest.raises(IllegalTransition):
            move()
    node.blocks = ()
    assert node.residency is Residency.TIER
    tier.reserve([node])
    with pytest.raises(IllegalTransition):
        tier.reserve([node])


def test_a_sequence_that_was_preempted_is_asleep_until_its_blocks_are_there():
    loop = Loop(config(num_blocks=12, max_num_seqs=2, max_model_len=48, tier_blocks=30, policy="fcfs"))
    loop.add(request("a", range(8), max_tokens=40), request("b", range(10, 22), max_tokens=20))
    run_until_preempted(loop)
    while not any(not swap.out for swap in loop.steps[-1].swaps):
        loop.step()
    reading = loop.steps[-1]
    assert not reading.admit
    phases = {state.request_id: state.phase for state in loop.scheduler.states()}
    assert phases.get("b") is Phase.PREEMPTED
    loop.run()
