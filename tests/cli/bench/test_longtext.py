"""Where long texts come from, and that a network which does not answer stops nothing."""

import signal
import subprocess
import sys

import pytest

from llmctl.cli.bench import fetch_pg19, longtext
from llmctl.cli.bench.longtext import python_documentation, read_books
from llmctl.engine.config import Environment
from llmctl.engine.load.progress import silent
from llmctl.kernels.errors import UsageError


def test_folder_is_read_in_order_and_other_files_are_left(tmp_path):
    for name, text in (("b.txt", "second"), ("a.txt", "first"), ("c.md", "other"), ("d.txt", "  \n")):
        (tmp_path / name).write_text(text)
    books = read_books(tmp_path, Environment("", tmp_path, False), silent)
    assert books.texts == ("first", "second") and not books.stand_in


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none", None, "there is no"),
        ("empty.txt", b"  ", "are empty"),
        ("latin.txt", b"caf\xe9", "as UTF-8 text"),
    ],
)
def test_paths_without_texts_are_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_books(tmp_path / name, Environment("", tmp_path, False), silent)
    (tmp_path / "empty").mkdir(exist_ok=True)
    with pytest.raises(UsageError, match=r"has no .txt files"):
        read_books(tmp_path / "empty", Environment("", tmp_path, False), silent)


def test_fetched_books_are_kept_and_not_fetched_again(tmp_path):
    calls = []

    def fetch(folder):
        calls.append(folder)
        folder.mkdir(parents=True)
        (folder / "0.txt").write_text("a book")
        return ""

    environment = Environment("", tmp_path, False)
    for _ in range(2):
        books = read_books(None, environment, silent, fetch)
        assert books.texts == ("a book",) and books.source == "PG-19 test set" and not books.stand_in
    assert calls == [tmp_path / "datasets" / "pg19"]


def test_stand_in_says_why_and_offline_does_not_even_try(tmp_path, monkeypatch):
    monkeypatch.setattr(longtext, "ENOUGH_CHARACTERS", 20_000)

    def fetch(folder):
        raise AssertionError("the network must not be touched")

    books = read_books(None, Environment("", tmp_path, True), silent, fetch)
    assert books.stand_in and "standing in for PG-19 (HF_HUB_OFFLINE forbids to download it)" in books.source
    books = read_books(None, Environment("", tmp_path, False), silent, lambda folder: "the hub cannot be reached")
    assert books.stand_in and "the hub cannot be reached" in books.source


def test_documentation_is_long_and_always_the_same(monkeypatch):
    monkeypatch.setattr(longtext, "ENOUGH_CHARACTERS", 300_000)
    texts = python_documentation()
    assert texts == python_documentation() and sum(map(len, texts)) >= 300_000
    monkeypatch.setattr(longtext.importlib.util, "find_spec", lambda name: None)
    assert sum(map(len, python_documentation())) >= 300_000, "also where pydoc's topics are not installed"


@pytest.mark.parametrize(
    ("code", "reason"), [(1, "the hub cannot be reached"), (-signal.SIGALRM, "the hub did not answer in time")]
)
def test_fetching_that_fails_or_hangs_is_a_reason_and_no_error(tmp_path, monkeypatch, code, reason):
    def run(command, **_):
        assert command[1:3] == ["-m", "llmctl.cli.bench.fetch_pg19"]
        return subprocess.CompletedProcess(command, code, "", "words")

    monkeypatch.setattr(longtext.subprocess, "run", run)
    assert longtext.fetch_pg19(tmp_path / "pg19") == reason
    assert not (tmp_path / "pg19").exists()


def test_alarm_ends_a_fetch_that_waits_for_ever(tmp_path, monkeypatch):
    program = (
        "import signal, sys, threading, huggingface_hub\n"
        "from pathlib import Path\n"
        "from llmctl.cli.bench import fetch_pg19\n"
        "fetch_pg19.ANSWER_S = 1\n"
        "class Hangs:\n"
        "    def dataset_info(self, *args, **kwargs):\n"
        "        threading.Event().wait()\n"
        "huggingface_hub.HfApi = Hangs\n"
        f"fetch_pg19.main('a/b', Path({str(tmp_path / 'pg19')!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == -signal.SIGALRM and not (tmp_path / "pg19").exists()


def test_books_are_written_from_parquet_all_or_none(tmp_path):
    from datasets import Dataset

    file = tmp_path / "test.parquet"
    Dataset.from_dict({"text": ["one", "two"], "title": ["a", "b"]}).to_parquet(file)
    fetch_pg19.write_books([str(file)], tmp_path / "cache" / "pg19")
    assert sorted(path.read_text() for path in (tmp_path / "cache" / "pg19").glob("*.txt")) == ["one", "two"]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["pg19"]
