"""`/v1/completions`, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from ...engine.request import FinishReason
from ...engine.tokenizer import Tokenizer
from .responses import TextChoice, TextCompletion, TextLogprobs, Usage
from .shape import Frame, Heading, Piece
from .token_text import TextLogprobsWriter


class TextShape:
    """See Shape. `echo` is the text to begin each choice with, "" for none.

    `logprobs` is how many likely tokens to show beside each, None for no logprobs at all. `prompts` are each choice's
    prompt as token ids if the client asked for ids. `chunk_usage` is what every chunk but the last says of usage.
    """

    def __init__(
        self,
        heading: Heading,
        tokenizer: Tokenizer,
        echo: Sequence[str],
        logprobs: int | None,
        chunk_usage: UnsetType | None,
        prompts: Sequence[tuple[int, ...]] | None,
    ) -> None:
        self._heading, self._chunk_usage = heading, chunk_usage
        self._echo, self._prompts = echo, prompts
        self._frames: dict[int, Frame] = {}  # by choice, where pieces are nothing but text
        self._writers = (
            None if logprobs is None else [TextLogprobsWriter(tokenizer, len(text), logprobs > 0) for text in echo]
        )

    def opening(self, choice: int) -> bytes | None:
        """The prompt, if it is to be echoed or its ids are wanted."""
        if self._prompts is not None:
            return self._chunk(TextChoice(choice, self._echo[choice], prompt_token_ids=list(self._prompts[choice])))
        return self._chunk(TextChoice(choice, self._echo[choice])) if self._echo[choice] else None

    def piece(self, choice: int, piece: Piece) -> bytes:
        """See Shape."""
        if self._writers is None and self._prompts is None:
            if choice not in self._frames:
                self._frames[choice] = Frame(self._completion([TextChoice(choice, "")], self._chunk_usage), "text")
            return self._frames[choice].fill(piece.text)
        return self._chunk(
            TextChoice(choice, piece.text, self._logprobs_of(choice, piece), token_ids=self._ids_of(piece))
        )

    def ending(self, choice: int, finish: FinishReason) -> bytes:
        """See Shape."""
        return self._chunk(TextChoice(choice, "", finish_reason=finish))

    def totals(self, usage: Usage) -> bytes:
        """See Shape."""
        return self._encode([], usage)

    def whole(self, choices: Sequence[tuple[Piece, FinishReason]], usage: Usage) -> bytes:
        """See Shape."""
        parts = []
        for index, (piece, finish) in enumerate(choices):
            part = TextChoice(
                index, self._echo[index] + piece.text, self._logprobs_of(index, piece), finish, self._ids_of(piece)
            )
            if self._prompts is not None:
                part.prompt_token_ids = list(self._prompts[index])
            parts.append(part)
        return self._encode(parts, usage)

    def _chunk(self, choice: TextChoice) -> bytes:
        return self._encode([choice], self._chunk_usage)

    def _encode(self, choices: list[TextChoice], usage: Usage | UnsetType | None) -> bytes:
        return msgspec.json.encode(self._completion(choices, usage))

    def _completion(self, choices: list[TextChoice], usage: Usage | UnsetType | None) -> TextCompletion:
        heading = self._heading
        return TextCompletion(heading.id, heading.created, heading.model, heading.fingerprint, choices, usage=usage)

    def _logprobs_of(self, choice: int, piece: Piece) -> TextLogprobs | None:
        return None if self._writers is None else self._writers[choice].write(piece.tokens, piece.logprobs)

    def _ids_of(self, piece: Piece) -> list[int] | UnsetType:
        return UNSET if self._prompts is None else list(piece.tokens)
