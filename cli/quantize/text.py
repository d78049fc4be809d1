"""Where text for calibration and evaluation comes from: files, folders of them, datasets on the hub.

Plain text and JSON lines are read here; parquet files and the hub need the `datasets` library, which is loaded only for
them. Texts are read one after the other, so that a dataset of any size will do.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from ...kernels.errors import LlmctlError, UsageError

HUB_TIMEOUT_S = 5.0

# A name alone is a file that was mistyped far more often than one of the few datasets without an owner: these need
# their configuration, which no file has.
_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*|\w[\w.-]*(?=:))(?::([\w.-]*))?(?::([\w.-]+))?")
_PIECE = 1 << 20  # characters of a plain text that are read at a time
_TEXT_KEYS = ("text", "content", "prompt", "instruction")
_CHAT_KEYS = ("messages", "conversations")
_FILES = (".txt", ".md", ".jsonl", ".json", ".parquet")

# A conversation as text, through the model's own template
RenderChat = Callable[[Sequence[dict[str, str]]], str]


class Unreachable(Exception):
    """The hub cannot be reached; the message says why."""


@dataclass(frozen=True, slots=True)
class Documents:
    """Texts one after the other, and what they are called in the log, the table and the card."""

    name: str
    texts: Iterator[str]


def open_documents(name: str, render_chat: RenderChat) -> Documents:
    """The texts in a file, in the files of a folder, or in a dataset `ID[:CONFIG[:SPLIT]]` on the hub.

    UsageError for what is not there or holds no text, Unreachable if the hub does not answer.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in _FILES)
        if not files:
            raise UsageError(f"`{path}` has no text files", f"known endings: {', '.join(_FILES)}")
        return Documents(path.resolve().name, (text for file in files for text in _file_texts(file, render_chat)))
    if path.is_file():
        return Documents(path.name, _file_texts(path, render_chat))
    repo, config, split = _hub_name(name)
    return Documents(f"{name} on the hub", _row_texts(name, _hub_rows(repo, config, split), render_chat))


def check_name(name: str) -> None:
    """Raise UsageError if there is no such file or folder and a dataset on the hub cannot be called this."""
    if not Path(name).expanduser().exists():
        _hub_name(name)


def _hub_name(name: str) -> tuple[str, str | None, str]:
    """(repository, configuration, split) of a dataset on the hub."""
    match = _HUB_ID.fullmatch(name)
    if match is None or Path(name).suffix.lower() in _FILES:
        raise UsageError(
            f"there is no file `{name}`",
            "give a text, JSONL or parquet file, a folder of them, or a dataset on the hub such as `org/name`",
        )
    return match[1], match[2] or None, match[3] or "train"


def _file_texts(path: Path, render_chat: RenderChat) -> Iterator[str]:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _row_texts(path.name, _parquet_rows(path), render_chat)
    if suffix in (".jsonl", ".json"):
        return _row_texts(path.name, _json_rows(path), render_chat)
    return _plain_texts(path)


def _plain_texts(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            while piece := file.read(_PIECE):
                yield piece + file.readline()  # whole lines, so that no word is cut
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read `{path}` as UTF-8 text: {error}") from error


def _json_rows(path: Path) -> Iterator[object]:
    """The values of a JSON-lines file, or of one JSON list."""
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix.lower() == ".json":
                content = json.load(file)
                yield from content if isinstance(content, list) else [content]
                return
            for line in file:
                if line.strip():
                    yield json.loads(line)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read `{path}` as JSON: {error}") from error


def _parquet_rows(path: Path) -> Iterator[object]:
    from datasets import load_dataset  # pyarrow, which only these files need

    _hush()
    try:
        yield from load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    except Exception as error:  # whatever pyarrow raises for a broken file
        raise UsageError(f"cannot read `{path}` as parquet: {error}") from error


def _hub_rows(repo: str, config: str | None, split: str) -> Iterator[object]:
    """The rows of a dataset. Whether the hub answers is asked first, with a deadline that `datasets` does not have."""
    from datasets import load_dataset
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    _hush()
    missing = UsageError(f"the hub has no dataset `{repo}` that you may read, and there is no such file",
                         "check the name; private datasets need HF_TOKEN")  # fmt: skip
    try:
        HfApi().dataset_info(repo, timeout=HUB_TIMEOUT_S)
    except GatedRepoError as error:
        raise UsageError(f"dataset `{repo}` is gated", "accept its terms on the hub, then set HF_TOKEN") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise missing from error
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code == HTTPStatus.NOT_FOUND:
            raise missing from error
        raise Unreachable(_first_line(error)) from error
    except Exception as error:  # the HTTP library differs between versions of huggingface_hub, and so do its errors
        raise Unreachable(_first_line(error)) from error
    try:
        rows: Iterator[object] = iter(load_dataset(repo, config, split=split, streaming=True))
    except Exception as error:  # an unknown config or split, or a dataset that is a script
        raise UsageError(f"cannot read dataset `{repo}`: {error}", "write it as ID:CONFIG:SPLIT") from error
    return _whole_rows(repo, rows)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _whole_rows(repo: str, rows: Iterator[object]) -> Iterator[object]:
    """The rows; UsageError if the hub breaks off in the middle of them."""
    try:
        yield from rows
    except Exception as error:  # whatever the HTTP library or pyarrow raises
        raise UsageError(f"cannot read dataset `{repo}` to its end: {error}", "try again, or use a file") from error


def _hush() -> None:
    """Keep `datasets` from logging an error beside the one that is raised here."""
    logging.getLogger("datasets").setLevel(logging.CRITICAL)


def _row_texts(name: str, rows: Iterator[object], render_chat: RenderChat) -> Iterator[str]:
    for number, row in enumerate(rows, 1):
        text = row if isinstance(row, str) else _row_text(row, render_chat)
        if text is None:
            if found := [key for key in _TEXT_KEYS if isinstance(row, Mapping) and row.get(key) is not None]:
                value = row[found[0]]  # type: ignore[index]  # a Mapping, as just seen
                kind = "a number" if isinstance(value, int | float) else f"a {type(value).__name__}"
                raise UsageError(f"`{found[0]}` in row {number} of `{name}` is {kind} ({value!r:.40}), not text")
            keys = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
            known = ", ".join((*_TEXT_KEYS, *_CHAT_KEYS))
            raise UsageError(f"the rows of `{name}` have no text, only {keys}", f"known keys: {known}")
        yield text + "\n"


def _row_text(row: object, render_chat: RenderChat) -> str | None:
    """A row's text, or its conversation as the model's template writes it; None if it has neither."""
    if not isinstance(row, Mapping):
        return None
    for key in _TEXT_KEYS:
        if isinstance(row.get(key), str):
            return str(row[key])
    for key in _CHAT_KEYS:
        messages = _messages(row.get(key))
        if messages:
            try:
                return render_chat(messages)
            except LlmctlError:  # no template, or one that refuses this conversation
                return "\n".join(message["content"] for message in messages)
    return None


def _messages(value: object) -> list[dict[str, str]]:
    """Turns in OpenAI's (`role`, `content`) or ShareGPT's (`from`, `value`) words."""
    found = []
    for turn in value if isinstance(value, list) else []:
        if not isinstance(turn, Mapping):
            return []
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            return []
        found.append({"role": {"human": "user", "gpt": "assistant"}.get(role, role), "content": content})
    return found
