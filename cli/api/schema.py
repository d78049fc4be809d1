"""What clients send, as typed records.

msgspec decodes and checks in one pass, never converts a wrong type, and refuses fields it does not know. A field falls
into one of three classes. Those that we honour are typed. Those that change nothing in the answer are typed `Any`
and accepted. Those that would change it, and that we cannot honour, are in `_NEUTRAL` with the values that ask for
nothing: any other value is an error that names the field, never a field that is silently ignored.

The one use of inheritance: a JSON request is flat, so the fields that both endpoints share cannot be a record inside.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from .errors import ApiError


class Strict(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A JSON object without unknown keys."""


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Any = None


class Generate(Strict):
    """What chat and text completion share. None is what a client means by null: as if the field were not there."""

    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    max_wait: float | None = None  # seconds
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    # Nothing in the answer depends on these.
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None


class Part(msgspec.Struct):
    """One part of a message's content. Only text is understood; hints that come with a part are not read."""

    type: str
    text: str | None = None


class Message(Strict):
    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    # An answer of ours, sent back as it came.
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    tool_calls: Any = None
    function_call: Any = None
    tool_call_id: str | None = None


class ChatRequest(Generate, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parallel_tool_calls: Any = None  # there are no tools
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    moderation: Any = None


class CompletionRequest(Generate, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Any = None


class TokenizeRequest(Strict):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    tokens: list[int]
    model: str | None = None


_NEUTRAL: dict[type[msgspec.Struct], dict[str, tuple[object, ...]]] = {
    ChatRequest: {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "web_search_options": (),
        "moderation": (),
    },
    CompletionRequest: {"suffix": ("",)},
    Message: {"refusal": ("",), "annotations": ([],), "audio": (), "tool_calls": ([],), "function_call": ()},
}

AnyRequest = TypeVar("AnyRequest", ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)


def decode(body: bytes, kind: type[AnyRequest]) -> AnyRequest:
    """The request in `body`; ApiError 400 that names the field if it is not one."""
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {_what_is_wrong(error, body)}") from None
    _refuse_unsupported(request, "")
    if isinstance(request, (ChatRequest, TokenizeRequest)):
        for number, message in enumerate(request.messages or ()):
            _refuse_unsupported(message, f"messages[{number}].")
    return request


def _what_is_wrong(error: Exception, body: bytes) -> str:
    """The decoder's complaint. It takes a body for cut short that ends where the second half of a pair should be."""
    if str(error) == "Input data was truncated" and rb"\u" in body:
        with contextlib.suppress(ValueError, RecursionError):
            json.loads(body)  # which takes half a pair, but nothing that is cut short
            return "a string has half a surrogate pair (`\\ud800` to `\\udfff` come in pairs)"
    return str(error)


def _refuse_unsupported(record: msgspec.Struct, where: str) -> None:
    given = msgspec.structs.asdict(record)
    for name, neutral in _NEUTRAL.get(type(record), {}).items():
        if given[name] is not None and not any(_same(given[name], value) for value in neutral):
            raise ApiError(400, f"`{where}{name}` is not supported by this server", param=where + name)


def _same(given: object, neutral: object) -> bool:
    """Whether both are the same JSON value: in Python true is 1 as well."""
    return type(given) is type(neutral) and given == neutral


def _invalid(message: str, kind: type[msgspec.Struct]) -> ApiError:
    """msgspec's complaint, with the field it is about as `param`."""
    text, _, path = message.partition(" - at ")
    where = path.split("`$")[-1].strip("`").lstrip(".")
    field = re.search(r"field `([^`]*)`", text)
    if field is None:
        param = where or None
        return ApiError(400, f"{_lower(text)}" + (f" in `{where}`" if where else ""), param=param)
    name = f"{where}.{field[1]}" if where else field[1]
    if "unknown" not in text:
        return ApiError(400, f"`{name}` is missing", param=name)
    near = [] if where else difflib.get_close_matches(field[1], kind.__struct_fields__, n=1)
    hint = f", did you mean `{near[0]}`?" if near else ""
    return ApiError(400, f"`{name}` is not a field that this server knows{hint}", param=name)


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
