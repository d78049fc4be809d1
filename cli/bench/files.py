"""Datasets that are read from a file: `jsonl` and `sharegpt`.

Nothing is cut or repeated to fit: what does not fit is an error, or is left out and counted in a note.
"""

from __future__ import annotations

import json
from pathlib import Path

from ...kernels.errors import CapacityError, UsageError
from .build import Build
from .workload import Item, Prompt, Workload


def jsonl(build: Build) -> Workload:
    """A line per request: "prompt" (text or ids), "prompt_token_ids", "text" or "messages", and how long to answer."""
    path = build.options.path
    assert path is not None
    items = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        place = f"line {number} of `{path}`"
        items.append(_line_item(build, place, _parse(line, place)))
        if len(items) == build.num_prompts:
            break
    if not items or len(items) < build.num_prompts:
        raise UsageError(
            f"`{path}` has {len(items)} prompts" + (f", {build.num_prompts} were asked for" if items else ""),
            f"use --num-prompts {len(items)} or less" if items else "put one JSON object on each line",
        )
    return build.workload(f"{path}", items)


def _line_item(build: Build, place: str, record: object) -> Item:
    if not isinstance(record, dict):
        raise UsageError(f"{place} is no JSON object", 'such as {"prompt": "Hello", "max_tokens": 16}')
    given = {name: record[name] for name in ("prompt", "prompt_token_ids", "text", "messages") if name in record}
    if len(given) != 1 and not (set(given) == {"prompt", "prompt_token_ids"}):
        raise UsageError(f"{place} must have one of `prompt`, `prompt_token_ids`, `text` and `messages`")
    value = given.get("prompt_token_ids", next(iter(given.values())))
    prompt: Prompt
    if isinstance(value, str) and value and "messages" not in given:
        prompt = build.text_as_asked(value)
    elif isinstance(value, list) and value and all(type(token) is int for token in value):
        if build.asked.chat:
            raise UsageError(f"{place} holds token ids, which a chat endpoint does not take")
        prompt = tuple(value)
    elif isinstance(value, list) and value and "messages" in given and all(map(_is_message, value)):
        prompt = build.messages_as_asked(tuple({"role": m["role"], "content": m["content"]} for m in value))
    else:
        raise UsageError(f"{place}: `{next(iter(given))}` is neither text nor token ids nor messages, or it is empty")
    answer = next((record[name] for name in _ANSWER_KEYS if name in record), build.output_tokens)
    if build.options.output_tokens is not None:
        answer = build.options.output_tokens
    if type(answer) is not int or answer < 1:
        raise UsageError(f"{place}: the length of the answer is {answer!r}, it must be a whole number above 0")
    if excess := build.excess(prompt, answer):
        raise CapacityError(
            f"{place} needs {excess + build.asked.context} tokens with its answer, the context holds "
            f"{build.asked.context}",
            "take the line out, lower --output-tokens, or raise --max-model-len if the model allows",
        )
    return Item(prompt, answer)


_ANSWER_KEYS = ("max_tokens", "max_completion_tokens", "output_tokens", "output_len")


def sharegpt(build: Build) -> Workload:
    """First question and length of first answer of each conversation in ShareGPT's format, in an order by seed."""
    path = build.options.path
    assert path is not None
    records = _parse(_read(path), f"`{path}`")
    if not isinstance(records, list):
        raise UsageError(f"`{path}` is no list of conversations", "ShareGPT files are one JSON list")
    pairs = [pair for record in records if (pair := _first_turn(record)) is not None]
    if not pairs:
        raise UsageError(
            f"none of the {len(records)} entries of `{path}` is a conversation of a human and an assistant",
            'an entry is {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}',
        )
    build.rng.shuffle(pairs)
    items, too_long = [], 0
    for question, answer in pairs:
        prompt = build.text_as_asked(question)
        length = build.options.output_tokens or build.count(answer)
        if build.excess(prompt, length):
            too_long += 1
            continue
        items.append(Item(prompt, length))
        if len(items) == build.num_prompts:
            break
    if build.options.num_prompts is not None and len(items) < build.num_prompts:
        raise UsageError(
            f"`{path}` has {len(items)} conversations that fit, {build.num_prompts} were asked for",
            f"use --num-prompts {max(1, len(items))} or less",
        )
    if not items:
        raise CapacityError(f"none of the conversations in `{path}` fits the context of {build.asked.context}")
    notes = (f"{too_long} conversations do not fit the context and were passed over",) if too_long else ()
    return build.workload(f"{path}", items, *notes)


def _first_turn(record: object) -> tuple[str, str] | None:
    turns = record.get("conversations") if isinstance(record, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    texts = []
    for turn, speakers in zip(turns, (("human", "user"), ("gpt", "assistant", "chatgpt")), strict=False):
        if not isinstance(turn, dict) or turn.get("from") not in speakers or not isinstance(turn.get("value"), str):
            return None
        texts.append(turn["value"])
    return (texts[0], texts[1]) if all(text.strip() for text in texts) else None


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(name), str) for name in ("role", "content"))


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read `{path}`: {error}", "--dataset-path takes a UTF-8 text file") from error


def _parse(text: str, place: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{place} is no JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
