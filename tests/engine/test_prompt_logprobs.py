"""Prompt logprobs on real kernels: those of transformers, and bit for bit those of the same tokens when generated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from llmctl import LLM, SamplingParams

from .tiny import write_checkpoint

PROMPT = [40, 41, 200, 7, 7, 100, 31, 9, *range(50, 110)]
ASKED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", max_model_len=256, threads=1) as llm:
        yield llm


def test_they_are_those_of_transformers(llm: LLM, folder: Path) -> None:
    torch.set_num_threads(1)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = oracle(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    result = llm.generate([PROMPT], ASKED)[0]
    assert result.prompt_logprobs is not None and len(result.prompt_logprobs) == len(PROMPT)
    assert result.prompt_logprobs[0] is None
    for place, entry in enumerate(result.prompt_logprobs[1:]):
        assert entry is not None and len(entry.top_ids) == 3
        assert entry.logprob == pytest.approx(float(expected[place, PROMPT[place + 1]]), abs=1e-3)
        assert entry.top_logprobs[0] == pytest.approx(float(expected[place].max()), abs=1e-3)
    assert result.outputs[0].logprobs is None


def test_a_tokens_logprob_has_the_bits_that_it_had_when_it_was_generated(llm: LLM) -> None:
    first = llm.generate([PROMPT], SamplingParams(temperature=0.8, seed=3, max_tokens=40, ignore_eos=True, logprobs=4))
    answer = first[0].outputs[0]
    asked = SamplingParams(temperature=0.3, repetition_penalty=1.3, max_tokens=0, prompt_logprobs=4)
    again = llm.generate([[*PROMPT, *answer.token_ids]], asked)[0]
    assert again.prompt_logprobs is not None and answer.logprobs is not None
    assert again.prompt_logprobs[len(PROMPT) :] == answer.logprobs
    assert again.outputs[0].token_ids == () and again.num_cached_tokens == 0


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 7, "max_num_seqs": 3},
        {"max_num_seqs": 1, "speculative_config": {"method": "none"}},
        {"block_size": 8, "num_gpu_blocks_override": 40, "async_depth": 2, "threads": 2},
        {"process": True, "enable_prefix_caching": False},
    ],
)
def test_they_have_the_same_bits_in_any_company_and_after_hits(
    llm: LLM, folder: Path, options: dict[str, object]
) -> None:
    expected = llm.generate([PROMPT], ASKED)[0]
    others = SamplingParams(n=2, temperature=0.8, seed=4, max_tokens=20, ignore_eos=True)
    with LLM(str(folder), dtype="float32", max_model_len=256, **options) as busy:  # type: ignore[arg-type]
        for _ in range(2):
            results = busy.generate([PROMPT, PROMPT[:30], PROMPT, PROMPT[5:]], [others, ASKED, ASKED, others])
            assert results[2].prompt_logprobs == expected.prompt_logprobs
            assert results[2].outputs == expected.outputs
            assert expected.prompt_logprobs is not None
            assert results[1].prompt_logprobs == expected.prompt_logprobs[:30]


def test_beams_and_samples_give_them_too(llm: LLM) -> None:
    expected = llm.generate([PROMPT], ASKED)[0].prompt_logprobs
    for sampling in (
        SamplingParams(n=3, use_beam_search=True, max_tokens=4, prompt_logprobs=3),
        SamplingParams(n=3, seed=1, max_tokens=4, prompt_logprobs=3),
    ):
        assert llm.generate([PROMPT], sampling)[0].prompt_logprobs == expected


def test_beside_a_request_with_fewest_tokens_they_are_what_they_are_alone(llm: LLM) -> None:
    """Inside a prompt no token has been generated yet, which is fewer than any least number."""
    others = [SamplingParams(temperature=0, max_tokens=12, min_tokens=least) for least in (4, 12)]
    alone = llm.generate([PROMPT], ASKED)[0]
    together = llm.generate([[5, 6, 7], PROMPT, [8, 9]], [others[0], ASKED, others[1]])
    assert together[1].prompt_logprobs == alone.prompt_logprobs
    assert [len(one.outputs[0].token_ids) >= least for one, least in ((together[0], 4), (together[2], 12))] == [
        True
    ] * 2
    both = SamplingParams(temperature=0, max_tokens=8, min_tokens=8, prompt_logprobs=3)
    assert llm.generate([PROMPT], both)[0].prompt_logprobs == alone.prompt_logprobs
