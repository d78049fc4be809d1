"""A draft model beside the one that is asked: the same tokens and logprobs in every mode, and what it gains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from llmctl.engine import drafting
from llmctl.engine.config import SpeculativeConfig
from llmctl.engine.llm import LLM, RequestOutput
from llmctl.engine.request import SamplingParams
from llmctl.engine.runner.runner import Runner
from llmctl.engine.schedule.step import ChunkResult, Step, StepResult
from llmctl.kernels.errors import UnsupportedModel

from .test_same_bits import CALM, Result, Way, mixed_requests, run
from .tiny import write_checkpoint, write_tokenizer

PROMPTS = [[5, 77, 130, 9, 200], [7, 8, 9] * 20, [100] * 40 + [3]]
WAYS = (
    Way("a draft model, alone", {}, alone=True),
    Way("a draft model, together"),
    Way("a draft model, chunks of 7", {"max_num_batched_tokens": 7}),
    Way("a draft model, cache warm", {"max_num_seqs": 3}, twice=True),
    Way("a draft model, two steps in flight, preempted", {"num_gpu_blocks_override": 26, "block_size": 8,
                                                          "max_num_seqs": 6, "max_model_len": 200, "async_depth": 2}),
    Way("a draft model, preempted to a swap space", {"num_gpu_blocks_override": 26, "block_size": 8, "max_num_seqs": 6,
                                                     "max_model_len": 200, "swap_space": 0.01,
                                                     "preemption_mode": "swap"}),
    Way("a draft model, in an engine process", {"max_num_seqs": 4}, process=True),
)  # fmt: skip


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("target"), "qwen3"))


@pytest.fixture(scope="module")
def similar(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The target's weights, every matrix off by a little: it is right about as often as not."""
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.add_(torch.randn_like(parameter) * 0.02)
    folder = tmp_path_factory.mktemp("similar")
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return str(folder)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Random weights of another shape."""
    return str(write_checkpoint(tmp_path_factory.mktemp("foreign"), "llama", seed=3))


@pytest.fixture(scope="module")
def calm(target: str) -> list[Result]:
    return run(target, "auto", Way("calm", CALM, alone=True), mixed_requests(12, 304, 120))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_draft_model_changes_no_token_and_no_logprob(way: Way, target: str, similar: str, calm: list[Result]) -> None:
    speculation = SpeculativeConfig(method="draft_model", model=similar, disable_by_batch_size=64)
    way = replace(way, options={**way.options, "speculative_config": speculation})
    assert run(target, "auto", way, mixed_requests(12, 304, 120)) == calm


def generate(model: str, temperature: float, **options: object) -> tuple[list[RequestOutput], object]:
    sampling = SamplingParams(temperature=temperature, seed=5, max_tokens=60, ignore_eos=True, logprobs=2)
    with LLM(model, max_model_len=256, num_gpu_blocks_override=100, **options) as llm:
        return llm.generate(PROMPTS, sampling), llm.frontend.stats()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_model_equal_to_the_target_is_always_right(temperature: float, target: str) -> None:
    plain, _ = generate(target, temperature, speculative_config={"method": "none"})
    drafted, stats = generate(
        target, temperature, speculative_config={"model": target, "num_speculative_tokens": 4}, block_size=8
    )
    assert [one.outputs for one in drafted] == [one.outputs for one in plain]
    assert stats.accepted_tokens == stats.draft_tokens == sum(stats.accepted_per_position)
    assert len(stats.accepted_per_position) == 4 and stats.accepted_per_position[0] == stats.drafts
    assert stats.steps < 60 / 3


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_model_that_knows_nothing_is_soon_left_alone(temperature: float, target: str, foreign: str) -> None:
    plain, _ = generate(target, temperature, speculative_config={"method": "none"})
    drafted, stats = generate(target, temperature, speculative_config={"model": foreign})
    assert [one.outputs for one in drafted] == [one.outputs for one in plain]
    assert stats.accepted_tokens <= 0.2 * stats.draft_tokens
    assert 0 < stats.drafts < 0.2 * 3 * 60


def test_a_draft_model_has_a_prefix_hit_where_the_target_has_one(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []

    class CountingRunner(Runner):
        def execute(self, step: Step) -> StepResult:
            rows.append(sum(chunk.count for chunk in step.chunks))
            return super().execute(step)

    monkeypatch.setattr(drafting, "Runner", CountingRunner)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    computed = []
    with LLM(target, max_model_len=256, speculative_config={"model": target}, block_size=8) as llm:
        for _ in range(2):
            llm.generate([[7, 8, 9, 10] * 20], sampling)
            computed.append(sum(rows))
            rows.clear()
    assert computed[0] > 80
    assert computed[1] < 20


def test_a_draft_model_that_gives_nan_is_asked_no_more_and_does_no_harm(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class BrokenRunner(Runner):
        def execute(self, step: Step) -> StepResult:
            asked.append(len(step.chunks))
            return StepResult(step.index, tuple(ChunkResult(chunk.slot, (), False) for chunk in step.chunks))

    plain, _ = generate(target, 0.8, speculative_config={"method": "none"})
    monkeypatch.setattr(drafting, "Runner", BrokenRunner)
    drafted, stats = generate(target, 0.8, speculative_config={"model": target})
    assert [one.outputs for one in drafted] == [one.outputs for one in plain]
    assert stats.drafts == 0 and sum(asked) == len(PROMPTS)


def test_another_vocabulary_is_refused_and_the_first_difference_told(target: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text("utf-8").replace("<|im_start|>", "<|turn|>"), "utf-8")
    with pytest.raises(UnsupportedModel, match=r"token 1 is '<\|turn\|>' and '<\|im_start\|>'") as caught:
        LLM(target, speculative_config={"model": str(tmp_path)})
    assert "same family" in caught.value.hint
