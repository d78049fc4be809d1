import random

import pytest

from llmctl.engine.schedule.blocks import BlockPool, BlockState
from llmctl.engine.schedule.prefix import PrefixTree

from .builders import check_tree

SIZE = 4


class Cache:
    """A tree used like a plain cache: `use` looks a token string up and adds what was missing, evicting for it."""

    def __init__(self, num_blocks, k=2, max_ghosts=None, size=SIZE):
        self.pool = BlockPool(num_blocks)
        self.tree = PrefixTree((self.pool,), size, k, max_ghosts)
        self.size = size
        self.requests = 0

    def find(self, tokens, salt=""):
        hit = self.tree.find(salt, tokens, len(tokens))
        return len(hit.nodes) * self.size + hit.partial_tokens

    def use(self, tokens, salt=""):
        """How many tokens were found."""
        self.requests += 1
        self.tree.tick()
        hit = self.tree.find(salt, tokens, len(tokens))
        path = list(hit.nodes)
        for node in path:
            self.pool.share(node.blocks[0])
        for node in (*path, hit.partial) if hit.partial else path:
            self.tree.touch(node, self.requests)
        parent = path[-1] if path else self.tree.root(salt)
        held = [node.blocks[0] for node in path]
        for start in range(len(path) * self.size, len(tokens), self.size):
            if not self.pool.num_free:
                assert self.tree.evict()
            block = self.pool.take()
            held.append(block)
            parent = self.tree.insert(parent, tuple(tokens[start : start + self.size]), (block,), self.requests)
        for block in reversed(held):
            if self.pool.release(block) is BlockState.CACHED:
                self.tree.idle(block)
        check_tree(self.tree, self.size)
        return len(hit.nodes) * self.size + hit.partial_tokens


def test_a_prefix_is_found_to_the_token():
    cache = Cache(8)
    cache.use([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cache.find([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == 9
    assert cache.find([1, 2, 3, 4, 5, 6, 0]) == 6
    assert cache.find([1, 2, 0]) == 2
    assert cache.find([2, 2, 3]) == 0


def test_the_child_that_shares_most_is_found_among_many_that_begin_alike():
    cache, random_ = Cache(500), random.Random(3)
    known = [[random_.randrange(3) for _ in range(random_.randrange(1, 9))] for _ in range(150)]
    for tokens in known:
        cache.use(tokens)
    for _ in range(300):
        asked = [random_.randrange(3) for _ in range(8)]
        best = max(
            next((i for i, (a, b) in enumerate(zip(tokens, asked)) if a != b), min(len(tokens), len(asked)))
            for tokens in known
        )
        assert cache.find(asked) == best


def test_different_salts_share_nothing():
    cache = Cache(8)
    cache.use([1, 2, 3, 4, 5], salt="a")
    assert cache.find([1, 2, 3, 4, 5], salt="b") == 0
    assert cache.find([1, 2, 3, 4, 5], salt="a") == 5


def test_a_longer_tail_replaces_the_shorter_one_and_frees_its_block():
    cache = Cache(4)
    cache.use([1, 2])
    cache.use([1, 2, 3])
    assert len(cache.tree) == 1 and cache.pool.num_free == 3
    cache.use([1])
    assert len(cache.tree) == 1 and cache.find([1, 2, 3]) == 3


def test_content_known_already_stays_private_to_its_holder():
    cache = Cache(4)
    cache.use([1, 2, 3, 4])
    twin = cache.pool.take()
    node = cache.tree.insert(cache.tree.root(""), (1, 2, 3, 4), (twin,), 9)
    assert node.blocks != (twin,)
    assert cache.pool.release(twin) is BlockState.FREE


def test_only_leaves_that_nobody_holds_are_evicted():
    cache = Cache(3)
    cache.use([1, 2, 3, 4, 5, 6, 7, 8])
    hit = cache.tree.find("", [1, 2, 3, 4, 5, 6, 7, 8], 8)
    leaf = hit.nodes[1].blocks[0]
    cache.pool.share(leaf)
    assert not cache.tree.evict()
    cache.pool.release(leaf)
    cache.tree.idle(leaf)
    assert cache.tree.evict() and cache.find([1, 2, 3, 4, 5, 6, 7, 8]) == 4
    assert cache.tree.evict() and cache.find([1, 2, 3, 4]) == 0
    assert not cache.tree.evict() and cache.pool.num_free == 3


def test_flush_frees_what_nobody_holds_and_leaves_the_rest_with_its_holders():
    cache = Cache(3)
    cache.use([1, 2, 3, 4, 5, 6, 7, 8])
    leaf = cache.tree.find("", [1, 2, 3, 4, 5, 6, 7, 8], 8).nodes[1].blocks[0]
    cache.pool.share(leaf)
    cache.tree.flush()
    assert len(cache.tree) == 0 and cache.pool.num_free == 2
    assert cache.pool.state(leaf) is BlockState.ACTIVE
    assert cache.pool.release(leaf) is BlockState.FREE


@pytest.mark.parametrize("k", [1, 2, 3])
def test_victims_are_those_of_a_plain_lru_k_simulation(k):
    blocks, ghosts = 6, 5
    cache, random_ = Cache(blocks, k, ghosts), random.Random(k)
    references: dict[int, list[int]] = {}
    inside: list[int] = []
    ghosts_kept: list[int] = []
    for now in range(1, 1500):
        item = min(int(random_.expovariate(0.15)), 30)
        found = cache.use([item, 0, 0, 0])
        assert (found == SIZE) == (item in inside), f"at {now}"
        if item not in inside:
            if len(inside) == blocks:
                victim = min(
                    inside,
                    key=lambda it: (references[it][-k] if len(references[it]) >= k else -1, references[it][-1]),
                )
                inside.remove(victim)
                ghosts_kept.append(victim)
                if len(ghosts_kept) > ghosts:
                    del references[ghosts_kept.pop(0)]
            if item in ghosts_kept:
                ghosts_kept.remove(item)
            inside.append(item)
        references.setdefault(item, []).append(now)


def hits_on_a_scan_polluted_trace(k):
    cache, random_ = Cache(20, k), random.Random(5)
    hits = 0
    for now in range(4000):
        if now % 3 == 0:  # one of few popular prompts
            hits += cache.use([random_.randrange(15), 1, 1, 1]) == SIZE
        else:  # a scan that never comes back
            cache.use([1000 + now, 1, 1, 1])
    return hits


def test_lru_2_keeps_popular_prompts_through_a_scan_that_flushes_lru():
    assert hits_on_a_scan_polluted_trace(2) > 1.5 * hits_on_a_scan_polluted_trace(1)


def test_content_that_comes_back_from_the_ghosts_has_its_history():
    cache = Cache(2, k=2, max_ghosts=2)
    cache.use([1, 0, 0, 0])
    cache.use([2, 0, 0, 0])
    cache.use([3, 0, 0, 0])  # evicts 1
    cache.use([1, 0, 0, 0])  # evicts 2; its second reference
    assert cache.tree.evicted_reused == 1
    cache.use([4, 0, 0, 0])  # evicts 3, referenced once and later than 1 was first
    assert cache.find([1, 0, 0, 0]) == SIZE and cache.find([3, 0, 0, 0]) == 0


def test_the_ghost_table_is_bounded():
    cache = Cache(2, max_ghosts=3)
    for item in range(50):
        cache.use([item, 0, 0, 0])
    assert len(cache.tree._ghosts) == 3


def test_repeated_use_by_one_request_counts_once():
    cache = Cache(2)
    cache.use([1, 0, 0, 0])
    node = cache.tree.find("", [1, 0, 0, 0], 4).nodes[0]
    for _ in range(3):
        cache.tree.tick()
        cache.tree.touch(node, cache.requests)
    assert node.history == (cache.tree.now,)
    cache.tree.touch(node, cache.requests + 1)
    assert len(node.history) == 2


def test_roots_of_forgotten_salts_do_not_pile_up():
    cache = Cache(4)
    for salt in range(1000):
        cache.use([1, 2, 3], salt=str(salt))
    assert len(cache.tree._roots) < 100
