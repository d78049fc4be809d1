"""Blocks against lengths: what is in use is what lengths need, less what is shared, to the block."""

import random
from collections import Counter

import pytest

from .builders import config, request
from .fake_runner import Loop


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("depth", [1, 2])
def test_blocks_in_use_are_those_that_the_lengths_need_less_those_that_are_shared(block_size, depth):
    rng = random.Random(block_size)
    loop = Loop(config(256 // block_size, block_size, max_num_seqs=6, depth=depth))
    for number in range(30):
        prompt = [number % 3] * rng.randrange(1, 20) + [rng.randrange(4) for _ in range(rng.randrange(1, 20))]
        loop.add(request(f"{number}", prompt, max_tokens=rng.randrange(1, 30), n=rng.choice((1, 1, 3)), seed=number))
    shared_ever = 0
    while loop.scheduler.has_work:
        loop.step()
        running = loop.scheduler._roster.running.values()
        needed = sum(-(-seq.scheduled // block_size) for seq in running)
        holders = Counter(column for seq in running for column in seq.blocks)
        shared = sum(count - 1 for count in holders.values())
        assert loop.scheduler.stats().blocks_active == needed - shared
        shared_ever += shared
    assert shared_ever > 0


@pytest.mark.parametrize("common", [3, 4, 11, 12, 13, 40])
def test_two_prompts_share_the_whole_blocks_of_what_they_have_in_common(common):
    loop = Loop(config(64))
    first, second = [*range(common), 91, 92, 93], [*range(common), 81, 82]
    loop.add(request("first", first, max_tokens=30))
    loop.step()
    loop.step()
    loop.add(request("second", second, max_tokens=30))
    loop.step()
    one, other = loop.scheduler._roster.running.values()
    assert len(set(one.blocks) & set(other.blocks)) == common // 4
    shared = (
        common // 4 * 4
    )  # the rest of the block is still being written by the first, and known to be when it is full
    partial = min(common, len(first) // 4 * 4) - shared
    assert loop.run()["second", 0].cached_tokens == shared + max(partial, 0)
    plain = Loop(config(64, enable_prefix_caching=False))
    plain.add(request("first", first, max_tokens=30), request("second", second, max_tokens=30))
    assert {key: got.tokens for key, got in plain.run().items()} == {
        key: got.tokens for key, got in loop.received.items()
    }
