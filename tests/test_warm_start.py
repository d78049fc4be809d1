"""From a warm packed cache to a token, neither torch nor transformers is imported, nor what only a GPU needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.tiny import write_checkpoint

CHAT = """
import atexit, sys
from llmctl.cli.start import main
sys.argv = ["llmctl", "chat", "--model", {model!r}, "--max-tokens", "4", "--num-gpu-blocks-override", "20",
            "--device", "cpu", "-p", "hi"]
HEAVY = {{"torch", "transformers", "jax", "pydantic", "asyncio", "llmctl.kernels.cuda.gpu", "llmctl.engine.gpu_sizes"}}
atexit.register(lambda: print("LOADED", sorted(HEAVY & set(sys.modules))))
main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


def chat_in_a_fresh_interpreter(folder: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CHAT.format(model=folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_chat_from_a_warm_cache_imports_neither_torch_nor_transformers(folder: str) -> None:
    cold = chat_in_a_fresh_interpreter(folder)
    warm = chat_in_a_fresh_interpreter(folder)
    assert warm.splitlines()[-1] == "LOADED []"
    assert cold.splitlines()[-1] == "LOADED []", "nor does building the cache"


def test_the_newcomers_trace_names_at_most_eight_files_that_exist() -> None:
    root = Path(__file__).resolve().parents[1]
    text = (root / "docs" / "architecture.md").read_text()
    trace = text.split("## The way of one chat message", 1)[1].split("\n## ", 1)[0]
    files = [line.split("`")[1] for line in trace.splitlines() if line[:1].isdigit() and "`" in line]
    assert 3 <= len(files) <= 8
    assert all((root / file).is_file() for file in files), files
