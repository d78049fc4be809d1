"""Beam search on real kernels: equal to transformers', the same bits in any company, on shared blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from llmctl import LLM, BeamSearchParams, SamplingParams
from llmctl.engine.request import FinishReason
from llmctl.kernels.errors import UsageError

from .tiny import write_checkpoint

PROMPTS = [[40, 41, 42], [7, 100, 31, 200, 9, 9, 77], list(range(50, 90))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", seed=3)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> transformers.PreTrainedModel:
    torch.set_num_threads(1)  # beside our own pool, torch's would spin for cores it does not get
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", kv_cache_dtype="float32", max_model_len=256, block_size=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def stops(llm: LLM) -> tuple[int, ...]:
    """Tokens that beams come by."""
    free = llm.generate(PROMPTS, SamplingParams(n=4, use_beam_search=True, max_tokens=12, ignore_eos=True))
    return tuple({result.outputs[3 - place].token_ids[3 + 3 * place] for place, result in enumerate(free)} - {0})


def of_transformers(
    oracle: transformers.PreTrainedModel,
    prompt: list[int],
    stops: tuple[int, ...],
    width: int,
    count: int,
    **options: object,
) -> tuple[list[tuple[int, ...]], list[float]]:
    """(generated tokens, scores) of the hypotheses, best first."""
    with torch.inference_mode():
        found = oracle.generate(
            torch.tensor([prompt]), num_beams=width, num_return_sequences=count, do_sample=False, pad_token_id=0,
            eos_token_id=list(stops), return_dict_in_generate=True, output_scores=True, **options,
        )  # fmt: skip
    rows = [row[len(prompt) :].tolist() for row in found.sequences]
    ends = [next((place for place, token in enumerate(row, 1) if token in stops), len(row)) for row in rows]
    return [tuple(row[:end]) for row, end in zip(rows, ends, strict=True)], found.sequences_scores.tolist()


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize(("length_penalty", "min_tokens"), [(1.0, 0), (0.0, 3), (2.0, 0), (-0.5, 5)])
def test_hypotheses_and_scores_are_those_of_transformers(
    llm: LLM,
    oracle: transformers.PreTrainedModel,
    stops: tuple[int, ...],
    early_stopping: bool | str,
    length_penalty: float,
    min_tokens: int,
) -> None:
    width, most, ends = 4, 24, 0
    sampling = SamplingParams(
        n=3, best_of=width, use_beam_search=True, max_tokens=most, min_tokens=min_tokens, stop_token_ids=stops,
        ignore_eos=True, length_penalty=length_penalty, early_stopping=early_stopping,
    )  # fmt: skip
    for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, sampling), strict=True):
        tokens, scores = of_transformers(
            oracle, prompt, stops, width, 3, max_new_tokens=most, length_penalty=length_penalty,
            early_stopping=early_stopping, **({"min_new_tokens": min_tokens} if min_tokens else {}),
        )  # fmt: skip
        assert [one.token_ids for one in result.outputs] == tokens
        for one, score in zip(result.outputs, scores, strict=True):
            assert one.cumulative_logprob is not None and one.logprobs is None
            assert one.cumulative_logprob / len(one.token_ids) ** length_penalty == pytest.approx(score, abs=2e-3)
            assert one.finish_reason is (FinishReason.STOP if one.token_ids[-1] in stops else FinishReason.LENGTH)
            ends += one.finish_reason is FinishReason.STOP
    assert ends > 0 or length_penalty == 2.0  # which favours what is long


def test_one_beam_is_greedy_decoding(llm: LLM) -> None:
    greedy = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20, logprobs=2))
    beam = llm.generate(
        PROMPTS,
        SamplingParams(use_beam_search=True, early_stopping=True, max_tokens=20, logprobs=2),
    )
    assert [one.outputs for one in beam] == [one.outputs for one in greedy]


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 1, "enable_prefix_caching": False},
        {"threads": 2, "max_num_batched_tokens": 7, "max_num_seqs": 5},
        {"block_size": 8, "num_gpu_blocks_override": 40, "async_depth": 2},
        {"block_size": 64, "process": True},
    ],
)
def test_beams_have_the_same_bits_in_any_company(folder: Path, options: dict[str, object]) -> None:
    beams = SamplingParams(n=4, use_beam_search=True, max_tokens=18, ignore_eos=True, logprobs=2)
    others = SamplingParams(n=2, temperature=0.8, seed=4, max_tokens=30, ignore_eos=True)
    with LLM(str(folder), max_model_len=128, threads=1) as calm:
        expected = [calm.generate([prompt], beams)[0].outputs for prompt in PROMPTS]
    with LLM(str(folder), max_model_len=128, **options) as busy:  # type: ignore[arg-type]
        prompts = [prompt for pair in zip(PROMPTS, reversed(PROMPTS), strict=True) for prompt in pair]
        for _ in range(2):
            results = busy.generate(prompts, [beams, others] * 3)
            assert [result.outputs for result in results[::2]] == expected


def test_vllms_call_gives_sequences_with_the_prompt(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
    text, ids = llm.beam_search([{"prompt": "hello"}, {"prompt_token_ids": PROMPTS[1]}], params)
    assert [one.tokens for one in llm.beam_search("hello", params)[0].sequences] == [
        one.tokens for one in text.sequences
    ]
    assert len(ids.sequences) == 3
    for one in ids.sequences:
        assert one.tokens[: len(PROMPTS[1])] == tuple(PROMPTS[1]) and len(one.tokens) == len(PROMPTS[1]) + 12
        assert one.text == llm.get_tokenizer().decode(list(one.tokens))
        assert one.cum_logprob == pytest.approx(sum(entry.logprob for entry in one.logprobs))
    scores = [one.score for one in ids.sequences]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"best_of": 2, "n": 3}, "`best_of` is 2 with `n` 3"),
        ({"best_of": 3, "use_beam_search": False}, "`best_of` is 3"),
        ({"temperature": 0.5}, "`temperature` is 0.5 with beam search"),
        ({"top_p": 0.9}, "`top_p` is 0.9"),
        ({"repetition_penalty": 1.1}, "`repetition_penalty` is 1.1"),
        ({"logit_bias": {5: 1.0}}, "`logit_bias`"),
        ({"stop": ("x",)}, "`stop` strings"),
        ({"early_stopping": "soon"}, "`early_stopping` is 'soon'"),
        ({"max_tokens": 0}, "`max_tokens` is 0"),
        ({"n": 20}, "a beam search of width 20 with 1 stop tokens needs 21 logprobs"),
    ],
)
def test_what_a_beam_search_cannot_do_is_refused(llm: LLM, changes: dict[str, object], message: str) -> None:
    given = {"use_beam_search": True, **changes}
    with pytest.raises(UsageError, match=message):
        llm.generate("hello", SamplingParams(**given))  # type: ignore[arg-type]
