"""The error boundary: every way to end has its words and its exit code."""

import io
import os
import subprocess
import sys

import pytest

from llmctl.cli import app
from llmctl.cli.exits import ExitCode, exit_code
from llmctl.kernels import errors


@pytest.fixture
def fail_with(monkeypatch):
    """Make `llmctl chat` raise something at the point where it would load a model."""

    def arrange(error):
        def launch(console, config):
            raise error

        monkeypatch.setattr("llmctl.cli.commands.chat._launch", launch)

    return arrange


def stderr(console):
    return console.stderr.getvalue()


def test_version_goes_to_stdout(console):
    assert app.run(["--version"], console) == ExitCode.OK
    assert console.stdout.getvalue().startswith("llmctl 0.")


def test_no_command_shows_help_and_is_a_usage_error(console, capsys):
    assert app.run([], console) == ExitCode.USAGE
    assert "Usage: llmctl" in capsys.readouterr().out


def test_misspelt_command_names_the_nearest(console):
    assert app.run(["chta"], console) == ExitCode.USAGE
    assert stderr(console) == "error: no such command `chta`\n\nhint: did you mean `chat`?\n"


def test_misspelt_subcommand_names_the_nearest(console):
    assert app.run(["models", "lits"], console) == ExitCode.USAGE
    assert "did you mean `list`?" in stderr(console)


def test_misspelt_option_names_the_nearest(console):
    assert app.run(["chat", "--max-modle-len", "3"], console) == ExitCode.USAGE
    assert "no such option `--max-modle-len`" in stderr(console)
    assert "did you mean `--max-model-len`?" in stderr(console)


def test_unknown_option_with_no_neighbour_points_to_the_help(console):
    assert app.run(["chat", "--zzz"], console) == ExitCode.USAGE
    assert "hint: see `llmctl chat --help`" in stderr(console)


def test_value_that_cannot_be_read_says_what_could(console):
    assert app.run(["chat", "--max-model-len", "3x"], console) == ExitCode.USAGE
    assert "`3x` is not a count such as 4096" in stderr(console)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.UsageError, 2),
        (errors.CheckpointError, 3),
        (errors.UnsupportedModel, 4),
        (errors.NoKernel, 4),
        (errors.CapacityError, 5),
        (errors.EngineDead, 6),
        (errors.LlmctlError, 1),
    ],
)
def test_each_kind_of_error_has_its_code_message_and_hint(console, fail_with, kind, code):
    fail_with(kind("needs 5 of [x], 3 free", "lower `--y`"))
    assert app.run(["chat", "-p", "hi"], console) == code == exit_code(kind("x"))
    assert stderr(console) == "error: needs 5 of [x], 3 free\n\nhint: lower `--y`\n"
    assert console.stdout.getvalue() == ""


def test_error_without_a_hint_is_one_line(console, fail_with):
    fail_with(errors.LlmctlError("it broke"))
    app.run(["chat", "-p", "hi"], console)
    assert stderr(console) == "error: it broke\n"


@pytest.mark.parametrize("line", [["--debug", "chat", "-p", "hi"], ["chat", "-p", "hi", "--debug"]])
def test_debug_anywhere_shows_the_traceback(console, fail_with, line):
    fail_with(errors.LlmctlError("it broke"))
    app.run(line, console)
    assert "Traceback" in stderr(console) and "error: it broke" in stderr(console)


def test_bug_is_reported_without_a_traceback(console, fail_with):
    fail_with(ZeroDivisionError("division by zero"))
    assert app.run(["chat", "-p", "hi"], console) == ExitCode.FAILURE
    assert "error: ZeroDivisionError: division by zero" in stderr(console)
    assert "--debug" in stderr(console) and "Traceback" not in stderr(console)


def test_ctrl_c_ends_with_130(console, fail_with):
    fail_with(KeyboardInterrupt())
    assert app.run(["chat", "-p", "hi"], console) == ExitCode.INTERRUPTED
    assert "Traceback" not in stderr(console)


def test_reader_that_went_away_is_no_error(console, fail_with):
    fail_with(BrokenPipeError())
    assert app.run(["chat", "-p", "hi"], console) == ExitCode.PIPE
    assert stderr(console) == ""


def test_pipe_closed_early_ends_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "llmctl", "--version"], stdout=writer, stderr=subprocess.PIPE, cwd="/", timeout=60
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (ExitCode.PIPE, b"")


def test_colour_codes_appear_only_on_a_colour_terminal(make_console, fail_with):
    fail_with(errors.LlmctlError("it broke"))
    plain = make_console(tty=("stdin", "stdout", "stderr"))
    app.run(["chat", "-p", "hi"], plain)
    assert "\x1b[31m" not in stderr(plain) and "\x1b[1;31m" not in stderr(plain)


def test_no_color_and_dumb_terminals_switch_colour_off(monkeypatch):
    from llmctl.cli.console import terminal

    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.StringIO())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert terminal().color
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal().color
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not terminal().color
