"""Prefix hits and parallel samples: what is shared, what is copied, what is computed."""

import pytest

from llmctl.engine.request import FinishReason

from .builders import check_invariants, config, request
from .fake_runner import FakeModel, Loop, calm_run


def computed(step):
    return sum(chunk.count for chunk in step.chunks)


def test_a_hit_that_ends_inside_a_block_is_exact_to_the_token():
    loop = Loop(config())
    loop.add(request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=1))
    loop.run()
    loop.add(request("b", [1, 2, 3, 4, 5, 6, 0, 0], max_tokens=1))
    loop.run()
    step = loop.steps[-1]
    assert loop.received["b", 0].cached_tokens == 6
    assert [(copy.tokens) for copy in step.copies] == [2]
    assert [(chunk.start, chunk.count) for chunk in step.chunks] == [(6, 2)]
    assert step.copies[0].target == step.tables[0].blocks[1]


def test_a_prompt_known_in_full_still_computes_its_last_token():
    loop = Loop(config())
    for name in "ab":
        loop.add(request(name, [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=1))
        loop.run()
    assert loop.received["b", 0].cached_tokens == 7
    assert computed(loop.steps[-1]) == 1
    assert loop.received["b", 0].tokens == loop.received["a", 0].tokens


def test_the_next_turn_of_a_chat_computes_only_what_is_new_and_the_last_sampled_token():
    loop = Loop(config())
    loop.add(request("a", range(10), max_tokens=5))
    answer = loop.run()["a", 0].tokens
    before = loop.runner.computed_tokens
    loop.add(request("b", [*range(10), *answer, 7, 7, 7], max_tokens=1))
    assert loop.run()["b", 0].cached_tokens == 14
    assert loop.runner.computed_tokens - before == 3 + 1


def test_full_blocks_are_shared_while_their_first_owner_still_runs():
    loop = Loop(config(num_blocks=64, max_model_len=200))
    loop.add(request("a", range(17), max_tokens=30))
    loop.step()
    active = loop.scheduler.stats().blocks_active
    loop.add(request("b", [*range(16), 99, 98], max_tokens=30))
    loop.step()
    assert loop.received["b", 0].cached_tokens == 16
    assert loop.scheduler.stats().blocks_active == active + 1
    loop.run()


def test_nothing_is_reused_before_its_result_is_in():
    loop = Loop(config(depth=2))
    loop.add(request("a", range(8), max_tokens=4))
    loop.launch()
    loop.add(request("b", range(8), max_tokens=4))
    loop.launch()
    assert [(chunk.slot, chunk.start, chunk.count) for chunk in loop.steps[1].chunks] == [(0, 8, 1), (1, 0, 8)]
    loop.run()
    assert loop.received["b", 0].cached_tokens == 0


def test_two_that_compute_the_same_at_once_keep_a_block_each_and_leak_none():
    loop = Loop(config(num_blocks=16))
    loop.add(request("a", range(9), max_tokens=9), request("b", range(9), max_tokens=9))
    loop.step()
    assert loop.scheduler.stats().blocks_active == 6
    while loop.scheduler.has_work:
        loop.step()
        check_invariants(loop.scheduler)
    stats = loop.scheduler.stats()
    assert stats.blocks_active == 0 and stats.blocks_free + stats.blocks_cached == 16


def test_different_salts_share_nothing():
    loop = Loop(config())
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        loop.add(request(name, range(9), max_tokens=1, salt=salt))
        loop.run()
    assert [loop.received[name, 0].cached_tokens for name in "abc"] == [0, 0, 8]


def test_without_prefix_caching_nothing_is_kept():
    loop = Loop(config(enable_prefix_caching=False))
    for name in "ab":
        loop.add(request(name, range(9), max_tokens=2))
        loop.run()
    assert loop.received["b", 0].cached_tokens == 0
    assert loop.scheduler.stats().blocks_cached == 0


def test_the_block_whose_copy_is_due_is_not_taken_for_something_else():
    loop = Loop(config(num_blocks=2, max_model_len=8))
    loop.add(request("a", [1, 2, 3], max_tokens=1))
    loop.run()
    loop.add(request("b", [1, 2, 9, 9, 9], max_tokens=1))  # needs both blocks: it must compute all
    loop.run()
    loop.add(request("c", [1, 2, 7], max_tokens=1))
    loop.run()
    assert [loop.received[name, 0].cached_tokens for name in "abc"] == [0, 0, 2]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("prompt", [1, 7, 8, 9, 16])
def test_samples_share_the_prompt_and_compute_only_its_last_token(prompt, caching):
    loop = Loop(config(num_blocks=64, max_num_seqs=4, enable_prefix_caching=caching))
    asked = request("a", range(prompt), max_tokens=6, n=4)
    loop.add(asked)
    received = loop.run()
    assert loop.runner.computed_tokens == prompt + 3 + 4 * 5
    tails = (prompt - 1) % 4
    assert loop.runner.copied_tokens == 3 * tails
    for index in range(4):
        assert (received["a", index].tokens, received["a", index].finish) == calm_run(asked, index, 128, FakeModel())
    assert len({tuple(received["a", index].tokens) for index in range(4)}) == 4


def test_the_memory_of_samples_is_one_prompt_and_their_own_tokens():
    prompt, new, size = 41, 12, 4
    loop = Loop(config(num_blocks=200, max_num_seqs=4, enable_prefix_caching=False, block_size=size))
    loop.add(request("a", range(prompt), max_tokens=new, n=4))
    most = 0
    while loop.scheduler.has_work:
        loop.step()
        most = max(most, loop.scheduler.stats().blocks_active)
    shared, own = prompt // size, -(-(prompt % size + new) // size)
    assert most <= shared + 4 * own


def test_samples_run_on_their_own_when_the_first_has_ended_before_them():
    for caching, cached in ((True, 13), (False, 39)):
        loop = Loop(config(max_num_seqs=1, enable_prefix_caching=caching))
        asked = request("a", range(13), max_tokens=1, n=3)
        loop.add(asked)
        received = loop.run()
        assert [received["a", index].tokens for index in range(3)] == [
            calm_run(asked, index, 128, FakeModel())[0] for index in range(3)
        ]
        assert loop.runner.computed_tokens == (13 + 2 if caching else cached)
        assert {got.cached_tokens for got in received.values()} == {0}


def test_a_bad_first_sample_does_not_take_the_others_with_it():
    model = FakeModel(vocab=8, bad_every=6)
    for seed in range(40):
        asked = request("a", [seed, 1, 2], max_tokens=6, n=4)
        loop = Loop(config(), model)
        loop.add(asked)
        received = loop.run()
        ends = [received["a", index].finish for index in range(4)]
        for index in range(4):
            assert (received["a", index].tokens, ends[index]) == calm_run(asked, index, 128, model)


@pytest.mark.parametrize("block_size", [1, 2, 8, 16])
def test_tokens_do_not_depend_on_block_size_or_cache_or_chunking(block_size):
    asked = [request(f"{i}", [i % 3] * 5 + list(range(i)), max_tokens=7, n=1 + i % 3, seed=i) for i in range(9)]
    for caching in (True, False):
        for budget in (1, 5, 64):
            loop = Loop(config(200, block_size, 5, budget, enable_prefix_caching=caching))
            loop.add(*asked)
            received = loop.run()
            for each in asked:
                for index in range(each.sampling.n):
                    got = received[each.id, index]
                    assert (got.tokens, got.finish) == calm_run(each, index, 128, FakeModel())
                    assert got.finish is FinishReason.LENGTH


def test_a_hit_is_as_long_as_every_group_can_serve():
    loop = Loop(config((10, 6), max_model_len=24))
    loop.add(request("a", range(12), max_tokens=1))
    loop.run()
    loop.add(request("x", range(50, 66), max_tokens=1))  # the smaller pool has to evict
    loop.run()
    stats = loop.scheduler.stats()
    loop.add(request("b", range(12), max_tokens=1))
    loop.run()
    assert stats.evictions == 1
    assert loop.received["b", 0].cached_tokens == 8
