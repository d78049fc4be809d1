"""Traces of the two kinds that eviction is judged by in print, made from a seed."""

from __future__ import annotations

import heapq
import random

from llmctl.cli.bench.cache_sim import Asked, Trace


def two_pools(count: int, small: int = 100, large: int = 10_000, seed: int = 1) -> Trace:
    """Alternate references to a small and a large pool of pages, each drawn evenly.

    The experiment of section 4.1 of the LRU-K paper: index pages against records, which a scan pollutes the cache with.
    """
    rng = random.Random(seed)
    pages = (rng.randrange(small) if i % 2 == 0 else small + rng.randrange(large) for i in range(count))
    return Trace(tuple(Asked((page,), 1) for page in pages), 1)


def scan(count: int, prompts: int = 50, blocks: int = 8, block_size: int = 16, seed: int = 1) -> Trace:
    """Popular prompts (by Zipf's law) among requests that never come again, one of the former to two of the latter."""
    rng = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(prompts)]
    requests = []
    for i in range(count):
        item = rng.choices(range(prompts), weights)[0] if i % 3 == 0 else prompts + i
        requests.append(Asked((item,) * (blocks * block_size), blocks * block_size))
    return Trace(tuple(requests), block_size)


def chats(
    sessions: int, rate: float = 1.0, think: float = 60.0, turns: float = 3.5, block_size: int = 16, seed: int = 1
) -> Trace:
    """Conversations that come and go: each turn asks with the whole conversation until then.

    Sessions arrive by Poisson; turns are geometric, thinking exponential, questions and answers lognormal in length,
    about as in ShareGPT. Each session begins with one of 20 system prompts (by Zipf's law) of 64 to 256 tokens.
    """
    rng = random.Random(seed)
    systems = [[-1 - i] * rng.randrange(64, 257) for i in range(20)]
    weights = [1 / (rank + 1) for rank in range(len(systems))]
    waiting: list[tuple[float, int, list[int]]] = []
    at = 0.0
    for session in range(sessions):
        at += rng.expovariate(rate)
        waiting.append((at, session, list(rng.choices(systems, weights)[0])))
    requests = []
    fresh = 0
    while waiting:
        at, session, tokens = heapq.heappop(waiting)
        question, answer = (min(2000, int(rng.lognormvariate(mean, 1.0)) + 1) for mean in (3.5, 5.0))
        tokens = tokens + list(range(fresh, fresh + question + answer))
        fresh += question + answer
        requests.append(Asked(tuple(tokens), len(tokens) - answer))
        if rng.random() > 1 / turns:
            heapq.heappush(waiting, (at + rng.expovariate(1 / think), session, tokens))
    return Trace(tuple(requests), block_size)
