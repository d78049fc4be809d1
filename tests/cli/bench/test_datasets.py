"""Workloads are the same for the same seed, as long as was asked, and clear about files that are broken."""

import json
from pathlib import Path

import pytest

from llmctl.cli.bench import longtext
from llmctl.cli.bench.build import Asked
from llmctl.cli.bench.dataset_options import DEFAULTS, WorkloadOptions, check
from llmctl.cli.bench.datasets import build
from llmctl.engine.config import Environment
from llmctl.engine.load.progress import silent
from llmctl.kernels.errors import CapacityError, UsageError


@pytest.fixture
def make(tmp_path, tokenizer, monkeypatch):
    """A workload; without `texts` PG-19 cannot be reached. `content` becomes the dataset's file."""
    monkeypatch.setattr(longtext, "fetch_pg19", lambda folder: "no network")
    monkeypatch.setattr(longtext, "ENOUGH_CHARACTERS", 50_000)

    def go(dataset, content=None, *, chat=False, context=400, with_tokenizer=True, **options):
        path = None
        if content is not None:
            path = tmp_path / "data"
            path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
        asked = WorkloadOptions(dataset, path, **options)
        check(asked)
        environment = Environment("", tmp_path / "cache", False)
        return build(asked, Asked(tokenizer if with_tokenizer else None, chat, context), environment, silent)

    return go


def lengths(workload):
    return [len(item.prompt) for item in workload.items]


MADE = ("synthetic", "random", "copy", "pg19")


@pytest.mark.parametrize("dataset", MADE)
def test_same_seed_asks_the_same_and_another_one_does_not(make, dataset):
    options = {"num_prompts": 3, "prompt_tokens": 40, "output_tokens": 5, "range_ratio": 0.5}
    assert make(dataset, seed=1, **options).digest == make(dataset, seed=1, **options).digest
    assert make(dataset, seed=1, **options).digest != make(dataset, seed=2, **options).digest


@pytest.mark.parametrize("dataset", MADE)
def test_prompts_have_exactly_the_length_that_was_asked_for(make, dataset):
    workload = make(dataset, num_prompts=4, prompt_tokens=77, output_tokens=9)
    assert lengths(workload) == [77] * 4 and {item.max_tokens for item in workload.items} == {9}
    assert len({item.prompt for item in workload.items}) == 4
    assert (
        workload.ignore_eos
        and make(dataset, num_prompts=1, prompt_tokens=9, output_tokens=4, ignore_eos=False).ignore_eos is False
    )


@pytest.mark.parametrize("dataset", MADE)
def test_lengths_vary_within_the_ratio(make, dataset):
    workload = make(dataset, num_prompts=40, prompt_tokens=50, output_tokens=10, range_ratio=0.4)
    assert set(lengths(workload)) <= set(range(30, 71)) and len(set(lengths(workload))) > 5
    assert {item.max_tokens for item in workload.items} <= set(range(6, 15))


def test_defaults_are_those_of_the_dataset(make):
    assert lengths(make("random")) == [DEFAULTS["random"].prompt_tokens] * DEFAULTS["random"].num_prompts


def test_a_copy_is_begun_in_the_prompt_and_its_rest_is_as_long_as_the_answer(make):
    (item,) = make("copy", num_prompts=1, prompt_tokens=100, output_tokens=40).items
    assert item.prompt[:30] == item.prompt[70:] and item.prompt[30:70] != item.prompt[:40]
    text = make("copy", num_prompts=1, prompt_tokens=100, output_tokens=40, with_tokenizer=False).items[0].prompt
    words = text.split(" ")
    assert len(words) == 100 and words[:30] == words[70:]
    with pytest.raises(UsageError, match="has its answer in the prompt"):
        make("copy", prompt_tokens=40, output_tokens=40)
    with pytest.raises(UsageError, match="a chat endpoint does not"):
        make("copy", chat=True)


def test_random_ids_are_never_special(make):
    workload = make("random", num_prompts=5, prompt_tokens=200)
    assert min(token for item in workload.items for token in item.prompt) >= 3


def test_a_chat_endpoint_gets_conversations_of_the_same_text(make, tokenizer):
    (item,) = make("synthetic", chat=True, num_prompts=1, prompt_tokens=50).items
    (message,) = item.prompt
    assert message["role"] == "user" and len(tokenizer.encode(message["content"])) == 50
    with pytest.raises(UsageError, match="token ids, which a chat endpoint does not take"):
        make("random", chat=True)


def test_without_a_tokenizer_there_are_texts_and_a_note(make):
    for dataset in ("synthetic", "pg19"):
        workload = make(dataset, with_tokenizer=False, num_prompts=2, prompt_tokens=30)
        assert all(isinstance(item.prompt, str) for item in workload.items)
        assert "no tokenizer was named: prompt lengths are approximate" in workload.notes
    with pytest.raises(UsageError, match="sends token ids"):
        make("random", with_tokenizer=False)


@pytest.mark.parametrize("dataset", MADE)
def test_a_length_that_was_asked_for_and_does_not_fit_is_an_error(make, dataset):
    with pytest.raises(CapacityError, match="do not fit the context of 400") as error:
        make(dataset, prompt_tokens=390, output_tokens=20)
    assert "lower --prompt-tokens to 380" in error.value.hint
    make(dataset, num_prompts=1, prompt_tokens=380, output_tokens=20)


def test_pg19_without_a_length_takes_what_the_model_does_and_says_so(make):
    workload = make("pg19", context=300)
    assert lengths(workload) == [300 - 64] * 3
    assert workload.notes == ("prompts have 236 tokens because the model's context is 300",)
    assert lengths(make("pg19", context=0, num_prompts=1)) == [5000], "a server's context may not be known"


def test_pg19_that_cannot_be_reached_says_what_stands_in(make):
    workload = make("pg19", num_prompts=1, prompt_tokens=20)
    assert workload.stand_in and "standing in for PG-19 (no network)" in workload.source


def test_pg19_from_a_folder_takes_stretches_of_every_text(make, tmp_path, tokenizer):
    for name, letter in (("a.txt", "a"), ("b.txt", "b")):
        (tmp_path / name).write_text(letter * 600 + "\n\n" + letter * 600)
    asked = WorkloadOptions("pg19", tmp_path, num_prompts=2, prompt_tokens=50, output_tokens=5)
    workload = build(asked, Asked(tokenizer, False, 0), Environment("", tmp_path, False), silent)
    texts = [tokenizer.decode(item.prompt).strip() for item in workload.items]
    assert [set(text) - {"\n"} for text in texts] == [{"a"}, {"b"}]
    assert not workload.stand_in and workload.source == f"texts in {tmp_path}"


@pytest.mark.parametrize("chat", [False, True])
def test_texts_shorter_than_a_prompt_run_on_into_others_and_none_is_repeated(tmp_path, tokenizer, chat):
    for letter in "abc":
        (tmp_path / f"{letter}.txt").write_text(letter * 100)

    def ask(tokens, known):
        asked = WorkloadOptions("pg19", tmp_path, num_prompts=3, prompt_tokens=tokens, output_tokens=5)
        return build(asked, Asked(known, chat, 0), Environment("", tmp_path, False), silent)

    for item in ask(300, tokenizer).items:
        text = item.prompt[0]["content"] if chat else tokenizer.decode(item.prompt)
        assert all(text.count(letter) <= 100 for letter in "abc") and len(text) >= 299
    with pytest.raises(UsageError, match=r"the texts in `.*` hold 30\d tokens, 512 are needed") as error:
        ask(512, tokenizer)
    assert "lower --prompt-tokens" in error.value.hint
    with pytest.raises(UsageError, match=r"hold about 7\d tokens, 100 are needed"):
        ask(100, None)


def test_a_stand_in_that_is_too_short_for_the_prompt_is_not_repeated_either(make, monkeypatch):
    monkeypatch.setattr(longtext, "python_documentation", lambda: ("a few words",))
    with pytest.raises(UsageError, match=r"Python .* documentation, standing in .* holds 1\d tokens, 300 are needed"):
        make("pg19", num_prompts=1, prompt_tokens=300)


def test_jsonl_takes_texts_ids_and_conversations(make, tokenizer):
    lines = [
        {"prompt": "hello", "max_tokens": 3},
        {"prompt_token_ids": [5, 6, 7], "prompt": "ignored", "output_tokens": 4},
        {"prompt": [8, 9]},
        {"text": "bye"},
        {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 5},
    ]
    workload = make("jsonl", "\n\n".join(map(json.dumps, lines)))
    assert [item.max_tokens for item in workload.items] == [3, 4, 128, 128, 5]
    assert workload.items[0].prompt == tuple(tokenizer.encode("hello"))
    assert [workload.items[i].prompt for i in (1, 2)] == [(5, 6, 7), (8, 9)]
    assert workload.items[4].prompt == tuple(tokenizer.encode_chat([{"role": "user", "content": "hi"}]))
    assert not workload.ignore_eos
    assert [item.max_tokens for item in make("jsonl", json.dumps(lines[0]), output_tokens=9).items] == [9]
    chat = make("jsonl", json.dumps(lines[4]), chat=True)
    assert chat.items[0].prompt == ({"role": "user", "content": "hi"},)
    assert len(make("jsonl", "\n".join(map(json.dumps, lines)), num_prompts=2).items) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{oops", "line 1 of .* is no JSON: .* at line 1, column 2"),
        ('{"prompt": "a"}\n[1]', "line 2 of .* is no JSON object"),
        ("{}", "line 1 of .* must have one of `prompt`"),
        ('{"prompt": "a", "text": "b"}', "must have one of"),
        ('{"prompt": ""}', "`prompt` is neither text nor token ids nor messages, or it is empty"),
        ('{"prompt": [1, "x"]}', "`prompt` is neither text"),
        ('{"prompt": [true]}', "`prompt` is neither text"),
        ('{"messages": "hi"}', "`messages` is neither text"),
        ('{"messages": [{"role": "user"}]}', "`messages` is neither text"),
        ('{"prompt": "a", "max_tokens": 0}', "the length of the answer is 0"),
        ('{"prompt": "a", "max_tokens": "5"}', "the length of the answer is '5'"),
        ("", "has 0 prompts"),
        ("\n\n", "has 0 prompts"),
    ],
)
def test_broken_lines_of_a_jsonl_file_are_named(make, content, message):
    with pytest.raises(UsageError, match=message):
        make("jsonl", content)


def test_jsonl_lines_that_do_not_fit_and_prompts_that_are_not_there_are_errors(make):
    with pytest.raises(CapacityError, match="line 1 of .* needs 405 tokens with its answer, the context holds 400"):
        make("jsonl", json.dumps({"prompt_token_ids": [5] * 400, "max_tokens": 5}))
    with pytest.raises(UsageError, match="has 1 prompts, 2 were asked for"):
        make("jsonl", '{"prompt": "a"}', num_prompts=2)
    with pytest.raises(UsageError, match="which a chat endpoint does not take"):
        make("jsonl", '{"prompt": [1, 2]}', chat=True)
    with pytest.raises(UsageError, match="need the model's chat template"):
        make("jsonl", '{"messages": [{"role": "user", "content": "a"}]}', with_tokenizer=False)


def talk(question, answer):
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


def test_sharegpt_takes_first_questions_and_the_lengths_of_their_answers(make, tokenizer):
    content = [talk("one", "12345"), talk("two", "1234567"), {"conversations": []}, {"other": 1}, talk(" ", "x")]
    content.append({"conversations": [{"from": "gpt", "value": "x"}, {"from": "human", "value": "y"}]})
    found = {(tokenizer.decode(item.prompt), item.max_tokens) for item in make("sharegpt", content).items}
    assert found == {("one", 5), ("two", 7)}
    assert {item.max_tokens for item in make("sharegpt", content, output_tokens=3).items} == {3}


def test_sharegpt_conversations_come_in_an_order_by_seed_and_those_that_do_not_fit_are_counted(make):
    content = [talk(f"question {i}", "x" * 10) for i in range(50)] + [talk("q" * 500, "x")] * 3
    assert make("sharegpt", content, seed=1).digest == make("sharegpt", content, seed=1).digest
    assert make("sharegpt", content, seed=1).digest != make("sharegpt", content, seed=2).digest
    long_ones_first = [talk("q" * 500, "x")] * 3 + [talk("q", "x")]
    assert make("sharegpt", long_ones_first).notes == ("3 conversations do not fit the context and were passed over",)
    with pytest.raises(UsageError, match="has 50 conversations that fit, 51 were asked for"):
        make("sharegpt", content, num_prompts=51)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1,", "is no JSON"),
        ({"a": 1}, "is no list of conversations"),
        ([], "none of the 0 entries"),
        ([{"conversations": [{"from": "human", "value": 5}]}], "none of the 1 entries"),
    ],
)
def test_broken_sharegpt_files_are_named(make, content, message):
    with pytest.raises(UsageError, match=message):
        make("sharegpt", content)


def test_sharegpt_with_nothing_that_fits_is_an_error(make):
    with pytest.raises(CapacityError, match="none of the conversations"):
        make("sharegpt", [talk("q" * 500, "x")])


@pytest.mark.parametrize("dataset", ["jsonl", "sharegpt"])
def test_files_that_cannot_be_read_are_named(dataset, tmp_path, tokenizer):
    (tmp_path / "latin").write_bytes(b"\xff\xfe\x00caf\xe9")
    for path in (tmp_path / "none", tmp_path, tmp_path / "latin"):
        with pytest.raises(UsageError, match=f"cannot read `{path}`"):
            build(
                WorkloadOptions(dataset, path),
                Asked(tokenizer, False, 0),
                Environment("", tmp_path, False),
                silent,
            )


@pytest.mark.parametrize(
    "options",
    [
        WorkloadOptions("pg91"),
        WorkloadOptions("jsonl"),
        WorkloadOptions("random", Path("x")),
        WorkloadOptions("jsonl", Path("x"), prompt_tokens=5),
        WorkloadOptions(range_ratio=1.0),
        WorkloadOptions(num_prompts=0),
        WorkloadOptions(num_prompts=99_999_999_999),
        WorkloadOptions(prompt_tokens=1_000_001),
        WorkloadOptions(output_tokens=1_000_001),
        WorkloadOptions(output_tokens=0),
    ],
)
def test_options_that_cannot_work_are_refused(options):
    with pytest.raises(UsageError):
        check(options)
