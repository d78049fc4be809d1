"""Commands are imported when they are named, and their options are read without Typer's validators."""

import subprocess
import sys

import pytest

from llmctl.cli import app
from llmctl.cli.exits import ExitCode


def loaded_after(*line):
    """What a fresh interpreter has imported after this command line."""
    code = (
        "import sys\nfrom llmctl.cli.app import run\nfrom llmctl.cli.console import terminal\n"
        f"run({list(line)!r}, terminal())\nprint(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return set(done.stderr.split())


def test_a_command_imports_no_other(tmp_path):
    loaded = loaded_after("chat", str(tmp_path / "none"), "--temperature", "0", "--max-tokens", "1", "-p", "hi")
    assert "llmctl.cli.commands.chat" in loaded
    others = {"llmctl.cli.commands.serve", "llmctl.cli.commands.bench", "pydantic", "asyncio"}
    assert loaded & others == set()


def test_help_lists_every_command_with_its_line(console):
    assert app.run(["--help"], console) == ExitCode.OK
    for line in ("chat", "serve", "bench kernels", "bench compare", "models"):
        assert app.run([*line.split(), "--help"], console) == ExitCode.OK


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["chat", "--temperature", "warm"], "--temperature"),
        (["chat", "--max-tokens", "1.5"], "`1.5` is not a whole number"),
        (["chat", "--context-length", "many"], "`many` is not a count"),
        (["models", "shwo"], "no such command `shwo`"),
        (["chatt"], "did you mean `chat`?"),
        (["chat", "--temprature", "1"], "did you mean `--temperature`?"),
    ],
)
def test_mistakes_are_named(console, line, said):
    assert app.run(line, console) == ExitCode.USAGE
    assert said in console.stderr.getvalue()
