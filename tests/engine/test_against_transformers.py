"""Logits and greedy tokens against transformers in float32, for every family and for the default model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from llmctl.engine.config import EngineConfig, environment
from llmctl.engine.load.hub import Source, resolve
from llmctl.engine.load.packed import open_packed
from llmctl.engine.plan import resolve as resolve_plan
from llmctl.engine.runner.runner import Runner

from .forced import forced_logits
from .tiny import FAMILIES, VOCAB, write_checkpoint

PROMPTS = json.loads((Path(__file__).parents[1] / "data" / "prompts.json").read_text())["prompts"]
DECODE_STEPS = 32


def make_runner(source: Source, cache: Path, **options: object) -> Runner:
    config = EngineConfig(
        **{"dtype": "float32", "max_num_seqs": 64, "max_num_batched_tokens": 64, "block_size": 16, **options}
    )
    model = open_packed(source, dtype=config.dtype, cache=cache)
    return Runner(model, resolve_plan(config, model)[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tiny_model_gives_the_logits_of_transformers_in_prefill_and_decode(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", family)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = np.random.default_rng(3).integers(3, VOCAB, 40 + DECODE_STEPS).tolist()
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0].numpy()
    source = resolve(str(folder), environment=environment())
    runner = make_runner(source, tmp_path / "cache")
    prefill = forced_logits(runner, tokens[:40], VOCAB, 64, 16)
    decode = forced_logits(runner, tokens, VOCAB, 1, 16)
    np.testing.assert_allclose(prefill, expected[:40], atol=2e-4, rtol=0)
    np.testing.assert_allclose(decode, expected, atol=2e-4, rtol=0)
    np.testing.assert_array_equal(prefill, decode[:40], err_msg="decode and prefill are one bits class")


def test_the_default_model_gives_the_greedy_tokens_of_transformers(tmp_path: Path) -> None:
    """64 greedy tokens of ours after each of 20 prompts, teacher-forced through transformers: the same argmax at every
    position, or a tie: a gap between the two best that is below twice the largest logit difference."""
    from llmctl.cli.bench.peers import load_transformers
    from llmctl.engine.llm import LLM
    from llmctl.engine.request import SamplingParams

    torch.set_num_threads(1)  # beside our own pool, torch's would spin for cores it does not get
    source = resolve("", environment=environment())
    oracle = load_transformers(source)
    greedy = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    with LLM(str(source.path), dtype="float32", max_model_len=1024) as llm:
        answers = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy)]
    runner = make_runner(source, environment().cache, max_model_len=1024, num_gpu_blocks_override=64)
    largest, ties = 0.0, []
    for number, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        assert len(answer) == 64
        tokens = [*prompt, *answer]
        with torch.inference_mode():
            expected = oracle(torch.tensor([tokens])).logits[0].numpy()
        ours = forced_logits(runner, tokens, expected.shape[1], 64, 16)
        difference = float(np.abs(ours - expected).max())
        largest = max(largest, difference)
        for place, token in enumerate(answer):
            row = expected[len(prompt) + place - 1]
            if int(row.argmax()) != token:
                second, best = np.sort(row)[-2:]
                ties.append((number, place, float(best - second)))
                assert best - second < 2 * difference, f"prompt {number}, token {place}: not a tie"
    print(f"largest logit difference {largest:.2e}, ties {ties}")
    assert largest < 2e-3
