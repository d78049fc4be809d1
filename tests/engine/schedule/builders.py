"""Short ways to write requests and configurations, and the invariants that hold between any two calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from llmctl.engine.request import Request, SamplingParams
from llmctl.engine.schedule.blocks import BlockPool, BlockState
from llmctl.engine.schedule.limits import SchedulerConfig
from llmctl.engine.schedule.node import Residency
from llmctl.engine.schedule.prefix import PrefixTree
from llmctl.engine.schedule.scheduler import Scheduler
from llmctl.engine.schedule.sequence import Sequence as EngineSequence
from llmctl.engine.schedule.tier import Tier
from llmctl.engine.schedule.windows import Windows, blocks_behind


def request(
    id: str,
    prompt: Sequence[int],
    max_tokens: int = 4,
    n: int = 1,
    stop_ids: tuple[int, ...] = (),
    min_tokens: int = 0,
    seed: int = 1,
    tenant: str = "",
    salt: str = "",
    priority: int = 0,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> Request:
    return Request(
        id=id,
        prompt=tuple(prompt),
        sampling=SamplingParams(n=n, min_tokens=min_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs),
        seed=seed,
        stop_ids=stop_ids,
        max_tokens=max_tokens,
        tenant=tenant,
        salt=salt,
        priority=priority,
    )


def config(
    num_blocks: int | tuple[int, ...] = 64,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 128,
    **more: object,
) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_blocks=(num_blocks,) if isinstance(num_blocks, int) else num_blocks,
        max_model_len=max_model_len,
        **more,
    )


def check_invariants(scheduler: Scheduler) -> None:
    """Blocks, tree and sequences agree with each other."""
    memory, running = scheduler._memory, list(scheduler._roster.running.values())
    tree, limits = memory.tree, scheduler._config
    assert not memory._held
    moves = (memory.tier._next, *memory.tier._in_flight)
    for group, pool in enumerate(memory.pools):
        held = Counter(column[group] for seq in running for column in seq.blocks)
        held.update(column[group] for each in moves for column in each.held)
        published = [node.blocks[group] for node in tree]
        assert len(set(published)) == len(published)
        free = check_runs(pool)
        for block in range(pool.num_blocks):
            assert pool.refs(block) == held[block]
            assert pool.published(block) == (block in published)
            assert (block in free) == (pool.state(block) is BlockState.FREE)
        assert pool.num_free + pool.num_cached + pool.num_active == pool.num_blocks
        assert pool.num_cached == sum(pool.state(block) is BlockState.CACHED for block in range(pool.num_blocks))
    check_windows(memory.windows, running, limits.block_size, tree)
    check_tree(tree, limits.block_size)
    check_tier(memory.tier, tree)
    assert len(running) <= limits.max_num_seqs
    slots = [row.seq.slot for flight in scheduler._in_flight for row in flight.rows if row.seq.slot >= 0]
    used = {seq.slot for seq in running} | set(slots)
    assert not used & set(scheduler._roster.slots._free)
    assert len(used) + len(scheduler._roster.slots._free) == limits.max_num_seqs
    for seq in running:
        spare = len(seq.blocks) - memory.blocks_for(seq.scheduled)
        # a draft has no more tokens than a block; a value beside it that is not finite takes one position back as well
        assert 0 <= spare <= 2 * (limits.speculation.method != "none"), "drafts took more than they can use"
        assert seq.published * limits.block_size <= seq.computed <= seq.scheduled <= seq.goal
        assert seq.generated + seq.pending <= max(seq.max_new, 0)
    live = sum(len(samples) for samples in scheduler._roster.requests.values())
    assert scheduler.stats().waiting + scheduler.stats().running == live == scheduler._roster.live
    assert len(scheduler._roster.queue) == len(scheduler._roster.waiting)


def check_windows(
    windows: Windows, running: Sequence[EngineSequence], block_size: int, tree: PrefixTree
) -> None:  # fmt: skip
    """The groups with a window hold what their sequences see, and no more than that and a block."""
    for place, group in enumerate(windows._groups):
        pool, window = group.pool, group._window
        assert not group._held
        check_window_tier(group, tree)
        held = Counter(block for seq in running for block in seq.windows[place].blocks)
        tier = group.copies.tier
        held.update(block for each in (tier._next, *tier._in_flight) for (block,) in each.held)
        free = check_runs(pool)
        assert {node: block for block, node in group._node_of.items()} == group._block_of
        for block in range(pool.num_blocks):
            assert pool.refs(block) == held[block]
            assert pool.published(block) == (block in group._node_of)
            assert (block in free) == (pool.state(block) is BlockState.FREE)
            assert (block in group._idle) == (pool.state(block) is BlockState.CACHED)
        for seq in running:
            table = seq.windows[place]
            assert table.end == len(seq.blocks)
            assert table.first <= max(0, seq.computed + 1 - window) // block_size, "a block went that is still seen"
            coming = -(-(seq.scheduled - seq.computed) // block_size)
            assert len(table.blocks) <= blocks_behind(window, block_size) + coming, "a block that nobody sees"


def check_window_tier(group, tree: PrefixTree) -> None:
    """Every place of a group with a window is free or has the copy of one node that the tree knows."""
    copies, tier = group.copies._copies, group.copies.tier
    places = dict(tier)
    assert len(set(tier._free)) == len(tier._free) and not set(tier._free) & set(places)
    assert len(tier._free) + len(places) == tier.num_places
    assert {id(copy) for copy in copies.values()} == {id(copy) for copy in places.values()}
    for node, copy in copies.items():
        assert copy.node is node and node.alive and places[copy.place] is copy
        assert copy.blocks == ((group._block_of[node],) if node in group._block_of else ())
    assert all(node.alive for node in group.copies._wanted)
    reading = [read.node for each in (tier._next, *tier._in_flight) for read in each.reads]
    assert tier._reading == set(reading) and len(set(reading)) == len(reading)


def check_runs(pool: BlockPool) -> set[int]:
    """The free blocks, after a look at the runs that they stand in."""
    runs = dict(pool._free)
    free = {block for first, order in runs.items() for block in range(first, first + (1 << order))}
    assert len(free) == sum(1 << order for order in runs.values()) == pool.num_free
    for first, order in runs.items():
        assert first % (1 << order) == 0 and first + (1 << order) <= pool.num_blocks
        assert runs.get(first ^ (1 << order)) != order, "two runs that should be one"
    idle = [block for block in range(pool.num_blocks) if not pool.refs(block)]
    runs_of_16 = Counter(block // 16 for block in idle)
    whole = [count for run, count in runs_of_16.items() if count == min(16, pool.num_blocks - 16 * run)]
    assert pool.num_in_runs == sum(whole)
    return free


def check_tree(tree, block_size: int) -> None:
    reached = []
    entries = {(id(node), oldest, last) for heap in tree._heaps for oldest, last, _, node in heap}
    below = list(tree._roots.values())
    for node in below:
        below.extend(node.children)
        assert node.resident == sum(bool(child.blocks) for child in node.children)
        assert node.keys == sorted(node.keys) == [child.tokens for child in node.children]
        for left, right in zip(node.keys, node.keys[1:]):
            assert right[: len(left)] != left, "one child's tokens begin another's"
        if node.parent is not None:
            reached.append(node)
            assert node.alive and node in node.parent.children and 0 < len(node.tokens) <= block_size
            assert len(node.tokens) == block_size or not node.children
            assert node.residency is not Residency.NOWHERE
            assert not node.blocks or node.parent.blocks or node.parent.parent is None, "blocks below none"
            assert not node.blocks or tree.node_of(node.blocks[0]) is node
            assert 0 < len(node.history) <= tree._k and list(node.history) == sorted(node.history, reverse=True)
            if tree._evictable(node):
                assert (id(node), node.history[-1], node.history[0]) in entries, "a victim that eviction would not find"
    assert sum(bool(node.blocks) for node in reached) == len(tree)
    assert len(tree._ghosts) <= tree._max_ghosts


def check_tier(tier: Tier, tree: PrefixTree) -> None:
    """Every place is free, taken by one node that knows it, or given up for good."""
    places = dict(tier)
    assert len(set(tier._free)) == len(tier._free) and not set(tier._free) & set(places)
    assert len(tier._free) + len(places) == tier.num_places
    for place, node in places.items():
        assert node.place == place and node.alive, "a copy of what the tree has forgotten"
    below = list(tree._roots.values())
    for node in below:
        below.extend(node.children)
        assert node.place < 0 or places[node.place] is node
    order = list(places)
    for place, node in places.items():
        if not node.blocks and node not in tier._reading:
            older = {id(places[each]) for each in order[: order.index(place)]}
            assert all(id(child) in older for child in node.children), "a copy younger than its parent's"
    reading = [read.node for each in (tier._next, *tier._in_flight) for read in each.reads]
    assert tier._reading == set(reading) and len(set(reading)) == len(reading)
