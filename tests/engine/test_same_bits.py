"""The same bits, always: a request's tokens and logprobs do not depend on company or on luck.

Equality, not tolerance: every run is compared with one in which each request was alone, single-threaded, uncached.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from llmctl.engine.assemble import build_engine
from llmctl.engine.config import EngineConfig, SpeculativeConfig, environment
from llmctl.engine.llm import LLM
from llmctl.engine.load.hub import resolve
from llmctl.engine.load.packed import open_packed
from llmctl.engine.plan import resolve as resolve_plan
from llmctl.engine.request import Request, SamplingParams
from llmctl.engine.runner.runner import Runner, replay
from llmctl.engine.schedule.step import Admit, Chunk, SlotSampling, Step, TableDelta

from .quantized import write_quantized
from .tiny import write_checkpoint

Result = tuple[tuple[tuple[int, ...], tuple[tuple[object, ...], ...]], ...]
OFF = SpeculativeConfig(method="none")
EAGER = SpeculativeConfig(num_speculative_tokens=6, prompt_lookup_min=1)
CALM = {
    "threads": 1,
    "enable_prefix_caching": False,
    "block_size": 16,
    "max_num_batched_tokens": 512,
    "speculative_config": OFF,
}


@dataclass(frozen=True)
class Way:
    """One way of running the requests."""

    name: str
    options: dict[str, object] = field(default_factory=dict)
    alone: bool = False
    process: bool = False
    twice: bool = False  # the second run, on a warm cache, counts


WAYS = (
    Way("alone", {}, alone=True),
    Way("together"),
    Way("chunks of 1", {"max_num_batched_tokens": 1, "max_num_seqs": 1}, alone=True),
    Way("chunks of 7", {"max_num_batched_tokens": 7}),
    Way("chunks of 16", {"max_num_batched_tokens": 16}),
    Way("one thread", {"threads": 1}),
    Way("two threads", {"threads": 2}),
    Way("blocks of 16", {"block_size": 16}),
    *(Way(f"blocks of {size}", {"block_size": size}) for size in (32, 64, 128, 256, 512)),
    Way("blocks of 8 and three sequences", {"block_size": 8, "max_num_seqs": 3}),
    Way("cache off", {"enable_prefix_caching": False}),
    Way("cache warm", {}, twice=True),
    Way("cache warm, alone", {}, alone=True, twice=True),
    Way("preempted", {"num_gpu_blocks_override": 30, "block_size": 8, "max_model_len": 200}),
    Way("preempted without cache", {"num_gpu_blocks_override": 30, "block_size": 8, "max_model_len": 200,
                                    "enable_prefix_caching": False}),
    Way("preempted, swapped", {"num_gpu_blocks_override": 30, "block_size": 8, "max_model_len": 200,
                               "swap_space": 0.01, "preemption_mode": "swap"}),
    Way("two steps in flight, preempted, recomputed", {"async_depth": 2, "num_gpu_blocks_override": 30,
                                                       "block_size": 8, "max_model_len": 200, "swap_space": 0.01,
                                                       "preemption_mode": "recompute"}),
    Way("cache warm in tier 2, two steps in flight", {"async_depth": 2, "num_gpu_blocks_override": 30,
                                                      "block_size": 8, "max_model_len": 200, "swap_space": 0.01,
                                                      "max_num_seqs": 4}, twice=True),
    Way("two steps in flight", {"async_depth": 2}),
    Way("two steps in flight, preempted", {"async_depth": 2, "num_gpu_blocks_override": 30, "block_size": 8,
                                           "max_model_len": 200}),
    Way("first come first served", {"scheduling_policy": "fcfs"}),
    Way("prompts cut to 5 tokens beside decodes", {"max_prefill_tokens_beside_decode": 5, "scheduling_policy": "sjf"}),
    Way("in an engine process", {}, process=True),
    Way("no drafts, together", {"speculative_config": OFF}),
    Way("drafts, alone", {"speculative_config": EAGER}, alone=True),
    Way("drafts, three together", {"speculative_config": EAGER, "max_num_seqs": 3}),
    Way("drafts, two steps in flight", {"speculative_config": EAGER, "max_num_seqs": 3, "async_depth": 2}),
    Way("drafts, preempted", {"speculative_config": EAGER, "num_gpu_blocks_override": 26, "block_size": 8,
                              "max_num_seqs": 6, "max_model_len": 200}),
    Way("drafts, two steps in flight, preempted", {"speculative_config": EAGER, "num_gpu_blocks_override": 26,
                                                   "block_size": 8, "max_num_seqs": 6, "max_model_len": 200,
                                                   "async_depth": 2}),
)  # fmt: skip


def mixed_requests(count: int, vocab: int, longest: int) -> list[tuple[list[int], SamplingParams]]:
    """Greedy and seeded sampling, shared prefixes, n = 4, penalties; lengths mixed."""
    rng = random.Random(11)
    prefix = [rng.randrange(3, vocab) for _ in range(longest // 2)]
    requests = []
    for i in range(count):
        own = [rng.randrange(3, vocab) for _ in range(rng.randrange(1, longest // 2))]
        prompt = prefix[: rng.randrange(len(prefix))] + own if i % 3 else own
        greedy = i % 2 == 0
        params = SamplingParams(
            temperature=0 if greedy else 0.8,
            seed=None if greedy else 1000 + i,
            max_tokens=rng.choice((4, 9, 14, 60)),
            ignore_eos=True,
            logprobs=rng.choice((0, 3)),
            n=4 if i % 8 == 5 else 1,
            top_p=0.9 if i % 8 == 3 else 1.0,
            top_k=40 if i % 8 == 7 else 0,
            repetition_penalty=1.2 if i % 5 == 4 else 1.0,
        )
        requests.append((prompt, params))
    return requests


def run(model: str, dtype: str, way: Way, requests: Sequence[tuple[list[int], SamplingParams]]) -> list[Result]:
    options = {"max_model_len": 256, "num_gpu_blocks_override": 600, **way.options}
    with LLM(model, dtype=dtype, process=way.process, **options) as llm:
        for _ in range(2 if way.twice else 1):
            if way.alone:
                outputs = [llm.generate([prompt], params)[0] for prompt, params in requests]
            else:
                outputs = llm.generate([p for p, _ in requests], [s for _, s in requests])
        if way.twice:
            assert sum(output.num_cached_tokens for output in outputs) > 0
        stats = llm.frontend.stats()
        if "preempted" in way.name and len(requests) >= 12:
            assert stats.preemptions > 0
        if "swap_space" in way.options and len(requests) >= 16:
            assert stats.tier_hits > 0 or "recomputed" in way.name
        if way.name.startswith(("drafts", "a draft model")):
            assert stats.draft_tokens > stats.accepted_tokens > 0
    return [
        tuple((one.token_ids, tuple((e.logprob, *e.top_logprobs) for e in one.logprobs)) for one in output.outputs)
        for output in outputs
    ]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3"))


@pytest.fixture(scope="module")
def calm(tiny: str) -> list[Result]:
    return run(tiny, "auto", Way("calm", CALM, alone=True), mixed_requests(32, 304, 120))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_tiny_model_gives_the_same_tokens_and_logprobs(way: Way, tiny: str, calm: list[Result]) -> None:
    assert run(tiny, "auto", way, mixed_requests(32, 304, 120)) == calm


@pytest.mark.parametrize("kv", ["bfloat16", "fp8_e4m3", "fp8_e5m2", "int8", "int16"])
def test_every_format_of_the_cache_gives_the_same_bits(kv: str, tiny: str) -> None:
    requests = mixed_requests(24, 304, 120)
    calm = run(tiny, "auto", Way("calm", {**CALM, "kv_cache_dtype": kv}, alone=True), requests)
    names = (
        *("alone", "together", "chunks of 1", "chunks of 7", "chunks of 16"),
        *("two threads", "blocks of 64", "cache warm", "preempted"),
    )
    for way in (way for way in WAYS if way.name in names):
        with_format = replace(way, options={**way.options, "kv_cache_dtype": kv})
        assert run(tiny, "auto", with_format, requests) == calm, way.name


def test_a_layer_left_out_of_the_cache_s_format_gives_the_same_bits(tiny: str) -> None:
    requests = mixed_requests(16, 304, 120)
    options = {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": ("1",)}
    alone = run(tiny, "auto", Way("calm", {**CALM, **options}, alone=True), requests)
    for way in (way for way in WAYS if way.name in ("together", "chunks of 7", "cache warm", "preempted")):
        assert run(tiny, "auto", replace(way, options={**way.options, **options}), requests) == alone, way.name


def test_with_every_layer_left_out_the_cache_is_as_without_a_format(tiny: str) -> None:
    requests = mixed_requests(8, 304, 120)
    skipped = {"kv_cache_dtype": "int8", "kv_cache_dtype_skip_layers": ("0", "1")}
    found = [run(tiny, "auto", Way("calm", {**CALM, **more}), requests) for more in ({}, skipped)]
    assert found[0] == found[1]


@pytest.mark.parametrize("family", ["qwen2-window", "gemma3", "mistral"])
def test_blocks_that_a_window_has_passed_are_given_back_and_change_no_bit(family: str, tmp_path: Path) -> None:
    """In blocks of 512 nothing is given back: that is what the others are compared with."""
    folder = str(write_checkpoint(tmp_path, family))
    requests = mixed_requests(24, 304, 120)
    whole = run(folder, "auto", Way("whole", {**CALM, "block_size": 512}, alone=True), requests)
    names = ["together", "chunks of 7", "cache warm", "preempted"]
    if family == "gemma3":
        names += ["blocks of 64", "cache warm, alone", "two steps in flight, preempted", "drafts, preempted"]
        names += ["preempted, swapped", "cache warm in tier 2, two steps in flight"]
    for way in (way for way in WAYS if way.name in names):
        assert run(folder, "auto", way, requests) == whole, way.name


@pytest.mark.parametrize("kind", ["awq", "gptq-v2-desc-act"])
def test_codes_with_zero_points_and_scattered_groups_give_the_same_bits(kind: str, tmp_path: Path) -> None:
    write_quantized(write_checkpoint(tmp_path, "qwen3"), kind)
    requests = mixed_requests(24, 304, 120)
    calm = run(str(tmp_path), "auto", Way("calm", CALM, alone=True), requests)
    names = ("together", "chunks of 7", "two threads", "blocks of 64", "cache warm", "preempted")
    for way in (way for way in WAYS if way.name in names):
        assert run(str(tmp_path), "auto", way, requests) == calm, way.name


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_default_model_gives_the_same_tokens_and_logprobs(dtype: str) -> None:
    requests = mixed_requests(8, 49152, 80)
    calm = run("", dtype, Way("calm", CALM, alone=True), requests)
    names = ("together", "chunks of 7", "two threads", "blocks of 64", "cache warm", "preempted", "drafts, alone")
    for way in (way for way in WAYS if way.name in names):
        assert run("", dtype, way, requests) == calm, way.name


@pytest.mark.parametrize("others", [{}, {"logprobs": 2}, {"temperature": 0.8, "seed": 3}])
def test_many_that_want_the_likeliest_token_alone_get_those_of_each_by_itself(others: dict[str, int | float]) -> None:
    """Of many rows the head computes only what may be the largest logit, where nobody looks at another."""
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 49152) for _ in range(rng.randrange(4, 40))] for _ in range(20)]
    greedy = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    wanted = [SamplingParams(**{**greedy, **(others if i % 9 == 4 else {})}) for i in range(len(prompts))]
    with LLM("", max_model_len=128, speculative_config=OFF) as llm:
        together = llm.generate(prompts, wanted)
        whole = [SamplingParams(**{**greedy, **(others if i % 9 == 4 else {}), "logprobs": 2}) for i in range(20)]
        alone = [llm.generate([prompt], params)[0] for prompt, params in zip(prompts, whole, strict=True)]
    for found, expected in zip(together, alone, strict=True):
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    if "logprobs" in others:
        assert together[4].outputs[0].logprobs == alone[4].outputs[0].logprobs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_the_default_model_gives_the_same_bits_in_every_way(dtype: str) -> None:
    requests = mixed_requests(32, 49152, 120)
    calm = run("", dtype, Way("calm", CALM, alone=True), requests)
    for way in WAYS:
        assert run("", dtype, way, requests) == calm, way.name


def test_a_runner_driven_by_recorded_steps_gives_the_same_results(tiny: str) -> None:
    recording: list[bytes] = []
    config = EngineConfig(
        model=tiny,
        max_model_len=256,
        max_num_seqs=3,
        num_gpu_blocks_override=40,
        block_size=8,
        threads=2,
        speculative_config=EAGER,
    )
    engine, _ = build_engine(config, epoch=1, record=recording.append)
    for number, (prompt, sampling) in enumerate(mixed_requests(12, 304, 120)):
        seed = sampling.seed or 0
        engine.add(
            Request(id=str(number), prompt=tuple(prompt), sampling=sampling, seed=seed, stop_ids=(), max_tokens=30)
        )
    tokens: dict[tuple[str, int], list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens.setdefault((output.request_id, output.index), []).extend(output.tokens)
    assert engine.stats().accepted_tokens > 0
    engine.close()
    model = open_packed(resolve(tiny, environment=environment()), dtype="auto", cache=environment().cache)
    results = replay(Runner(model, resolve_plan(config, model)[0]), recording)
    replayed = sorted(token for result in results for chunk in result.chunks for token in chunk.tokens)
    assert replayed == sorted(token for sequence in tokens.values() for token in sequence)
    assert results == replay(Runner(model, resolve_plan(config, model)[0]), recording)


def test_right_and_wrong_drafts_give_the_tokens_of_plain_decoding(tiny: str) -> None:
    model = open_packed(resolve(tiny, environment=environment()), dtype="auto", cache=environment().cache)
    config = EngineConfig(model=tiny, max_model_len=256, num_gpu_blocks_override=20, block_size=16)
    plan = resolve_plan(config, model)[0]
    prompt = [5, 77, 130, 9, 200]
    sampling = SlotSampling(0.8, 0, 1.0, 0.0, 1.1, 0.0, 0.0, 42, 2)
    start = Step(
        0,
        admit=(Admit(0, np.array(prompt, "<i4").tobytes(), len(prompt), sampling),),
        tables=(TableDelta(0, 0, (3, 1, 2)),),
        chunks=(Chunk(0, 0, len(prompt), len(prompt) - 1),),
    )
    plain = Runner(model, plan)
    expected = [plain.execute(start).chunks[0]]
    for place in range(12):
        expected.append(plain.execute(Step(1, chunks=(Chunk(0, len(prompt) + place, 1, 0),))).chunks[0])
    tokens = [result.tokens[0] for result in expected]
    drafted = Runner(model, plan)
    drafted.execute(start)
    got, place = [], 0
    for drafts in ((tokens[1], tokens[2]), (tokens[4], 17), (17, 17), tuple(tokens[7:10])):
        count = 1 + len(drafts)
        result = drafted.execute(Step(1, chunks=(Chunk(0, len(prompt) + place, count, 0, drafts),))).chunks[0]
        got += list(zip(result.tokens, result.logprobs, result.top_ids, result.top_logprobs, strict=True))
        place += len(result.tokens)
    wanted = [(r.tokens[0], r.logprobs[0], r.top_ids[0], r.top_logprobs[0]) for r in expected[1:]]
    assert got == wanted[: len(got)]
    assert len(got) == 3 + 2 + 1 + 4
