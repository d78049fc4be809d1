"""Ctrl-C at any moment of a start ends it with 130 and without a word."""

import subprocess
import sys

import pytest

from llmctl.cli.exits import ExitCode
from llmctl.cli.start import _will_serve

# A finder that is asked for every module before the real ones, and presses Ctrl-C at one of them.
START = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            {press}
sys.meta_path.insert(0, Finder())
{first}
sys.argv = ["llmctl", {command!r}]
from llmctl.cli.exits import ExitCode
from llmctl.cli.start import main
main()
"""
PRESS = "os.kill(os.getpid(), signal.SIGINT)"
PRESS_IN_A_CALLBACK = "type('Dropped', (), {'__del__': lambda self: os.kill(os.getpid(), signal.SIGINT) or bool(1)})()"


def start(module, press=PRESS, command="doctor", first=""):
    code = START.format(module=module, press=press, command=command, first=first)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, cwd="/", timeout=60)


@pytest.mark.parametrize("module", ["llmctl.cli.app", "typer", "llmctl.cli.console"])
@pytest.mark.parametrize("command", ["chat", "bench", "--version"])
def test_ctrl_c_while_the_command_line_is_imported_is_quiet(module, command):
    done = start(module, command=command)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


@pytest.mark.parametrize("module", ["llmctl.cli.commands.doctor", "llmctl.cli.diagnosis"])
def test_ctrl_c_while_a_command_and_what_it_needs_are_imported_shows_no_traceback(module):
    done = start(module)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"interrupted\n")


def test_ctrl_c_that_the_interpreter_would_drop_is_obeyed():
    done = start("llmctl.cli.diagnosis", PRESS_IN_A_CALLBACK)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_a_thread_that_never_ends_does_not_keep_the_command_from_ending():
    first = (
        "import atexit, threading; atexit.register(print, 'done at exit'); "
        "threading.Thread(target=threading.Event().wait).start()"
    )
    done = start("nothing", command="--version", first=first)
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 0 and lines[0].startswith("llmctl ") and lines[1:] == ["done at exit"]


def test_ctrl_c_stays_ignored_where_the_shell_ignores_it():
    done = start("llmctl.cli.app", command="--version", first="signal.signal(signal.SIGINT, signal.SIG_IGN)")
    assert done.returncode == 0 and done.stdout.startswith(b"llmctl ")


@pytest.mark.parametrize("closed", ["<&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_server_that_was_started_without_standard_streams_ends_as_any_other(closed):
    line = [sys.executable, "-m", "llmctl", "serve", "/no/such/model", "--port", "0"]
    done = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *line], capture_output=True, text=True, timeout=60)
    said = "" if "2>&-" in closed else "error: there is no model `/no/such/model`"
    assert (done.returncode, done.stdout, done.stderr.partition("\n")[0]) == (2, "", said)


@pytest.mark.parametrize("limit", [12, 16, 20, 40])
def test_a_server_that_may_open_too_few_files_says_so(limit):
    line = [sys.executable, "-m", "llmctl", "serve", "/no/such/model", "--port", "0"]
    done = subprocess.run(
        ["sh", "-c", f'ulimit -n {limit}; "$@"', "sh", *line], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == ExitCode.CAPACITY
    assert f"and may have {limit}\n" in done.stderr and "`ulimit -n 1024`" in done.stderr


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("serve", True),
        ("--debug serve model --port 0", True),
        ("serve model --help", False),
        ("serve --print-command", False),
        ("chat serve", False),
        ("--help", False),
        ("", False),
    ],
)
def test_a_worker_is_wanted_early_for_a_command_line_that_will_serve(line, expected):
    assert _will_serve(line.split()) is expected
