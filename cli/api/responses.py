"""What clients get, as records: field names and order are OpenAI's. A field left at UNSET is not sent at all."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from ...engine.request import FinishReason
from ...engine.schedule.states import SequenceState


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TopLogprob(msgspec.Struct):
    """`bytes` is exact where `token` cannot be: a token may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextLogprobs(msgspec.Struct):
    """Parallel lists, one entry per token; `text_offset` counts characters from the start of the choice's text.

    The first token of an echoed prompt follows nothing, so that its entries are null.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextCompletion(msgspec.Struct):
    """A whole completion, or a piece of a streamed one: they look the same."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET


class Model(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "llmctl"


class ModelList(msgspec.Struct):
    data: list[Model]
    object: str = "list"


class Tokens(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Detokenized(msgspec.Struct):
    prompt: str


class Health(msgspec.Struct):
    """`status` is ok, loading, draining, stuck or dead; only the first comes with HTTP 200.

    `open` counts the sequences whose answers are not complete, `running` and `waiting` are the engine's view of them.
    """

    status: str
    detail: str = ""
    open: int = 0
    last_step_age_s: float = 0.0
    steps: int = 0
    running: int = 0
    waiting: int = 0


class Sequences(msgspec.Struct):
    """What `/debug/requests` shows; those that have ended come first."""

    sequences: tuple[SequenceState, ...]


class Version(msgspec.Struct):
    version: str
    system_fingerprint: str | None
