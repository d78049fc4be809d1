"""What happens when stdout cannot take what a command prints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from llmctl.cli.exits import ExitCode
from tests.engine.tiny import write_checkpoint

COMMANDS = [
    ["--help"],
    [],
    ["doctor"],
    ["doctor", "--json"],
    ["plan", "{model}"],
    ["models", "list", "--json"],
    ["chat", "{model}", "-p", "hi", "--max-tokens", "2", "--num-gpu-blocks-override", "20"],
    ["bench", "{model}", "--num-prompts", "1", "--prompt-tokens", "9", "--output-tokens", "2", "--rounds", "1"],
]
full_device = pytest.mark.skipif(not Path("/dev/full").exists(), reason="the machine has no /dev/full")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


def run(line, model, stdout, **environment):
    command = [sys.executable, "-m", "llmctl", *(word.format(model=model) for word in line)]
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, cwd="/", text=True,
        env=os.environ | environment, timeout=300,
    )  # fmt: skip


@pytest.mark.parametrize("line", COMMANDS, ids=" ".join)
def test_a_pipe_whose_reader_left_ends_every_command_quietly(line, model):
    reader, writer = os.pipe()
    os.close(reader)
    done = run(line, model, writer)
    os.close(writer)
    assert done.returncode == ExitCode.PIPE
    assert "Error" not in done.stderr and "error" not in done.stderr and "Traceback" not in done.stderr


@full_device
@pytest.mark.parametrize("line", COMMANDS, ids=" ".join)
def test_a_full_disk_is_an_error_about_the_output(line, model):
    with open("/dev/full", "w") as full:
        done = run(line, model, full)
    assert done.returncode == ExitCode.FAILURE
    assert "error: cannot write the output: No space left on device\n\nhint: send it elsewhere" in done.stderr
    assert "bug" not in done.stderr and "Exception" not in done.stderr


@full_device
def test_an_unbuffered_stdout_fails_in_the_same_words(model):
    with open("/dev/full", "w") as full:
        done = run(["models", "list"], model, full, PYTHONUNBUFFERED="1")
    assert done.returncode == ExitCode.FAILURE
    assert "cannot write the output: No space left on device" in done.stderr


@full_device
def test_stderr_that_takes_nothing_changes_no_exit_code(model):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "llmctl", "chat", "--zzz"]
        assert subprocess.run(command, stderr=full, cwd="/").returncode == ExitCode.USAGE


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_a_stream_that_was_closed_is_no_error(closed):
    done = subprocess.run(
        ["sh", "-c", f'"{sys.executable}" -m llmctl --version {closed}'], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == ExitCode.OK and done.stderr == ""


def test_a_character_that_the_output_cannot_show_is_named():
    code = (
        "from llmctl.cli.console import terminal\nfrom llmctl.cli.output import OutputError\n"
        "try:\n    terminal().data('caf\\xe9 \\u03c0')\nexcept OutputError as error:\n    print(error, '|', error.hint)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONIOENCODING": "latin1"}
    )
    assert done.stdout.startswith("cannot write '\\u03c0': the output's encoding is ")
    assert "PYTHONIOENCODING=utf-8" in done.stdout


def test_tables_are_drawn_with_what_the_encoding_has(model):
    done = run(["plan", model], model, subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert done.returncode == ExitCode.OK and "|-----" in done.stdout
