"""The parts of an answer, before they are written in one endpoint's words or the other's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ...engine.frontend import TextDelta
from ...engine.request import FinishReason, Request, TokenLogprobs
from .responses import PromptDetails, Usage


@dataclass(frozen=True, slots=True)
class Heading:
    """What every object of one answer begins with."""

    id: str
    created: int
    model: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one choice and the text they made.

    `logprobs` are empty if they were not asked for, as are `of_prompt`: those of the tokens of the choice's prompt but
    the first, in the choice's first piece.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    of_prompt: tuple[TokenLogprobs, ...] = ()


class Frame:
    """A chunk with a text left open, for all the chunks of one choice that differ in nothing else."""

    __slots__ = ("_head", "_tail")

    def __init__(self, chunk: msgspec.Struct, field: str) -> None:
        """`chunk` has "" in the field of this name, and in no other."""
        opening = f'"{field}":'.encode()
        self._head, found, self._tail = msgspec.json.encode(chunk).partition(opening + b'""')  # in a text, " is \\"
        assert found, field
        self._head += opening

    def fill(self, text: str) -> bytes:
        """The chunk with this text."""
        return self._head + msgspec.json.encode(text) + self._tail


class Shape(Protocol):
    """Writes an answer as the JSON of one endpoint. Choices are numbered through: prompt by prompt, n for each."""

    def opening(self, choice: int, of_prompt: tuple[TokenLogprobs, ...]) -> bytes | None:
        """The chunk that comes before a choice's text, if there is one; it may show the prompt's logprobs."""

    def piece(self, choice: int, piece: Piece) -> bytes:
        """A chunk of text."""

    def ending(self, choice: int, finish: FinishReason) -> bytes:
        """A choice's last chunk."""

    def totals(self, usage: Usage) -> bytes:
        """The chunk after all choices have ended."""

    def whole(self, choices: Sequence[tuple[Piece, FinishReason]], usage: Usage) -> bytes:
        """The answer as one object."""


class Tally:
    """Token counts of one answer while it grows. Samples of one prompt share it, so it counts once."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.prompt_tokens = sum(len(request.prompt) for request in requests)
        self.completion_tokens = 0
        self._cached = [0] * len(requests)

    def add(self, which: int, delta: TextDelta) -> None:
        """Count what came for request number `which`."""
        self.completion_tokens += len(delta.tokens)
        if delta.usage is not None:
            self._cached[which] = max(self._cached[which], delta.usage.cached_tokens)

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached)

    def usage(self) -> Usage:
        """The counts as the API shows them."""
        total = self.prompt_tokens + self.completion_tokens
        return Usage(self.prompt_tokens, self.completion_tokens, total, PromptDetails(self.cached_tokens))
