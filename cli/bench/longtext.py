"""Long texts for the `pg19` dataset: books from a folder, PG-19 from the hub, else Python's own documentation.

Where there is no network a benchmark must still run, so there is a stand-in that every Python has. `Books.source` says
which of the three it was, and everything printed or saved repeats it.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...engine.config import Environment
from ...engine.load.progress import Progress
from ...kernels.errors import UsageError

log = logging.getLogger(__name__)

REPO = "emozilla/pg19-test"  # the 100 books of PG-19's test set as parquet; deepmind/pg19 is a script that nothing runs
ENOUGH_CHARACTERS = 2_000_000  # of the stand-in: docstrings are parsed until there is this much

Fetch = Callable[[Path], str]


@dataclass(frozen=True, slots=True)
class Books:
    """Long texts, and what they are."""

    texts: tuple[str, ...]
    source: str
    stand_in: bool


def read_books(path: Path | None, environment: Environment, progress: Progress, fetch: Fetch | None = None) -> Books:
    """The texts in `path` (a folder of .txt files, or one file), else PG-19, else Python's documentation.

    Raises UsageError for a path without readable texts; a hub that cannot be reached is no error.
    """
    if path is not None:
        return Books(_read_texts(path), f"texts in {path}", False)
    folder = environment.cache / "datasets" / "pg19"
    if not folder.is_dir():
        if environment.offline:
            reason = "HF_HUB_OFFLINE forbids to download it"
        else:
            progress("fetching PG-19", 0, 0)
            reason = (fetch or fetch_pg19)(folder)
        if reason:
            log.info("PG-19 is not used: %s", reason)
            version = platform.python_version()
            source = f"Python {version} documentation, standing in for PG-19 ({reason})"
            return Books(python_documentation(), source, True)
    return Books(_read_texts(folder), "PG-19 test set", False)


def fetch_pg19(folder: Path) -> str:
    """Make `folder` with a text file per book; returns why that failed, "" if it did not.

    A process of its own does it: it can be stopped at a deadline, and the memory of its parquet reader is not ours.
    """
    command = [sys.executable, "-m", f"{__package__}.fetch_pg19", REPO, str(folder)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    log.info("fetching %s ended with %s: %s", REPO, done.returncode, done.stderr.strip())
    return "the hub did not answer in time" if done.returncode < 0 else "the hub cannot be reached"


def python_documentation() -> tuple[str, ...]:
    """The reference topics that `help()` shows as one text, and the docstrings of the standard library as another."""
    texts = []
    if importlib.util.find_spec("pydoc_data") is not None:
        from pydoc_data.topics import topics

        texts.append("\n\n".join(topics[name] for name in sorted(topics)))
    strings, size = [], 0
    for text in _docstrings(Path(sysconfig.get_path("stdlib"))):
        strings.append(text)
        size += len(text)
        if size + sum(map(len, texts)) >= ENOUGH_CHARACTERS:
            break
    return (*texts, "\n\n".join(strings))


def _docstrings(folder: Path) -> Iterator[str]:
    """Docstrings of the modules in `folder`, in order of module and place."""
    for file in sorted(folder.glob("*.py")):
        tree = ast.parse(file.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield text


def _read_texts(path: Path) -> tuple[str, ...]:
    if not path.exists():
        raise UsageError(f"there is no `{path}`", "--dataset-path takes a folder of .txt files, or one of them")
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"`{path}` has no .txt files", "--dataset-path takes a folder of .txt files, or one of them")
    texts = []
    for file in files:
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read `{file}` as UTF-8 text: {error}") from error
        if text.strip():
            texts.append(text)
    if not texts:
        raise UsageError(f"the texts in `{path}` are empty")
    return tuple(texts)
