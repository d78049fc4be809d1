"""What a prefix cache of some size would have served of a trace of requests, under LRU and under LRU-K.

The cache is the engine's own: its tree, its eviction, its ghosts. Requests are taken one after the other, each holding
its blocks while it is served, so what concurrency would evict meanwhile is not seen here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...engine.schedule.blocks import BlockPool, BlockState
from ...engine.schedule.node import Node
from ...engine.schedule.prefix import PrefixTree
from ...kernels.errors import UsageError

SHARES = (1, 2, 5, 10, 20, 50, 100)  # cache sizes by default, in percent of the trace's distinct blocks


class Line(msgspec.Struct):
    """A line of a trace: the token ids of a request, or ids that stand for whole blocks of its prompt.

    tokens      the prompt and, if it was kept, the answer, of which the first `prompt_len` are the prompt (0: all)
    hash_ids    equal ids mean equal blocks after equal ones, as in the traces that Mooncake published
    cache_salt  requests share nothing with those of another salt
    """

    tokens: tuple[int, ...] = ()
    prompt_len: int = 0
    hash_ids: tuple[int, ...] = ()
    cache_salt: str = ""


class Asked(msgspec.Struct, frozen=True):
    """A request as the cache sees it: tokens, of which the first `prompt_len` are looked up."""

    tokens: tuple[int, ...]
    prompt_len: int
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. `block_size` is 1 where the trace names blocks, which are the tokens then."""

    requests: tuple[Asked, ...]
    block_size: int

    @property
    def total_blocks(self) -> int:
        """Blocks of a cache that never has to evict."""
        return sum(-(-len(each.tokens) // self.block_size) for each in self.requests)


class Served(msgspec.Struct, frozen=True):
    """What a cache of `blocks` blocks served. `regrets` counts blocks that were evicted and then asked for again."""

    blocks: int
    k: int
    asked_tokens: int
    hit_tokens: int
    evictions: int
    regrets: int
    kept: int  # blocks in the cache at the end

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else 0.0


def read_trace(path: Path, block_size: int) -> Trace:
    """The requests of a JSONL file. UsageError names the first line that is none."""
    requests: list[Asked] = []
    kinds: set[bool] = set()
    for number, text in _lines(path):
        try:
            line = msgspec.json.decode(text, type=Line)
        except msgspec.DecodeError as error:
            raise UsageError(f"line {number} of `{path}` is no request: {error}", _FORMS) from error
        if bool(line.tokens) == bool(line.hash_ids) or not 0 <= line.prompt_len <= len(line.tokens):
            raise UsageError(f"line {number} of `{path}` is no request", _FORMS)
        kinds.add(bool(line.tokens))
        if len(kinds) > 1:
            raise UsageError(f"line {number} of `{path}` is of another kind than those before it", _FORMS)
        tokens = line.tokens or line.hash_ids
        requests.append(Asked(tokens, line.prompt_len or len(tokens), line.cache_salt))
    if not requests:
        raise UsageError(f"`{path}` has no requests", _FORMS)
    return Trace(tuple(requests), block_size if True in kinds else 1)


_FORMS = 'a line is `{"tokens": [ids...], "prompt_len": N}` or `{"hash_ids": [ids of blocks...]}`, alike in all lines'


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, text
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read `{path}`: {error}") from error


def serve(trace: Trace, blocks: int, k: int) -> Served:
    """What a cache of so many blocks serves of the trace, by LRU-K (1: LRU)."""
    pool = BlockPool(blocks)
    tree = PrefixTree((pool,), trace.block_size, k)
    asked = hits = 0
    for order, request in enumerate(trace.requests):
        asked += request.prompt_len
        hits += _serve(pool, tree, trace.block_size, request, order)
    return Served(blocks, k, asked, hits, tree.evictions, tree.evicted_reused, len(tree))


def _serve(pool: BlockPool, tree: PrefixTree, size: int, request: Asked, order: int) -> int:
    """How many tokens of the prompt were found. All that fits of the request is in the tree then."""
    tree.tick()
    tokens = request.tokens
    hit = tree.find(request.salt, tokens, request.prompt_len)
    held: list[int] = []
    for node in hit.nodes:
        pool.share(node.blocks[0])
        held.append(node.blocks[0])
    for node in hit.nodes if hit.partial is None else (*hit.nodes, hit.partial):
        tree.touch(node, order)
    parent: Node = hit.nodes[-1] if hit.nodes else tree.root(request.salt)
    for start in range(len(hit.nodes) * size, len(tokens), size):
        if not pool.num_free and not tree.evict():
            break  # the request alone is larger than the cache
        (block,) = pool.take()
        held.append(block)
        parent = tree.insert(parent, tokens[start : start + size], (block,), order)
    for block in reversed(held):
        if pool.release(block) is BlockState.CACHED:
            tree.idle(block)
    return len(hit.nodes) * size + hit.partial_tokens


def sizes_of(distinct: int, asked: Sequence[int]) -> tuple[int, ...]:
    """The cache sizes to try: as asked, else shares of the distinct blocks."""
    return tuple(sorted(set(asked or (max(1, distinct * share // 100) for share in SHARES))))
