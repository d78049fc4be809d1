"""Attention on latents: what is cached of a token is its latent and one rotated key, and logits are transformers'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from llmctl.engine.budget import memory_budget
from llmctl.engine.config import EngineConfig, SpeculativeConfig, environment
from llmctl.engine.llm import LLM
from llmctl.engine.load.hub import resolve
from llmctl.engine.load.packed import open_packed
from llmctl.engine.models.families import decoder_spec
from llmctl.engine.plan import resolve as resolve_plan
from llmctl.engine.request import SamplingParams
from llmctl.engine.runner.runner import Runner
from llmctl.kernels import _cpu
from llmctl.kernels.errors import UnsupportedModel, UsageError

from .forced import forced_logits
from .tiny import LATENT, VOCAB, write_checkpoint


@pytest.mark.parametrize("kernels", ["auto", "generic", "reference"])
@pytest.mark.parametrize("family", LATENT)
def test_logits_are_those_of_transformers_in_prefill_and_decode(family: str, kernels: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", family)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = np.random.default_rng(3).integers(3, VOCAB, 60).tolist()
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0].numpy()
    config = EngineConfig(
        dtype="float32", max_num_batched_tokens=64, max_num_seqs=64, block_size=16, max_model_len=128, kernels=kernels
    )
    model = open_packed(resolve(str(folder), environment=environment()), dtype="float32", cache=tmp_path / "cache")
    runner = Runner(model, resolve_plan(config, model)[0])
    prefill = forced_logits(runner, tokens, VOCAB, 64, 16)
    decode = forced_logits(runner, tokens, VOCAB, 1, 16)
    np.testing.assert_allclose(prefill, expected, atol=3e-4, rtol=0)
    np.testing.assert_array_equal(prefill, decode, err_msg="decode and prefill are one bits class")


def test_tokens_are_those_of_transformers_in_company_and_from_the_cache(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "deepseek-v3")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rng = np.random.default_rng(8)
    stem = rng.integers(3, VOCAB, 24).tolist()
    prompts = [[*stem[: 8 * i], *rng.integers(3, VOCAB, 6).tolist()] for i in range(4)]
    expected = []
    for prompt in prompts:
        with torch.inference_mode():
            found = oracle.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None)
        expected.append(found[0, len(prompt) :].tolist())
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    with LLM(str(folder), dtype="float32", max_model_len=64, block_size=8, num_gpu_blocks_override=60) as llm:
        for hits in (False, True):
            outputs = llm.generate(prompts, greedy)
            assert [list(each.outputs[0].token_ids) for each in outputs] == expected
            assert not hits or all(each.num_cached_tokens for each in outputs)


def test_a_model_of_latents_is_one_program_of_compiled_kernels(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "deepseek-v2")
    model = open_packed(resolve(str(folder), environment=environment()), dtype="auto", cache=tmp_path / "cache")
    plan = resolve_plan(EngineConfig(max_model_len=128), model)[0]
    runner = Runner(model, plan)
    assert isinstance(runner.decoder.program, _cpu.Program)


def test_a_token_takes_its_latent_and_one_rotated_key() -> None:
    spec = decoder_spec(LATENT["deepseek-v3"].to_dict())
    found = memory_budget(spec, 1 << 20, ("f16",), EngineConfig(), 4 << 30)
    assert found.kv_bytes_per_token == 2 * (32 + 8) * 2  # two layers, 16 bits
    heads = 2 * 4 * (16 + 8 + 24) * 2
    assert found.kv_bytes_per_token < heads / 4, "keys and values of all heads would take more"
    with pytest.raises(UsageError, match="--kv-cache-dtype is fp8, the latents of this model"):
        memory_budget(spec, 1 << 20, ("f16",), EngineConfig(kv_cache_dtype="fp8"), 4 << 30)


def test_company_chunks_the_cache_and_preemption_change_no_bit(tmp_path: Path) -> None:
    folder = str(write_checkpoint(tmp_path, "deepseek-v2"))
    rng = np.random.default_rng(4)
    stem = rng.integers(3, VOCAB, 30).tolist()
    prompts = [[*stem[: 6 * i], *rng.integers(3, VOCAB, 5).tolist()] for i in range(5)]
    asked = SamplingParams(temperature=0.8, seed=3, max_tokens=25, ignore_eos=True, logprobs=1)
    results = []
    for options in (
        {"max_num_seqs": 1, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 7},
        {"num_gpu_blocks_override": 8},
    ):
        with LLM(
            folder,
            max_model_len=64,
            block_size=8,
            speculative_config=SpeculativeConfig(method="none"),
            **{"num_gpu_blocks_override": 60, **options},
        ) as llm:
            outputs = llm.generate(prompts, asked)
            if options.get("num_gpu_blocks_override") == 8:
                assert llm.frontend.stats().preemptions > 0
        results.append([(o.outputs[0].token_ids, [e.logprob for e in o.outputs[0].logprobs]) for o in outputs])
    assert results[0] == results[1] == results[2]


def test_experts_in_groups_are_refused_by_name() -> None:
    config = {**LATENT["deepseek-v2"].to_dict(), "first_k_dense_replace": 1, "n_group": 8}
    with pytest.raises(UnsupportedModel, match="layers from 1 on are mixtures of experts that are chosen in 8 groups"):
        decoder_spec(config)
