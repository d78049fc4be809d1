"""A turn: what is asked, what is measured, and how it ends."""

import types

import pytest

from llmctl.cli.chat.conversation import Conversation, ask
from llmctl.engine.request import FinishReason, SamplingParams
from llmctl.kernels.errors import EngineDead, LlmctlError


def test_messages_begin_with_the_system_prompt_and_end_with_the_question():
    conversation = Conversation("be brief")
    conversation.add("one", "two")
    assert conversation.messages("three") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    conversation.reset()
    assert conversation.messages("x") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "x"},
    ]


def test_answer_is_written_as_it_comes_and_counted(fake_frontend):
    frontend, written = fake_frontend(["Hel", "lo", "!"]), []
    ticks = iter([10.0, 10.5, 11.0, 12.5])
    answer = ask(frontend, [{"role": "user", "content": "hi"}], SamplingParams(), written.append, lambda: next(ticks))
    assert written == ["Hel", "lo", "!"]
    assert (answer.text, answer.finish) == ("Hello!", FinishReason.STOP)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.tokens) == (2, 3, 3)
    assert (answer.first_token_s, answer.decode_s, answer.tokens_per_s) == (0.5, 2.0, 1.0)
    assert frontend.aborted == 0


def test_ctrl_c_while_waiting_keeps_the_partial_answer_and_aborts(fake_frontend):
    frontend = fake_frontend(["Hel", "lo", KeyboardInterrupt()])
    answer = ask(frontend, [{"role": "user", "content": "hi"}], SamplingParams(), lambda text: None)
    assert (answer.text, answer.finish, answer.tokens, answer.cached_tokens) == ("Hello", None, 2, None)
    assert frontend.aborted == 1


def test_ctrl_c_while_writing_aborts_too(fake_frontend):
    frontend = fake_frontend(["Hel", "lo", "!"])

    def write(text):
        if text == "lo":
            raise KeyboardInterrupt

    answer = ask(frontend, [{"role": "user", "content": "hi"}], SamplingParams(), write)
    assert (answer.text, answer.finish) == ("Hello", None)
    assert frontend.aborted == 1


@pytest.mark.parametrize("failure", [None, EngineDead("the engine stopped")])
def test_failure_is_raised_as_what_it_is(fake_frontend, monkeypatch, failure):
    frontend = fake_frontend()
    frontend.client.failure = failure

    def broken(prompt, sampling):
        yield types.SimpleNamespace(text="", tokens=(), usage=None, finish=FinishReason.ERROR, error="logits are NaN")

    monkeypatch.setattr(frontend, "stream", broken)
    with pytest.raises(type(failure or LlmctlError(""))) as caught:
        ask(frontend, [{"role": "user", "content": "hi"}], SamplingParams(), lambda text: None)
    assert caught.value.message == ("the engine stopped" if failure else "logits are NaN")
