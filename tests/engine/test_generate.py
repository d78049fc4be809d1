"""What `LLM.generate` gives: text, stops, n, logprobs, the prefix cache, errors of one request."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from llmctl import LLM, SamplingParams
from llmctl.engine.request import FinishReason
from llmctl.kernels.errors import CapacityError, UsageError

from .tiny import write_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen2")
    with LLM(str(folder), max_model_len=256, num_gpu_blocks_override=60, block_size=16) as llm:
        yield llm


def with_changes(sampling: SamplingParams, **changes: object) -> SamplingParams:
    import msgspec

    return msgspec.structs.replace(sampling, **changes)


def test_text_is_what_the_tokenizer_decodes(llm: LLM) -> None:
    one = llm.generate("hello", GREEDY)[0].outputs[0]
    assert one.text == llm.get_tokenizer().decode(list(one.token_ids))
    assert len(one.token_ids) == 24 and one.finish_reason is FinishReason.LENGTH


def test_a_stop_string_ends_the_text_before_it_and_counts_tokens_up_to_it(llm: LLM) -> None:
    free = llm.generate("hello", GREEDY)[0].outputs[0]
    stop = free.text[6:9]
    place = free.text.find(stop)
    one = llm.generate("hello", with_changes(GREEDY, stop=(stop,)))[0].outputs[0]
    assert one.text == free.text[:place] and one.finish_reason is FinishReason.STOP
    assert one.token_ids == free.token_ids[: len(one.token_ids)]
    assert stop in llm.get_tokenizer().decode(list(one.token_ids))
    kept = llm.generate("hello", with_changes(GREEDY, stop=(stop,), include_stop_str_in_output=True))[0].outputs[0]
    assert kept.text == free.text[:place] + stop


def test_a_stop_token_ends_the_sequence_and_min_tokens_puts_it_off(llm: LLM) -> None:
    free = llm.generate("hello", GREEDY)[0].outputs[0]
    token = free.token_ids[5]
    place = free.token_ids.index(token)
    one = llm.generate("hello", with_changes(GREEDY, stop_token_ids=(token,)))[0].outputs[0]
    assert one.token_ids == free.token_ids[: place + 1] and one.finish_reason is FinishReason.STOP
    later = llm.generate("hello", with_changes(GREEDY, stop_token_ids=(token,), min_tokens=12))[0].outputs[0]
    assert token not in later.token_ids[:12] and len(later.token_ids) > 12


def test_n_samples_differ_are_reproducible_and_share_the_prompt(llm: LLM) -> None:
    sampling = SamplingParams(n=4, temperature=1.0, seed=9, max_tokens=16, ignore_eos=True)
    first = llm.generate("a prompt of some length for four samples", sampling)[0]
    again = llm.generate("a prompt of some length for four samples", sampling)[0]
    assert len({one.token_ids for one in first.outputs}) == 4
    assert [one.token_ids for one in first.outputs] == [one.token_ids for one in again.outputs]


def test_logprobs_have_one_entry_per_token_best_first(llm: LLM) -> None:
    one = llm.generate("hello", with_changes(GREEDY, logprobs=5))[0].outputs[0]
    assert one.logprobs is not None and len(one.logprobs) == len(one.token_ids)
    for token, entry in zip(one.token_ids, one.logprobs, strict=True):
        assert entry.top_ids[0] == token and entry.top_logprobs[0] == entry.logprob
        assert list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True) and len(entry.top_ids) == 5
    assert one.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in one.logprobs))


def test_a_second_turn_computes_only_what_is_new(llm: LLM) -> None:
    first = llm.generate([list(range(40, 90))], GREEDY)[0]
    history = [*first.prompt_token_ids, *first.outputs[0].token_ids]
    second = llm.generate([[*history, 7, 8, 9]], GREEDY)[0]
    assert second.num_cached_tokens == len(history) - 1  # the KV of the last sampled token never existed


def test_logit_bias_and_banned_tokens_are_obeyed(llm: LLM) -> None:
    free = llm.generate("hello", GREEDY)[0].outputs[0]
    banned = llm.generate("hello", with_changes(GREEDY, logit_bias={free.token_ids[0]: -100.0}))[0].outputs[0]
    assert banned.token_ids[0] != free.token_ids[0]
    forced = llm.generate("hello", with_changes(GREEDY, logit_bias={100: 100.0}))[0].outputs[0]
    assert set(forced.token_ids) == {100}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1.0}, "`temperature` is -1.0"),
        ({"top_p": 0.0}, "`top_p` is 0"),
        ({"n": 0}, "`n` is 0"),
        ({"max_tokens": -1}, "`max_tokens` is -1"),
        ({"min_tokens": 25}, "`min_tokens` is 25, more than `max_tokens`, which is 24"),
        ({"n": 100000}, "`n` is 100000"),
        ({"stop": ("",)}, "empty string"),
        ({"stop_token_ids": (99999,)}, "99999"),
        ({"logprobs": 21}, "`logprobs` is 21"),
        ({"temperature": float("nan")}, "`temperature` is nan"),
    ],
)
def test_a_sampling_value_that_cannot_work_is_refused_with_its_limit(
    llm: LLM, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        llm.generate("hello", with_changes(GREEDY, **changes))


def test_tokens_beyond_the_context_are_refused_and_not_cut(llm: LLM) -> None:
    with pytest.raises(CapacityError, match="do not fit the context of 256"):
        llm.generate([[5] * 200], with_changes(GREEDY, max_tokens=100))
    with pytest.raises(CapacityError, match="200 prompt tokens and min_tokens 57 do not fit the context of 256"):
        llm.generate([[5] * 200], with_changes(GREEDY, max_tokens=None, min_tokens=57))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_tokens": 5.5}, "max_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"top_k": None}, "top_k"),
        ({"temperature": None}, "temperature"),
        ({"temperature": "x"}, "temperature"),
        ({"logprobs": True}, "logprobs"),
        ({"top_p": "0.9"}, "top_p"),
        ({"stop": (1,)}, "stop"),
    ],
)
def test_a_sampling_value_of_the_wrong_type_is_refused_and_the_engine_goes_on(
    llm: LLM, changes: dict[str, object], field: str
) -> None:
    with pytest.raises(UsageError, match=f"`{field}` is"):
        llm.generate("hello", with_changes(GREEDY, **changes))
    assert len(llm.generate("hello", GREEDY)[0].outputs[0].token_ids) == 24


@pytest.mark.parametrize("prompt", [[5, 1.5], [5, True], b"hi", [None]])
def test_a_prompt_that_is_neither_text_nor_ids_is_refused(llm: LLM, prompt: object) -> None:
    with pytest.raises(UsageError):
        llm.generate([prompt], GREEDY)  # type: ignore[list-item]


def test_one_stop_string_and_numpy_ids_are_taken_as_written(llm: LLM) -> None:
    import numpy as np

    assert SamplingParams(stop="abc").stop == ("abc",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"], stop_token_ids=[1]).stop == ("a", "b")  # type: ignore[arg-type]
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    ids = np.array([40, 41, 42])
    assert llm.generate([ids], GREEDY)[0].outputs == llm.generate([[40, 41, 42]], GREEDY)[0].outputs


def test_no_prompts_give_no_results(llm: LLM) -> None:
    assert llm.generate([]) == llm.generate((), []) == llm.chat([]) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (None, "prompts are a NoneType: None"),
        (5, "prompts are a int: 5"),
        (b"hello", "prompts are a bytes: b'hello'"),
        ({"prompt": "hello"}, "prompts are a dict"),
        ([None], "prompt 0 is a NoneType: None"),
        (["hello", 5], "prompt 1 is a int: 5"),
        (["hello", b"hi"], "prompt 1 is a bytes"),
        ([[1, 2], [1.0, 2.0]], r"prompt 1 is a list: \[1.0, 2.0\]"),
        ([1, 2.5], "prompt 0 is a int: 1"),
        ([[True, False]], "prompt 0 is a list"),
        ([["hello"]], "prompt 0 is a list"),
        ([[[1, 2]]], "prompt 0 is a list"),
        ([{"prompt": "hello"}], "prompt 0 is a dict"),
        (np.ones((2, 2)), "prompt 0 is a ndarray"),
        ("", "the prompt is empty"),
        ([[]], "the prompt is empty"),
    ],
)
def test_what_is_no_prompt_is_named(llm: LLM, prompts: object, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        llm.generate(prompts)  # type: ignore[arg-type]
    assert caught.value.hint


@pytest.mark.parametrize("prompts", [np.arange(3, 8), (3, 4, 5), iter([[3, 4, 5]]), np.arange(3, 9).reshape(2, 3)])
def test_token_ids_may_be_of_any_sequence(llm: LLM, prompts: object) -> None:
    results = llm.generate(prompts, with_changes(GREEDY, max_tokens=1))  # type: ignore[arg-type]
    assert results[0].prompt_token_ids[:3] == (3, 4, 5)
    assert all(type(token) is int for token in results[0].prompt_token_ids)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (None, "messages are a NoneType"),
        ("hello", "messages are a str: 'hello'"),
        ({"role": "user", "content": "hi"}, "messages are a dict"),
        ([5], "conversation 0 is a int: 5"),
        ([["hello"]], "conversation 0 is a list"),
        ([{"role": "user", "content": "hi"}, "hello"], "conversation 0 is a list"),
    ],
)
def test_what_is_no_conversation_is_named(llm: LLM, messages: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llm.chat(messages)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [{"temperature": 0}, [None], "greedy", 0])
def test_what_are_no_sampling_params_is_named(llm: LLM, params: object) -> None:
    with pytest.raises(UsageError, match="sampling params are a"):
        llm.generate(["hello"], params)  # type: ignore[arg-type]


def test_a_script_for_vllm_runs_after_its_import_was_changed(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_checkpoint(tmp_path, "llama"))
    prompts = ["one prompt", "another one", "and a third"]
    engine = LLM(
        model=folder,
        tokenizer=folder,
        dtype="half",
        tensor_parallel_size=1,
        max_num_seqs=2,
        gpu_memory_utilization=0.2,
        trust_remote_code=True,
        max_model_len=128,
    )
    sampling = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8, ignore_eos=True, logprobs=1, seed=1)
    capsys.readouterr()  # what writing the checkpoint said
    engine.generate(prompts[:1], sampling, use_tqdm=False)
    assert capsys.readouterr().err == ""
    outputs = engine.generate(prompts, sampling, use_tqdm=True)
    shown = capsys.readouterr()
    assert shown.out == "" and "3/3 prompts" in shown.err
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert len(output.prompt_token_ids) == len(output.prompt or "")
        one = output.outputs[0]
        assert len(one.token_ids) == len(one.logprobs or ()) == 8 and one.text and one.finish_reason == "length"
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 24
    engine.close()


BENCHMARK = """
import time
from {package} import LLM, SamplingParams


def benchmark_vllm(model_path, prompts, batch_size, max_new_tokens):
    llm = LLM(
        model=model_path,
        tokenizer=model_path,
        trust_remote_code=True,
        dtype="float16",
        tensor_parallel_size=1,
        max_num_seqs=batch_size,
        gpu_memory_utilization=0.2,
    )
    sampling_params = SamplingParams(temperature=0.0, top_p=1.0, max_tokens=max_new_tokens)
    for _ in range(2):
        llm.generate(prompts[:1], sampling_params, use_tqdm=False)
    start = time.time()
    outputs = llm.generate(prompts, sampling_params, use_tqdm=True)
    elapsed = time.time() - start
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return tokens, elapsed > 0, [output.outputs[0].text for output in outputs]


if __name__ == "__main__":
    print(benchmark_vllm({model!r}, ["one prompt", "another one", "a third"], 2, 5))
"""


def test_a_benchmark_written_for_vllm_runs_as_a_script_of_its_own(tmp_path) -> None:
    folder = str(write_checkpoint(tmp_path / "model", "llama"))
    script = tmp_path / "benchmark.py"
    script.write_text(BENCHMARK.format(package="llmctl", model=folder))
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tokens, timed, texts = ast.literal_eval(done.stdout)
    assert 3 <= tokens <= 15 and timed and len(texts) == 3
    assert "3/3 prompts" in done.stderr


def test_what_is_left_to_choose_may_be_said_with_none(tmp_path) -> None:
    folder = str(write_checkpoint(tmp_path, "llama"))
    with LLM(folder, max_model_len=None, seed=None, num_gpu_blocks_override=20) as llm:
        assert (llm.config.max_model_len, llm.config.seed) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, a model runs in one engine"),
        ({"tokenizer": "other"}, "tokenizer is `other`"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization is 1.5"),
    ],
)
def test_what_a_script_for_vllm_cannot_have_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LLM("anything", **changes)  # type: ignore[arg-type]
