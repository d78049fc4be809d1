"""A storm: more requests than memory, of every kind, and clients that leave at any moment. Tokens stay those of a calm.

Every request is first run alone, without cache and speculation. Then all come at random moments to an engine whose pool
holds 30 percent of what those that run at once need.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from llmctl.engine.assemble import build_engine
from llmctl.engine.config import EngineConfig, SpeculativeConfig
from llmctl.engine.request import FinishReason, Output, Request, SamplingParams, TokenLogprobs

from .schedule.builders import check_invariants
from .tiny import VOCAB, write_checkpoint

BLOCK, PLACES, LONGEST = 8, 24, 200
EAGER = SpeculativeConfig(num_speculative_tokens=8, prompt_lookup_min=1)


@dataclass
class Heard:
    """What a client got of one sequence."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


def crowd(count: int, seed: int) -> list[Request]:
    """Chats that share beginnings, texts that repeat themselves, samples, beams, priorities and tenants."""
    rng = random.Random(seed)
    stems = [[rng.randrange(3, VOCAB) for _ in range(60)] for _ in range(4)]
    requests = []
    for number in range(count):
        own = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 30))]
        phrase = [rng.randrange(3, VOCAB) for _ in range(3)]
        prompt = (rng.choice(stems)[: rng.randrange(60)], phrase * rng.randrange(2, 12), [])[number % 3] + own
        beams = number % 10 == 9
        sampling = SamplingParams(
            n=rng.choice((2, 3)) if beams else 3 if number % 10 == 4 else 1,
            use_beam_search=beams,
            temperature=1.0 if beams else rng.choice((0.0, 0.0, 0.8)),
            logprobs=rng.choice((None, 0, 2)),
            prompt_logprobs=0 if number % 17 == 5 else None,
            repetition_penalty=1.2 if number % 7 == 3 and not beams else 1.0,
        )
        most = rng.randrange(2, 9) if beams else rng.choice((1, 40, 90))
        requests.append(
            Request(
                id=f"r{number}", prompt=tuple(prompt), sampling=sampling, seed=number, stop_ids=(7,),
                max_tokens=most, tenant=rng.choice("abc"), priority=rng.choice((0, 0, 0, 1, 5)),
            )
        )  # fmt: skip
    return requests


def hear(heard: dict[tuple[str, int], Heard], outputs: tuple[Output, ...]) -> None:
    for output in outputs:
        one = heard.setdefault((output.request_id, output.index), Heard())
        assert one.finish is None and output.first == len(one.tokens), "tokens lost or repeated"
        one.tokens.extend(output.tokens)
        one.logprobs.extend(output.logprobs)
        one.prompt_logprobs.extend(output.prompt_logprobs)
        one.finish = output.finish


def calm_outputs(folder: str, requests: list[Request]) -> dict[tuple[str, int], Heard]:
    config = EngineConfig(
        model=folder, max_model_len=LONGEST, num_gpu_blocks_override=40, block_size=16, threads=1, max_num_seqs=8,
        enable_prefix_caching=False, speculative_config=SpeculativeConfig(method="none"),
    )  # fmt: skip
    engine, _ = build_engine(config, epoch=1)
    heard: dict[tuple[str, int], Heard] = {}
    for request in requests:
        engine.add(request)
        while engine.has_work:
            hear(heard, engine.step())
    engine.close()
    return heard


def storm(folder: str, requests: list[Request], mode: str, depth: int) -> None:
    calm = calm_outputs(folder, requests)
    blocks = sum(-(-(len(each.prompt) + each.max_tokens) // BLOCK) * each.sampling.n for each in requests)
    places = sum(each.sampling.n for each in requests)
    pool = 3 * PLACES * blocks // (10 * places)
    config = EngineConfig(
        model=folder, max_model_len=LONGEST, num_gpu_blocks_override=pool, block_size=BLOCK, max_num_seqs=PLACES,
        max_num_batched_tokens=128, async_depth=depth, swap_space=0.02, preemption_mode=mode, speculative_config=EAGER,
    )  # fmt: skip
    engine, _ = build_engine(config, epoch=1)
    rng = random.Random(len(requests))
    waiting, here = list(requests), []
    left: set[tuple[str, int | None]] = set()
    heard: dict[tuple[str, int], Heard] = {}
    while waiting or engine.has_work:
        for request in waiting[: rng.choice((0, 2, 6))]:
            engine.add(request)
            here.append(request)
            waiting.remove(request)
        if here and rng.random() < 0.1:  # a client leaves, or wants one of its samples no more
            gone = rng.choice(here)
            index = rng.randrange(gone.sampling.n) if gone.sampling.n > 1 and rng.random() < 0.5 else None
            left.add((gone.id, index))
            hear(heard, engine.abort(gone.id, index))
        hear(heard, engine.step())
    ended = 0
    for key, one in heard.items():
        expected = calm[key]
        if one.finish is FinishReason.ABORT:
            assert {(key[0], None), key} & left
            assert one.tokens == expected.tokens[: len(one.tokens)], key
            assert one.logprobs == expected.logprobs[: len(one.logprobs)], key
        else:
            assert one == expected, key
            ended += 1
    assert heard.keys() == calm.keys() and 2 * ended > len(calm) and ended < len(calm)
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.accepted_tokens > 0 and stats.evictions > 0
    assert stats.tier_hits > 0 and stats.tier_failures == 0
    assert (stats.waiting, stats.running, stats.blocks_active) == (0, 0, 0)
    assert stats.blocks_free + stats.blocks_cached == pool
    check_invariants(engine._scheduler)  # type: ignore[attr-defined]
    engine.close()


@pytest.mark.parametrize(("mode", "depth"), [("swap", 2), ("recompute", 1)])
def test_a_small_storm_loses_nothing_and_changes_no_token(folder: str, mode: str, depth: int) -> None:
    storm(folder, crowd(60, seed=7), mode, depth)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
def test_a_storm_of_500_requests_loses_nothing_and_changes_no_token(folder: str, mode: str, depth: int) -> None:
    storm(folder, crowd(500, seed=8), mode, depth)
