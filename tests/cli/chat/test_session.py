"""An interactive chat, driven line by line."""

import signal

import pytest

from llmctl.cli.chat import session
from llmctl.cli.chat.conversation import Conversation, ask
from llmctl.cli.chat.session import talk
from llmctl.engine.request import SamplingParams
from llmctl.kernels.errors import EngineDead, LlmctlError


def chat(console, frontend, *lines, system=""):
    """Type the lines (or raise the exceptions among them), then Ctrl-D; returns the conversation."""
    script = iter(lines)

    def read():
        line = next(script, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    conversation = Conversation(system)
    talk(console, frontend, conversation, SamplingParams(), read)
    assert next(script, None) is None, "left before the last line"
    return conversation


def test_second_turn_carries_the_first(console, fake_frontend):
    frontend = fake_frontend(["Hello"], ["Fine"])
    chat(console, frontend, "hi", "how are you?", system="be kind")
    assert [message["content"] for message in frontend.asked[1]] == ["be kind", "hi", "Hello", "how are you?"]
    assert console.stdout.getvalue() == "Hello\nFine\n"


def test_status_tells_size_cache_and_room(console, fake_frontend):
    chat(console, fake_frontend(["Hel", "lo"]), "hi there")
    line = console.stderr.getvalue()
    assert "2 tokens" in line and "3 of 3 prompt tokens cached" in line and "95 left" in line


def test_stopped_answer_stays_in_the_conversation_and_the_chat_goes_on(console, fake_frontend):
    frontend = fake_frontend(["Once", KeyboardInterrupt()], ["Yes"])
    conversation = chat(console, frontend, "tell me", "go on")
    assert [turn["content"] for turn in conversation.turns] == ["tell me", "Once", "go on", "Yes"]
    assert "stopped" in console.stderr.getvalue()


def test_signal_of_ctrl_c_interrupts_answers_and_nothing_else(console, fake_frontend, monkeypatch):
    handlers = []

    def watch(frontend, messages, sampling, write):
        handlers.append(signal.getsignal(signal.SIGINT))
        return ask(frontend, messages, sampling, write)

    monkeypatch.setattr(session, "ask", watch)
    before = signal.getsignal(signal.SIGINT)
    script = iter(["hi", "/exit"])

    def read():
        handlers.append(signal.getsignal(signal.SIGINT))
        return next(script)

    talk(console, fake_frontend(["a"]), Conversation(), SamplingParams(), read)
    assert handlers == [signal.SIG_IGN, signal.default_int_handler, signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) is before


def test_answer_stopped_before_its_first_word_is_forgotten(console, fake_frontend):
    assert chat(console, fake_frontend([KeyboardInterrupt()]), "tell me").turns == []


def test_message_longer_than_the_context_is_told_and_the_chat_goes_on(console, fake_frontend):
    frontend = fake_frontend(["short"], max_model_len=10)
    conversation = chat(console, frontend, "word " * 50, "hi")
    assert "the context holds 10" in console.stderr.getvalue() and "/reset" in console.stderr.getvalue()
    assert [turn["content"] for turn in conversation.turns] == ["hi", "short"]


def test_commands_change_the_conversation_and_ask_nothing(console, fake_frontend):
    frontend = fake_frontend(["a"], ["b"])
    conversation = chat(console, frontend, "/system Be a pirate.", "hi", "/reset", "/system", "ho", '/system ""')
    assert [message["content"] for message in frontend.asked[1]] == ["Be a pirate.", "ho"]
    assert "system prompt: Be a pirate." in console.stderr.getvalue()
    assert conversation.system == ""


def test_help_shows_commands_and_sampling(console, fake_frontend):
    chat(console, fake_frontend(), "/help")
    assert "/system TEXT" in console.stderr.getvalue() and "temperature 1" in console.stderr.getvalue()


def test_unknown_command_is_told_and_the_chat_goes_on(console, fake_frontend):
    frontend = fake_frontend(["a"])
    chat(console, frontend, "/rest", "hi")
    assert "did you mean `/reset`?" in console.stderr.getvalue()
    assert len(frontend.asked) == 1


def test_blank_lines_are_not_sent(console, fake_frontend):
    frontend = fake_frontend()
    chat(console, frontend, "", "   ")
    assert frontend.asked == []


def test_exit_leaves(console, fake_frontend):
    chat(console, fake_frontend(), "/exit")


def test_ctrl_c_twice_leaves_and_a_line_between_starts_over(console, fake_frontend):
    interrupt = KeyboardInterrupt()
    chat(console, fake_frontend(["a"]), interrupt, "hi", interrupt, interrupt)
    assert console.stderr.getvalue().count("Ctrl-C again") == 2


def test_answer_that_fails_is_told_and_the_chat_goes_on(console, fake_frontend):
    conversation = chat(console, fake_frontend([LlmctlError("logits are NaN")], ["b"]), "hi", "ho")
    assert "error: logits are NaN" in console.stderr.getvalue()
    assert [turn["content"] for turn in conversation.turns] == ["ho", "b"]


def test_dead_engine_ends_the_chat(console, fake_frontend):
    with pytest.raises(EngineDead):
        chat(console, fake_frontend(["a", EngineDead("it died")]), "hi")


def test_escape_sequences_of_the_model_do_not_reach_the_terminal(console, fake_frontend):
    chat(console, fake_frontend(["a\x1b[2Jb\x07\n\tc"]), "hi")
    assert console.stdout.getvalue() == "a[2Jb\n\tc\n"
