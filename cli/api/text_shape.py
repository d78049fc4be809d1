"""`/v1/completions`, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from ...engine.request import FinishReason, TokenLogprobs
from ...engine.tokenizer import Tokenizer
from .responses import TextChoice, TextCompletion, TextLogprobs, Usage
from .shape import Frame, Heading, Piece
from .token_text import TextLogprobsWriter, joined


class TextShape:
    """See Shape. `echo` is the text to begin each choice with, "" for none.

    `echoed` are each choice's prompt as token ids where its logprobs are shown with the echo. `logprobs` is how many
    likely tokens to show beside each, None for no logprobs at all. `prompts` are each choice's prompt as token ids if
    the client asked for ids. `chunk_usage` is what every chunk but the last says of usage.
    """

    def __init__(
        self,
        heading: Heading,
        tokenizer: Tokenizer,
        echo: Sequence[str],
        echoed: Sequence[tuple[int, ...]] | None,
        logprobs: int | None,
        chunk_usage: UnsetType | None,
        prompts: Sequence[tuple[int, ...]] | None,
    ) -> None:
        self._heading, self._chunk_usage = heading, chunk_usage
        self._echo, self._echoed, self._prompts = echo, echoed, prompts
        self._frames: dict[int, Frame] = {}  # by choice, where pieces are nothing but text
        self._writers = (
            None if logprobs is None else [TextLogprobsWriter(tokenizer, len(text), logprobs > 0) for text in echo]
        )

    def opening(self, choice: int, of_prompt: tuple[TokenLogprobs, ...]) -> bytes | None:
        """The prompt, if it is to be echoed or its ids are wanted."""
        opening = TextChoice(choice, self._echo[choice], self._logprobs_of_prompt(choice, of_prompt))
        if self._prompts is not None:
            opening.prompt_token_ids = list(self._prompts[choice])
        return self._chunk(opening) if self._echo[choice] or self._prompts is not None else None

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
            before, logprobs = self._logprobs_of_prompt(index, piece.of_prompt), self._logprobs_of(index, piece)
            if before is not None and logprobs is not None:
                logprobs = joined(before, logprobs)
            part = TextChoice(index, self._echo[index] + piece.text, logprobs, finish, self._ids_of(piece))
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

    def _logprobs_of_prompt(self, choice: int, entries: tuple[TokenLogprobs, ...]) -> TextLogprobs | None:
        if self._writers is None or self._echoed is None:
            return None
        return self._writers[choice].write_prompt(self._echoed[choice], entries)

    def _ids_of(self, piece: Piece) -> list[int] | UnsetType:
        return UNSET if self._prompts is None else list(piece.tokens)
