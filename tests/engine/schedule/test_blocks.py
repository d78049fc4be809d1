"""Blocks one by one and in runs, against a model of who holds what."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llmctl.engine.schedule.blocks import BlockPool, BlockState, IllegalTransition

from .builders import check_runs


def highest_runs(num_blocks):
    """The runs of an arena that is all free: one for each bit of its size."""
    return [order for order in range(num_blocks.bit_length()) if num_blocks >> order & 1]


def test_a_block_goes_from_free_to_active_to_cached_and_back():
    pool = BlockPool(2)
    (block,) = pool.take()
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
    assert pool.take() == [block]
    with pytest.raises(IllegalTransition, match="1 blocks are wanted, 0 of 1 are free"):
        pool.take()
    with pytest.raises(IllegalTransition):
        pool.unpublish(block)
    pool.publish(block)
    with pytest.raises(IllegalTransition):
        pool.publish(block)
    pool.release(block)
    with pytest.raises(IllegalTransition, match="cached"):
        pool.release(block)


@pytest.mark.parametrize("num_blocks", [1, 50, 64, 1000])
def test_after_100000_random_operations_any_number_of_free_blocks_can_be_had_and_all_free_is_one_run(num_blocks):
    pool, random_ = BlockPool(num_blocks), random.Random(num_blocks)
    held: list[int] = []
    for _ in range(100_000):
        if held and (random_.random() < 0.5 or not pool.num_free):
            place = random_.randrange(len(held))
            held[place], held[-1] = held[-1], held[place]
            pool.release(held.pop())
        else:
            held += pool.take(random_.randint(1, min(pool.num_free, 20)) if random_.random() < 0.2 else 1)
    check_runs(pool)
    held += pool.take(pool.num_free)
    assert sorted(held) == list(range(num_blocks))
    random_.shuffle(held)
    for block in held:
        pool.release(block)
    assert sorted(order for _, order in pool._free) == highest_runs(num_blocks)
    assert pool.num_in_runs == num_blocks


def test_many_blocks_at_once_are_neighbours_where_there_are_some_and_one_block_splits_the_shortest_run():
    pool = BlockPool(64)
    assert pool.take(40) == list(range(40))
    assert pool.take(1) == [40]
    for block in (3, 16, 17, 18, 19):
        pool.release(block)
    assert pool.take(1) == [3]
    assert pool.take(4) == [16, 17, 18, 19]


def test_blocks_count_as_in_runs_only_where_all_16_are_not_in_use():
    pool = BlockPool(40)
    assert pool.num_in_runs == 40
    pool.take(33)
    assert pool.num_in_runs == 0
    for block in range(15):
        pool.release(block)
    assert pool.num_in_runs == 0
    pool.publish(15)
    assert pool.release(15) is BlockState.CACHED
    assert pool.num_in_runs == 16
    pool.release(32)
    assert pool.num_in_runs == 16 + 8


class PoolMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(1, 70))
    def begin(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.refs = [0] * num_blocks
        self.published = [False] * num_blocks

    def some(self, data, of):
        return data.draw(st.sampled_from([block for block in range(len(self.refs)) if of(block)]))

    @rule(count=st.integers(1, 40))
    def take(self, count):
        if count > self.pool.num_free:
            with pytest.raises(IllegalTransition):
                self.pool.take(count)
            return
        taken = self.pool.take(count)
        assert len(set(taken)) == count
        for block in taken:
            assert not self.refs[block] and not self.published[block]
            self.refs[block] = 1

    @precondition(lambda self: any(self.refs) or any(self.published))
    @rule(data=st.data())
    def share(self, data):
        block = self.some(data, lambda block: self.refs[block] or self.published[block])
        self.pool.share(block)
        self.refs[block] += 1

    @precondition(lambda self: any(self.refs))
    @rule(data=st.data())
    def release(self, data):
        block = self.some(data, lambda block: self.refs[block])
        self.pool.release(block)
        self.refs[block] -= 1

    @precondition(lambda self: any(self.refs))
    @rule(data=st.data())
    def publish_or_unpublish(self, data):
        block = self.some(data, lambda block: self.refs[block])
        (self.pool.unpublish if self.published[block] else self.pool.publish)(block)
        self.published[block] = not self.published[block]

    @precondition(lambda self: any(self.published))
    @rule(data=st.data())
    def forget(self, data):
        block = self.some(data, lambda block: self.published[block])
        self.pool.unpublish(block)
        self.published[block] = False

    @invariant()
    def agrees(self):
        pool = getattr(self, "pool", None)
        if pool is None:
            return
        free = check_runs(pool)
        for block, (refs, published) in enumerate(zip(self.refs, self.published)):
            state = BlockState.ACTIVE if refs else BlockState.CACHED if published else BlockState.FREE
            assert (pool.refs(block), pool.published(block), pool.state(block)) == (refs, published, state)
            assert (block in free) == (state is BlockState.FREE)
        assert pool.num_active == sum(map(bool, self.refs))

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for block, refs in enumerate(self.refs):
            for _ in range(refs):
                self.pool.release(block)
            if self.pool.published(block):
                self.pool.unpublish(block)
        assert sorted(order for _, order in self.pool._free) == highest_runs(self.pool.num_blocks)


class TestPool(PoolMachine.TestCase):
    settings = settings(max_examples=40, stateful_step_count=50, deadline=None, derandomize=True, database=None)
