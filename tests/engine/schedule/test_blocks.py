import random

import pytest

from llmctl.engine.schedule.blocks import BlockPool, BlockState, IllegalTransition


def test_a_block_goes_from_free_to_active_to_cached_and_back():
    pool = BlockPool(2)
    block = pool.take()
    assert pool.state(block) is BlockState.ACTIVE
    pool.publish(block)
    pool.share(block)
    assert pool.release(block) is BlockState.ACTIVE
    assert pool.release(block) is BlockState.CACHED
    assert (pool.num_free, pool.num_active, pool.num_cached) == (1, 0, 1)
    pool.share(block)
    assert pool.state(block) is BlockState.ACTIVE
    pool.unpublish(block)
    assert pool.state(block) is BlockState.ACTIVE
    assert pool.release(block) is BlockState.FREE
    assert pool.num_free == 2


def test_illegal_transitions_raise():
    pool = BlockPool(1)
    block = 0
    for illegal in (pool.share, pool.release, pool.publish, pool.unpublish):
        with pytest.raises(IllegalTransition, match="block 0"):
            illegal(block)
    assert pool.take() == block
    with pytest.raises(IllegalTransition, match="none of 1 blocks is free"):
        pool.take()
    with pytest.raises(IllegalTransition):
        pool.unpublish(block)
    pool.publish(block)
    with pytest.raises(IllegalTransition):
        pool.publish(block)
    pool.release(block)
    with pytest.raises(IllegalTransition, match="cached"):
        pool.release(block)


def test_any_number_of_free_blocks_can_be_taken_after_random_traffic():
    pool, random_ = BlockPool(50), random.Random(1)
    held = []
    for _ in range(20_000):
        if held and (random_.random() < 0.5 or not pool.num_free):
            pool.release(held.pop(random_.randrange(len(held))))
        else:
            held.append(pool.take())
    assert len({pool.take() for _ in range(pool.num_free)} | set(held)) == 50
