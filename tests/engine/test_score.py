"""Logits of given tokens are those of generation, whatever the length of the steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmctl.engine.config import EngineConfig, environment
from llmctl.engine.llm import LLM
from llmctl.engine.load.hub import Source
from llmctl.engine.load.packed import PackedModel, open_packed
from llmctl.engine.plan import resolve
from llmctl.engine.request import SamplingParams
from llmctl.engine.runner.runner import Runner
from llmctl.engine.score import ROWS, Scorer
from llmctl.kernels.errors import CapacityError, UsageError

from .forced import forced_logits
from .quantized import write_quantized
from .tiny import VOCAB, write_checkpoint

TEXT = np.random.default_rng(4).integers(3, VOCAB, ROWS + 40).tolist()


@pytest.fixture(scope="module", params=["float32", "awq"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PackedModel:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3")
    if request.param == "awq":
        write_quantized(folder, "awq")
    return open_packed(Source(folder, "hf", "tiny"), cache=environment().cache)


def test_logits_are_those_of_single_tokens_through_the_runner(model: PackedModel) -> None:
    config = EngineConfig(max_model_len=len(TEXT), num_gpu_blocks_override=len(TEXT), block_size=16)
    runner = Runner(model, resolve(config, model)[0])
    expected = forced_logits(runner, TEXT, VOCAB, 1, 16)
    np.testing.assert_array_equal(Scorer(model, len(TEXT), EngineConfig()).logits(TEXT), expected)


def test_texts_follow_one_another_without_a_trace(model: PackedModel) -> None:
    scorer = Scorer(model, len(TEXT), EngineConfig())
    first = scorer.logits(TEXT[:50])
    scorer.logits(TEXT[::-1])
    np.testing.assert_array_equal(scorer.logits(TEXT[:50]), first)


def test_greedy_tokens_are_the_argmax_of_the_logits(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama")
    with LLM(str(folder), max_model_len=64) as llm:
        answer = llm.generate(TEXT[:20], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0].outputs[0]
    model = open_packed(Source(folder, "hf", "tiny"), cache=environment().cache)
    logits = Scorer(model, 64, EngineConfig()).logits([*TEXT[:20], *answer.token_ids])
    assert logits[19:-1].argmax(-1).tolist() == list(answer.token_ids)


def test_what_does_not_fit_or_is_no_token_is_refused(model: PackedModel) -> None:
    scorer = Scorer(model, 8, EngineConfig())
    with pytest.raises(CapacityError, match="9 tokens to score, there is room for 8"):
        scorer.logits(TEXT[:9])
    for wrong in ([], [VOCAB], [-1]):
        with pytest.raises(UsageError, match=f"from 0 to {VOCAB - 1}"):
            scorer.logits(wrong)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_hidden_states_are_those_of_transformers_at_prompt_and_answer(family: str, tmp_path: Path) -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    folder = write_checkpoint(tmp_path, family)
    oracle = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with LLM(str(folder), dtype="float32", max_model_len=256) as llm:
        result = llm.generate([TEXT[:140]], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0]
        tokens = [*result.prompt_token_ids, *result.outputs[0].token_ids]
        hidden = llm.hidden_states(tokens)
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).last_hidden_state[0].numpy()
    assert hidden.shape == expected.shape and hidden.dtype == np.float32
    np.testing.assert_allclose(hidden, expected, atol=2e-4, rtol=0)


def test_hidden_states_do_not_depend_on_what_comes_after(model: PackedModel) -> None:
    scorer = Scorer(model, len(TEXT), EngineConfig())
    np.testing.assert_array_equal(scorer.hidden_states(TEXT)[:30], scorer.hidden_states(TEXT[:30]))
