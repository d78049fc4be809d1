"""`/v1/chat/completions`, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from ...engine.request import FinishReason, TokenLogprobs
from ...engine.tokenizer import Tokenizer
from .responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Delta,
    Usage,
)
from .shape import Frame, Heading, Piece
from .token_text import chat_logprob


class ChatShape:
    """See Shape. `prompt` are the prompt's token ids if the client asked for ids, and then those of the answer go too.

    `chunk_usage` is what every chunk but the last says of usage: null if the client asked for it, else nothing.
    """

    def __init__(
        self,
        heading: Heading,
        tokenizer: Tokenizer,
        logprobs: bool,
        chunk_usage: UnsetType | None,
        prompt: tuple[int, ...] | None,
    ) -> None:
        self._heading, self._tokenizer = heading, tokenizer
        self._logprobs, self._chunk_usage, self._prompt = logprobs, chunk_usage, prompt
        self._frames: dict[int, Frame] = {}  # by choice, where pieces are nothing but text

    def opening(self, choice: int, of_prompt: tuple[TokenLogprobs, ...]) -> bytes:
        """The assistant's role."""
        delta = Delta(role="assistant", content="", refusal=None)
        chunk = self._chunk([ChatChunkChoice(choice, delta)], self._chunk_usage)
        if self._prompt is not None:
            chunk.prompt_token_ids = list(self._prompt)
        return msgspec.json.encode(chunk)

    def piece(self, choice: int, piece: Piece) -> bytes:
        """See Shape."""
        if not self._logprobs and self._prompt is None:
            if choice not in self._frames:
                chunk = self._chunk([ChatChunkChoice(choice, Delta(content=""))], self._chunk_usage)
                self._frames[choice] = Frame(chunk, "content")
            return self._frames[choice].fill(piece.text)
        part = ChatChunkChoice(
            choice, Delta(content=piece.text), self._logprobs_of(piece), token_ids=self._ids_of(piece)
        )
        return msgspec.json.encode(self._chunk([part], self._chunk_usage))

    def ending(self, choice: int, finish: FinishReason) -> bytes:
        """See Shape."""
        part = ChatChunkChoice(choice, Delta(), finish_reason=finish)
        return msgspec.json.encode(self._chunk([part], self._chunk_usage))

    def totals(self, usage: Usage) -> bytes:
        """See Shape."""
        return msgspec.json.encode(self._chunk([], usage))

    def whole(self, choices: Sequence[tuple[Piece, FinishReason]], usage: Usage) -> bytes:
        """See Shape."""
        heading = self._heading
        answer = ChatCompletion(
            heading.id,
            heading.created,
            heading.model,
            heading.fingerprint,
            [
                ChatChoice(index, ChatMessage(piece.text), self._logprobs_of(piece), finish, self._ids_of(piece))
                for index, (piece, finish) in enumerate(choices)
            ],
            usage,
        )
        if self._prompt is not None:
            answer.prompt_token_ids = list(self._prompt)
        return msgspec.json.encode(answer)

    def _chunk(self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        heading = self._heading
        return ChatChunk(heading.id, heading.created, heading.model, heading.fingerprint, choices, usage=usage)

    def _logprobs_of(self, piece: Piece) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        pairs = zip(piece.tokens, piece.logprobs, strict=True)
        return ChatLogprobs([chat_logprob(self._tokenizer, token, entry) for token, entry in pairs])

    def _ids_of(self, piece: Piece) -> list[int] | UnsetType:
        return UNSET if self._prompt is None else list(piece.tokens)
