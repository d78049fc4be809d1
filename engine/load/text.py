"""What a model's files say about text: its tokenizer, chat template, special tokens, stop ids, sampling defaults.

Hugging Face spreads this over half a dozen JSON files, some of them optional and some saying the same thing twice. It
is read here once, when a model is packed, into one record that everything later reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import tokenizers

from ...kernels.errors import CheckpointError
from ..models.fields import MAX_INT, eos_field, shown
from ..request import ParameterError, SamplingParams
from .origin import values_of

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_AGAIN = "the file is broken: fetch the model again"
_SLOW_TOKENIZERS = ("tokenizer.model", "vocab.json")

# Every file read here, and config.json, by name.
TEXT_FILES = (
    *("config.json", "generation_config.json", "chat_template.jinja", "special_tokens_map.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json"),
)


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What the model's makers recommend; None where they say nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class ChatInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `chat.json`: `template` is empty if the model has none; special tokens by role (`bos_token`)."""

    template: str = ""
    special_tokens: dict[str, str] = {}
    eos_ids: tuple[int, ...] = ()
    defaults: SamplingDefaults = SamplingDefaults()


class ModelText(msgspec.Struct, frozen=True):
    """A whole `tokenizer.json`, and the rest."""

    tokenizer_json: str
    chat: ChatInfo


def check_tokenizer_files(folder: Path) -> None:
    """Raise CheckpointError if `folder` has no tokenizer at all."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", *_SLOW_TOKENIZERS)):
        raise CheckpointError(f"`{folder}` has no tokenizer", "copy the model's `tokenizer.json` into the folder")


def folder_text(folder: Path, config: Mapping[str, object], vocab_size: int = MAX_INT) -> ModelText:
    """The text side of a Hugging Face folder. Loads transformers if there is no tokenizer.json.

    CheckpointError for a token that ends texts beyond `vocab_size`: the model could never stop with it.
    """
    path = folder / "tokenizer.json"
    tokenizer_json = _text(path) if path.is_file() else _convert_tokenizer(folder)
    tokenizer = _parsed(path, tokenizer_json)
    tokenizer_config = read_json(folder / "tokenizer_config.json", required=False)
    special = _special_tokens(folder, tokenizer_config)
    with values_of(folder / "tokenizer_config.json"):
        template = _template(folder, tokenizer_config)
    generation = _generation(folder)
    with values_of(folder / "generation_config.json"):
        defaults = _defaults(generation)
    eos, named = stop_ids(folder, config, vocab_size), special.get("eos_token")
    for index, token in tokenizer.get_added_tokens_decoder().items():
        if token.content != named or index in eos:
            continue
        if index >= vocab_size:
            raise CheckpointError(
                f"`{path}`: `eos_token`, `{named}`, is token {index}, the model has tokens from 0 to {vocab_size - 1}",
                "the tokenizer is another model's: copy this model's own there",
            )
        eos += (index,)
    return ModelText(
        tokenizer_json, ChatInfo(template=template, special_tokens=special, eos_ids=eos, defaults=defaults)
    )


def stop_ids(folder: Path, config: Mapping[str, object], vocab_size: int) -> tuple[int, ...]:
    """The tokens that end texts, by generation_config.json, or else the config; both have to make sense."""
    with values_of(folder / "generation_config.json"):
        listed = eos_field(_generation(folder), vocab_size)
    with values_of(folder / "config.json"):
        own = eos_field(config, vocab_size)
    return listed or own


def _generation(folder: Path) -> dict[str, object]:
    return read_json(folder / "generation_config.json", required=False)


def read_json(path: Path, required: bool = True) -> dict[str, object]:
    """The object in a JSON file; an empty one if the file is absent and not required."""
    if not required and not path.is_file():
        return {}
    try:
        value = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"`{path}` is not valid JSON: {error}", _AGAIN) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"`{path}` holds no JSON object", _AGAIN)
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot read `{path}`: {error.strerror or error}", _AGAIN) from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"`{path}` is not UTF-8: {error}", _AGAIN) from error


def _convert_tokenizer(folder: Path) -> str:
    """The tokenizer.json that transformers makes of a slow tokenizer's files."""
    from transformers import AutoTokenizer  # heavy, and only models without a tokenizer.json need it

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), use_fast=True, local_files_only=True)
    except Exception as error:  # whatever a converter and its optional dependencies raise
        raise CheckpointError(
            f"cannot convert the tokenizer of `{folder}`: {error}", "copy the model's `tokenizer.json` into the folder"
        ) from error
    if not tokenizer.is_fast:
        raise CheckpointError(f"`{folder}` has no `tokenizer.json`, and its tokenizer cannot be converted to one")
    converted: str = tokenizer.backend_tokenizer.to_str()
    return converted


def _parsed(path: Path, tokenizer_json: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # tokenizers raises bare Exception for anything wrong with its file
        raise CheckpointError(
            f"`{path}` is no tokenizer: {error}", "fetch the model again, or copy a whole `tokenizer.json` there"
        ) from error


def _special_tokens(folder: Path, tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    older = read_json(folder / "special_tokens_map.json", required=False)
    special = {}
    for role in _ROLES:
        own = role in tokenizer_config
        value = tokenizer_config[role] if own else older.get(role)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            special[role] = content
        elif value is not None:
            with values_of(folder / ("tokenizer_config.json" if own else "special_tokens_map.json")):
                raise CheckpointError(f"`{role}` is {shown(value)}, expected a token, or an object with its `content`")
    return special


def _template(folder: Path, tokenizer_config: Mapping[str, object]) -> str:
    """The default chat template; its own file wins over tokenizer_config.json."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        return _text(own)
    value = tokenizer_config.get("chat_template")
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):  # several, by name
        value = next((item.get("template") for item in value if item.get("name") == "default"), None)
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"`chat_template` is {shown(value)}, expected a text, or a list of named ones")
    return value or ""


def _defaults(generation: Mapping[str, object]) -> SamplingDefaults:
    given = {key: generation[key] for key in _DEFAULTS if generation.get(key) is not None}
    for key, value in given.items():
        try:
            msgspec.convert({key: value}, SamplingParams).check(vocab_size=1)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"`{key}` is {shown(value)}: {str(error).lower()}") from error
        except ParameterError as error:
            raise CheckpointError(error.message, error.hint) from error
    return msgspec.convert(given, SamplingDefaults)
