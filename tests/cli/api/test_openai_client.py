"""The official client, unmodified, against a real server."""

import openai
import pytest

GREEDY = {"model": "tiny", "temperature": 0}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(server):
    return server.openai()


def text_of(chunks, index=0):
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices if choice.index == index)


def test_a_chat_has_an_answer_and_counts(client):
    answer = client.chat.completions.create(messages=HELLO, max_tokens=12, extra_body={"ignore_eos": True}, **GREEDY)
    choice = answer.choices[0]
    assert (answer.object, answer.model, choice.message.role, choice.finish_reason) == (
        "chat.completion", "tiny", "assistant", "length",
    )  # fmt: skip
    assert answer.id.startswith("chatcmpl-") and answer.system_fingerprint.startswith("llmctl-")
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    again = client.chat.completions.create(messages=HELLO, max_tokens=12, extra_body={"ignore_eos": True}, **GREEDY)
    assert again.choices[0].message.content == choice.message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0


def test_a_stream_is_role_then_text_then_reason_then_usage(client):
    asked = {"messages": HELLO, "max_tokens": 12, **GREEDY}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert text_of(chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [
        *[None] * (len(chunks) - 2),
        whole.choices[0].finish_reason,
    ]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({(chunk.id, chunk.created, chunk.system_fingerprint) for chunk in chunks}) == 1


def test_samples_differ_and_each_streams_to_its_end(client):
    asked = {"model": "tiny", "messages": HELLO, "n": 2, "seed": 7, "max_tokens": 20}
    whole = client.chat.completions.create(**asked)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == [0, 1] and texts[0] != texts[1]
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert [text_of(chunks, index) for index in (0, 1)] == texts
    ends = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(ends) == [0, 1]
    assert whole.usage.prompt_tokens == client.chat.completions.create(**{**asked, "n": 1}).usage.prompt_tokens


def test_logprobs_come_with_exact_bytes(client):
    answer = client.chat.completions.create(messages=HELLO, max_tokens=8, logprobs=True, top_logprobs=3, **GREEDY)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0
        assert len(entry.top_logprobs) == 3
    text = b"".join(bytes(entry.bytes or ()) for entry in entries if not entry.token.startswith("<|"))
    assert text.decode(errors="replace") == answer.choices[0].message.content
    chunks = client.chat.completions.create(
        messages=HELLO, max_tokens=8, logprobs=True, top_logprobs=3, stream=True, **GREEDY
    )
    streamed = [e for chunk in chunks for c in chunk.choices if c.logprobs for e in c.logprobs.content]
    assert streamed == entries


def test_a_stop_string_ends_the_answer_before_it(client):
    asked = {"messages": HELLO, "max_tokens": 40, "extra_body": {"ignore_eos": True}, **GREEDY}
    text = client.chat.completions.create(**asked).choices[0].message.content
    stop = text[10:13]
    first = text.index(stop)
    stopped = client.chat.completions.create(**asked, stop=[stop, "never there"]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (text[:first], "stop")
    assert text_of(list(client.chat.completions.create(**asked, stop=stop, stream=True))) == text[:first]
    asked["extra_body"] = {"ignore_eos": True, "include_stop_str_in_output": True}
    assert client.chat.completions.create(**asked, stop=stop).choices[0].message.content == text[:first] + stop


def test_content_may_come_in_parts_and_the_newer_name_of_system_is_understood(client):
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    answers = []
    for role, content in (("system", "hello"), ("developer", parts)):
        messages = [{"role": role, "content": "be kind"}, {"role": "user", "content": content}]
        answer = client.chat.completions.create(messages=messages, max_tokens=6, **GREEDY)
        answers.append(answer.choices[0].message.content)
    assert answers[0] == answers[1]


def test_an_answer_can_be_sent_back_as_it_came(client):
    message = client.chat.completions.create(messages=HELLO, max_tokens=4, **GREEDY).choices[0].message
    history = [*HELLO, message.model_dump(), {"role": "user", "content": "go on"}]
    assert client.chat.completions.create(messages=history, max_tokens=4, **GREEDY).usage.completion_tokens > 0


def test_completions_take_texts_and_token_ids_alone_or_many(client):
    asked = {"max_tokens": 6, "extra_body": {"ignore_eos": True}, **GREEDY}
    alone = [client.completions.create(prompt=text, **asked) for text in ("ab", "cde")]
    texts = [answer.choices[0].text for answer in alone]
    both = client.completions.create(prompt=["ab", "cde"], **asked)
    assert [choice.text for choice in both.choices] == texts
    assert both.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)
    ids = client.completions.create(
        prompt="ab", **{**asked, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    )
    prompt = ids.choices[0].prompt_token_ids
    assert len(ids.choices[0].token_ids) == 6
    assert client.completions.create(prompt=prompt, **asked).choices[0].text == texts[0]
    twice = client.completions.create(prompt=[prompt, prompt], n=2, **asked)
    assert [choice.index for choice in twice.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in twice.choices} == {texts[0]}


def test_a_completion_can_echo_and_has_parallel_lists_of_logprobs(client):
    asked = {"prompt": "ab", "max_tokens": 5, "extra_body": {"ignore_eos": True}, **GREEDY}
    text = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked, echo=True).choices[0].text == "ab" + text
    streamed = client.completions.create(**asked, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "ab" + text
    assert client.completions.create(**{**asked, "max_tokens": 0}, echo=True).choices[0].text == "ab"
    logprobs = client.completions.create(**asked, logprobs=2).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 5
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values())


def test_the_default_of_a_completion_is_sixteen_tokens_and_of_a_chat_what_fits(client):
    asked = {"extra_body": {"ignore_eos": True}, **GREEDY}
    assert client.completions.create(prompt="ab", **asked).usage.completion_tokens == 16
    assert client.chat.completions.create(messages=HELLO, **asked).usage.total_tokens == 256


def test_a_model_that_is_not_served_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4o", messages=HELLO)
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    assert "`tiny`" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_says_by_how_much(client, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=[{"role": "user", "content": "x" * 300}], stream=stream, **GREEDY)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"
    assert "the context holds 256" in caught.value.message
    with pytest.raises(openai.BadRequestError, match="set max_tokens to"):
        client.completions.create(prompt="ab", max_tokens=300, stream=stream, **GREEDY)


def test_models_are_listed(client):
    listed = client.models.list().data
    assert [model.id for model in listed] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 256


def test_a_seed_repeats_and_no_seed_does_not(client):
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    texts = [client.chat.completions.create(**asked, **seed).choices[0].message.content
             for seed in ({"seed": 5}, {"seed": 5}, {}, {})]  # fmt: skip
    assert texts[0] == texts[1] and len(set(texts)) == 3
