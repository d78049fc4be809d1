"""`llmctl chat` from the command line: one answer for a script, and what goes to which stream."""

import dataclasses
import io

import pytest

from llmctl.cli import app
from llmctl.cli.commands import chat as command
from llmctl.cli.exits import ExitCode
from llmctl.engine.request import SamplingParams


@pytest.fixture
def engine(monkeypatch, fake_frontend):
    """Let `llmctl chat` get a fake engine with these answers; returns it and the config it was asked for."""

    def arrange(*scripts, **facts):
        frontend = fake_frontend(*scripts, **facts)
        frontend.configs = []

        def launch(console, config):
            frontend.configs.append(config)
            return frontend

        monkeypatch.setattr(command, "_launch", launch)
        return frontend

    return arrange


def test_prompt_option_prints_the_answer_alone(console, engine):
    frontend = engine(["Hel", "lo"])
    assert app.run(["chat", "-m", "tiny", "-p", "hi", "--system", "be brief"], console) == ExitCode.OK
    assert (console.stdout.getvalue(), console.stderr.getvalue()) == ("Hello\n", "")
    assert frontend.asked == [[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]]
    assert frontend.configs[0].model == "tiny"
    assert frontend.closed


def test_whole_stdin_is_one_message(make_console, engine):
    console, frontend = make_console("two\nlines\n"), engine(["ok\n"])
    assert app.run(["chat"], console) == ExitCode.OK
    assert frontend.asked == [[{"role": "user", "content": "two\nlines"}]]
    assert console.stdout.getvalue() == "ok\n"


def test_slash_in_a_piped_message_is_no_command(make_console, engine):
    console, frontend = make_console("/help"), engine(["ok"])
    assert app.run(["chat"], console) == ExitCode.OK
    assert frontend.asked[0][0]["content"] == "/help"


@pytest.mark.parametrize(("line", "stdin"), [(["chat"], " \n"), (["chat", "-p", ""], "x")])
def test_nothing_to_answer_is_an_error_before_the_model_is_loaded(make_console, engine, line, stdin):
    console, frontend = make_console(stdin), engine()
    assert app.run(line, console) == ExitCode.USAGE
    assert "nothing to answer" in console.stderr.getvalue()
    assert frontend.configs == []


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_stdin_that_is_no_utf8_is_an_error_with_a_way_out(make_console, engine, errors):
    stdin = io.TextIOWrapper(io.BytesIO("caf\xe9".encode("latin1")), encoding="utf-8", errors=errors)
    console, frontend = dataclasses.replace(make_console(), stdin=stdin), engine()
    assert app.run(["chat"], console) == ExitCode.USAGE
    assert (
        "stdin is not UTF-8 text: it has the byte 0xe9\n\nhint: convert it, as in `iconv" in console.stderr.getvalue()
    )
    assert frontend.configs == []


@pytest.mark.parametrize(("option", "other"), [("--prompt", []), ("--system", ["-p", "hi"])])
def test_an_option_that_is_no_utf8_names_itself(console, engine, option, other):
    frontend = engine()
    assert app.run(["chat", option, "caf\udce9", *other], console) == ExitCode.USAGE
    assert f"`{option}` is not UTF-8 text: it has the byte 0xe9" in console.stderr.getvalue()
    assert frontend.configs == []


def test_prompt_longer_than_the_context_has_its_exit_code(console, engine):
    frontend = engine(["x"], max_model_len=3)
    assert app.run(["chat", "-p", "one two three four"], console) == ExitCode.CAPACITY
    assert "the context holds 3" in console.stderr.getvalue()
    assert frontend.closed


def test_interrupted_answer_keeps_what_was_written_and_ends_with_130(console, engine):
    frontend = engine(["Hel", KeyboardInterrupt()])
    assert app.run(["chat", "-p", "hi"], console) == ExitCode.INTERRUPTED
    assert console.stdout.getvalue() == "Hel\n"
    assert (frontend.aborted, frontend.closed) == (1, True)


def test_status_is_shown_only_where_someone_reads_it(make_console, engine):
    console = make_console(tty=("stderr",))
    engine(["Hello"])
    app.run(["chat", "-p", "hi"], console)
    assert "1 token |" in console.stderr.getvalue() and console.stdout.getvalue() == "Hello\n"


def test_piped_answer_is_left_as_the_model_gave_it(console, engine):
    engine(["a\x1b[1mb"])
    app.run(["chat", "-p", "hi"], console)
    assert console.stdout.getvalue() == "a\x1b[1mb\n"


def test_interactive_chat_greets_and_takes_lines(make_console, engine, monkeypatch, tmp_path):
    monkeypatch.setenv("LLMCTL_CACHE", str(tmp_path))
    lines = iter(["hi", "/exit"])
    monkeypatch.setattr(command, "line_editor", lambda history: lambda: next(lines))
    console, frontend = make_console(tty=("stdin", "stdout", "stderr")), engine(["Hello"])
    assert app.run(["chat", "--temperature", "0.3", "--seed", "4"], console) == ExitCode.OK
    assert "temperature 0.3" in console.stderr.getvalue()
    assert "Hello" in console.stdout.getvalue()
    assert frontend.sampled[0].seed == 4


def test_sampling_that_cannot_work_is_refused(console, engine):
    frontend = engine()
    assert app.run(["chat", "-p", "hi", "--top-p", "2"], console) == ExitCode.USAGE
    assert "`top_p` is 2.0" in console.stderr.getvalue()
    assert frontend.closed


def test_model_that_recommends_nothing_is_sampled_mildly():
    chosen = command.chat_defaults(SamplingParams())
    assert (chosen.temperature, chosen.top_p, chosen.max_tokens) == (0.7, 0.9, None)


def test_recommendations_of_the_model_win():
    chosen = command.chat_defaults(SamplingParams(temperature=0.6, top_k=20))
    assert chosen == SamplingParams(temperature=0.6, top_k=20, max_tokens=None)
