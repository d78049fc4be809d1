"""From the API's fields to the engine's: sampling parameters, prompts, messages for the chat template."""

from __future__ import annotations

from typing import cast

import msgspec

from ...engine.frontend import merge_sampling
from ...engine.request import MAX_LOGPROBS, SamplingParams
from .errors import ApiError
from .schema import ChatRequest, CompletionRequest, Generate, Message, Part

MAX_STOPS = 64  # each is looked for in every piece of text
MAX_PRIORITY = 1 << 31
DEFAULT_COMPLETION_TOKENS = 16

_SHARED = frozenset(SamplingParams.__struct_fields__) & frozenset(Generate.__struct_fields__)


def chat_sampling(asked: ChatRequest, defaults: SamplingParams) -> SamplingParams:
    """How to sample for a chat request; the answer may fill the context unless a limit is given."""
    if asked.max_tokens is not None and asked.max_completion_tokens not in (None, asked.max_tokens):
        raise ApiError(
            400,
            f"`max_tokens` is {asked.max_tokens} and `max_completion_tokens` is {asked.max_completion_tokens}; "
            "they are two names of one limit",
            param="max_tokens",
        )
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
    _check_logprobs(asked.top_logprobs, "top_logprobs")
    changes: dict[str, object] = {
        "max_tokens": asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens,
        "logprobs": (asked.top_logprobs or 0) if asked.logprobs else None,
    }
    return _sampling(asked, defaults, changes)


def completion_sampling(asked: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """How to sample for a completion request."""
    _check_logprobs(asked.logprobs, "logprobs")
    of_prompt = asked.logprobs if asked.echo else None
    limit = DEFAULT_COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
    return _sampling(asked, defaults, {"max_tokens": limit, "logprobs": asked.logprobs, "prompt_logprobs": of_prompt})


def completion_prompts(asked: CompletionRequest) -> list[str | list[int]]:
    """The prompts, each a text or token ids: `prompt` may be one or a list of either."""
    prompt = asked.prompt
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))  # quick also for millions of ids, which nobody has refused yet
    if len(kinds) != 1 or bool in kinds:
        raise ApiError(
            400, "`prompt` must be a text, token ids, or a list with only texts or only lists of ids", param="prompt"
        )
    return [cast("list[int]", prompt)] if int in kinds else cast("list[str | list[int]]", prompt)


def chat_messages(messages: list[Message], field: str = "messages") -> list[dict[str, str]]:
    """The messages as a chat template takes them: content as one text, `developer` under its older name."""
    if not messages:
        raise ApiError(400, f"`{field}` is empty", param=field)
    return [_template_message(message, f"{field}[{number}]") for number, message in enumerate(messages)]


def _template_message(message: Message, where: str) -> dict[str, str]:
    if message.content is None:
        raise ApiError(400, f"`{where}.content` is missing", param=f"{where}.content")
    plain: dict[str, str] = {"role": "system" if message.role == "developer" else message.role}
    plain["content"] = message.content if isinstance(message.content, str) else "".join(_texts(message.content, where))
    for name, value in (("name", message.name), ("tool_call_id", message.tool_call_id)):
        if value is not None:
            plain[name] = value
    return plain


def _texts(parts: list[Part], where: str) -> list[str]:
    texts = []
    for number, part in enumerate(parts):
        if part.type != "text" or part.text is None:
            wrong = "without `text`" if part.type == "text" else f"of type `{part.type}`, only text is supported"
            raise ApiError(400, f"`{where}` has a content part {wrong}", param=f"{where}.content[{number}]")
        texts.append(part.text)
    return texts


def _sampling(asked: Generate, defaults: SamplingParams, changes: dict[str, object]) -> SamplingParams:
    given = msgspec.structs.asdict(asked)
    if asked.use_beam_search:  # what the model's makers recommend is for sampling
        defaults = SamplingParams(max_tokens=defaults.max_tokens)
    changes |= {name: given[name] for name in _SHARED if name not in changes}
    changes["stop"] = _stops(asked.stop)
    if asked.stop_token_ids is not None:
        changes["stop_token_ids"] = tuple(asked.stop_token_ids)
    if asked.stream_options is not None and not asked.stream:
        raise ApiError(400, "`stream_options` needs `stream` to be true", param="stream_options")
    if abs(asked.priority or 0) > MAX_PRIORITY:
        raise ApiError(400, f"`priority` is {asked.priority}, it must be within ±{MAX_PRIORITY}", param="priority")
    return merge_sampling(defaults, changes)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > MAX_STOPS:
        raise ApiError(400, f"`stop` has {len(stops)} strings, at most {MAX_STOPS} are allowed", param="stop")
    return stops


def _check_logprobs(count: int | None, field: str) -> None:
    if count is not None and not 0 <= count <= MAX_LOGPROBS:
        raise ApiError(400, f"`{field}` is {count}, it must be from 0 to {MAX_LOGPROBS}", param=field)
