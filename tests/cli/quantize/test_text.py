"""Texts out of files of every kind, and out of a hub that is there, is not, or says no."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub
import pytest

from llmctl.cli.quantize import text as module
from llmctl.cli.quantize.text import Unreachable, open_documents
from llmctl.kernels.errors import UsageError

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def render(messages: Sequence[dict[str, str]]) -> str:
    return "".join(f"<{message['role']}>{message['content']}" for message in messages)


def texts(name: object) -> list[str]:
    return list(open_documents(str(name), render).texts)


def write_lines(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def test_plain_text_is_read_in_pieces_of_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 10)
    path = tmp_path / "a.txt"
    path.write_text("one two three\nfour\nfive six seven eight\n")
    found = texts(path)
    assert "".join(found) == path.read_text() and len(found) > 1 and all(text.endswith("\n") for text in found)
    assert open_documents(str(path), render).name == "a.txt"


def test_rows_have_their_text_under_many_names(tmp_path: Path) -> None:
    rows = ["bare", {"text": "a"}, {"id": 3, "content": "b"}, {"messages": CHAT},
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}]  # fmt: skip
    expected = ["bare\n", "a\n", "b\n", "<user>hi<assistant>hello\n", "<user>q<assistant>a\n"]
    assert texts(write_lines(tmp_path / "a.jsonl", rows)) == expected
    (tmp_path / "b.json").write_text(json.dumps(rows))
    assert texts(tmp_path / "b.json") == expected


def test_a_conversation_without_a_template_is_its_turns(tmp_path: Path) -> None:
    def refuse(messages: Sequence[dict[str, str]]) -> str:
        raise UsageError("no template")

    path = write_lines(tmp_path / "a.jsonl", [{"messages": CHAT}])
    assert list(open_documents(str(path), refuse).texts) == ["hi\nhello\n"]


def test_parquet_files_are_read_and_broken_ones_are_one_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    datasets.Dataset.from_dict({"text": ["one", "two"]}).to_parquet(tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ["one\n", "two\n"]
    (tmp_path / "b.parquet").write_text("no parquet")
    capfd.readouterr()
    with pytest.raises(UsageError, match="as parquet"):
        texts(tmp_path / "b.parquet")
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    with pytest.raises(UsageError, match="has no text files"):
        open_documents(str(folder), render)
    (folder / "b.txt").write_text("second")
    write_lines(folder / "a.jsonl", [{"text": "first"}])
    (folder / "c.png").write_bytes(b"\x89PNG")
    assert texts(folder) == ["first\n", "second"] and open_documents(str(folder), render).name == "texts"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text": 5}', r"`text` in row 2 of `a.jsonl` is a number \(5\), not text"),
        ('{"text": ["a"]}', "is a list"),
        ('{"id": 3}', "have no text, only id"),
        ("[1]", "have no text, only list"),
        ("{", "as JSON"),
        ("\ud800", "JSON"),
    ],
)
def test_rows_without_text_and_broken_lines_are_errors(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(UsageError, match=message):
        texts(path)


def test_a_dataset_is_streamed_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(repo: str, config: str | None, *, split: str, streaming: bool) -> list[dict[str, str]]:
        asked.append((repo, config, split, streaming))
        return [{"text": "a"}]

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, repo, timeout: None)
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert texts("org/name") == texts("name:config") == texts("org/name::test") == ["a\n"]
    assert asked == [
        ("org/name", None, "train", True),
        ("name", "config", "train", True),
        ("org/name", None, "test", True),
    ]
    assert open_documents("org/name", render).name == "org/name on the hub"


def test_a_hub_that_does_not_answer_is_told_from_a_dataset_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    error: list[Exception] = [OSError("no route to host\nand more")]

    def info(self: object, repo: str, timeout: float) -> None:
        raise error[0]

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    with pytest.raises(Unreachable, match="^no route to host$"):
        open_documents("org/name", render)
    error[0] = huggingface_hub.errors.RepositoryNotFoundError.__new__(huggingface_hub.errors.RepositoryNotFoundError)
    with pytest.raises(UsageError, match="the hub has no dataset `org/name`"):
        open_documents("org/name", render)
    error[0] = huggingface_hub.errors.HFValidationError("no such name")
    with pytest.raises(UsageError, match="the hub has no dataset `org/a--b`"):
        open_documents("org/a--b", render)


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [(404, UsageError, "the hub has no dataset `org/name`"), (503, Unreachable, "^busy$")],
)
def test_a_hub_that_says_no_is_told_from_one_that_is_out_of_order(
    monkeypatch: pytest.MonkeyPatch, status: int, kind: type[Exception], message: str
) -> None:
    class Answered(huggingface_hub.errors.HfHubHTTPError):
        def __init__(self) -> None:  # a response of the HTTP library differs between versions of huggingface_hub
            Exception.__init__(self, "busy")

        def __str__(self) -> str:
            return "busy"

    error = Answered()
    error.response = SimpleNamespace(status_code=status)

    def info(self: object, repo: str, timeout: float) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    with pytest.raises(kind, match=message):
        open_documents("org/name", render)


@pytest.mark.parametrize("name", ["nosuch", "nosuch.txt", "a/b/c", "a b/c"])
def test_what_no_dataset_can_be_called_is_a_file_that_is_not_there(name: str) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        module.check_name(name)


def test_a_hub_that_breaks_off_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[dict[str, str]]:
        yield {"text": "a"}
        raise OSError("connection reset")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, repo, timeout: None)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: broken())
    with pytest.raises(UsageError, match="to its end: connection reset"):
        texts("org/name")
