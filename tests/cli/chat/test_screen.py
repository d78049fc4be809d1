"""The line editor on a pipe, and the words under an answer."""

import pytest
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from llmctl.cli.chat.conversation import Answer
from llmctl.cli.chat.screen import describe, line_editor, status
from llmctl.engine.request import FinishReason, SamplingParams


@pytest.fixture
def type_in(tmp_path):
    """What the editor returns for these keys."""

    def run(keys, reads=1):
        with create_pipe_input() as pipe:
            pipe.send_text(keys)
            read = line_editor(tmp_path / "new" / "history", pipe, DummyOutput())
            return [read() for _ in range(reads)]

    return run


def test_enter_sends(type_in):
    assert type_in("hello\r") == ["hello"]


def test_alt_enter_makes_a_second_line(type_in):
    assert type_in("one\x1b\rtwo\r") == ["one\ntwo"]


def test_ctrl_c_clears_what_was_typed(type_in):
    assert type_in("wrong\x03right\r") == ["right"]


def test_ctrl_c_on_an_empty_line_is_raised(type_in):
    with pytest.raises(KeyboardInterrupt):
        type_in("\x03")


def test_ctrl_d_on_an_empty_line_ends(type_in):
    with pytest.raises(EOFError):
        type_in("\x04")


def test_history_survives_and_up_brings_it_back(type_in):
    assert type_in("first\r") == ["first"]
    assert type_in("\x1b[A\r") == ["first"]


def answer(**changes):
    facts = {
        "text": "x",
        "finish": FinishReason.STOP,
        "prompt_tokens": 30,
        "cached_tokens": 20,
        "tokens": 11,
        "first_token_s": 0.25,
        "decode_s": 2.0,
    }
    return Answer(**(facts | changes))


def test_status_line():
    text = "11 tokens | 5.0 tokens/s | first after 0.25 s | 20 of 30 prompt tokens cached | 59 left"
    assert status(answer(), 100) == text


def test_status_says_why_an_answer_ended_early():
    stopped = status(answer(finish=None, cached_tokens=None), 100)
    assert stopped.endswith("stopped") and "cached" not in stopped
    assert status(answer(finish=FinishReason.LENGTH), 100).endswith("cut at the token limit")
    assert status(answer(finish=FinishReason.LENGTH), 41).endswith("cut at the end of the context")


def test_one_token_has_no_speed():
    assert "tokens/s" not in status(answer(tokens=1, decode_s=0.0), 100)


def test_sampling_in_words():
    assert describe(SamplingParams(temperature=0, max_tokens=None)).startswith("greedy")
    text = describe(SamplingParams(temperature=0.7, top_p=0.9, top_k=40, seed=1, max_tokens=5, stop=("\n",)))
    assert text == "temperature 0.7, top_p 0.9, top_k 40, seed 1, at most 5 tokens, stop '\\n'"
