"""How much of the memory in use holds nothing: only the ends of the sequences' last blocks."""

import random

import pytest

from .builders import config, request
from .fake_runner import Loop


def mixed_load(count, seed):
    """Prompts and answers as long as in a mix of chat and text: evenly from 33 to 510 and from 16 to 245 tokens."""
    rng = random.Random(seed)
    return [
        request(f"{i}", [i] * rng.randrange(33, 511), max_tokens=rng.randrange(16, 246), seed=i) for i in range(count)
    ]


class Probe:
    """The waste over all steps of a run, each as heavy as the blocks in use in it."""

    def __init__(self, loop):
        self.wasted = self.used = 0
        while loop.scheduler.has_work:
            loop.step()
            size = loop.config.block_size
            running = loop.scheduler._roster.running.values()
            for seq in running:
                assert len(seq.blocks) == -(-seq.scheduled // size), "a block that is not needed yet"
            stats = loop.scheduler.stats()
            assert stats.waste * stats.blocks_active * size < max(1, len(running)) * size
            self.wasted += stats.waste * stats.blocks_active * size
            self.used += stats.blocks_active * size

    @property
    def share(self):
        return self.wasted / self.used


@pytest.mark.parametrize(("block_size", "most"), [(8, 0.02), (16, 0.04), (32, 0.08), (512, 0.65)])
def test_less_than_a_block_of_each_sequence_is_wasted(block_size, most):
    loop = Loop(
        config(16 * 1024 // block_size, block_size, max_num_seqs=16, max_num_batched_tokens=512, max_model_len=1024)
    )
    loop.add(*mixed_load(24, seed=3))
    assert 0 < Probe(loop).share < most


def test_at_the_end_of_a_soak_nothing_is_fragmented():
    loop = Loop(config(203, 4, max_num_seqs=8, max_model_len=200))
    rng = random.Random(4)
    worst = 0.0
    for i in range(200):
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, 120))]
        loop.add(request(f"{i}", prompt, max_tokens=rng.randrange(1, 20), seed=i))
        loop.step()
        worst = max(worst, loop.scheduler.stats().fragmentation)
    assert worst > 0.02
    loop.run()
    stats = loop.scheduler.stats()
    assert stats.fragmentation == 0 and stats.waste == 0
    assert stats.blocks_free + stats.blocks_cached == 203
