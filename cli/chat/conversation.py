"""A conversation as a list of messages, and one turn of it.

Every turn encodes the whole conversation again. That costs microseconds, keeps the chat template in charge of every
token, and is cheap to compute because the engine's prefix cache still holds all turns before this one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...engine.request import FinishReason, SamplingParams
from ...kernels.errors import LlmctlError

if TYPE_CHECKING:
    from ...engine.frontend import Frontend


@dataclass(slots=True)
class Conversation:
    """The messages so far. A system prompt stands before them and survives `reset`."""

    system: str = ""
    turns: list[dict[str, str]] = field(default_factory=list)

    def messages(self, question: str) -> list[dict[str, str]]:
        """All messages with a new question behind them; the conversation itself is unchanged."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.turns, {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        """Remember a question and its answer, or what there is of it."""
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.turns.clear()


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer and what it took.

    finish          None when it was interrupted
    cached_tokens   of the prompt, served by the prefix cache; None when it was interrupted before that was told
    first_token_s   from the question to the first token
    decode_s        from the first token to the last
    """

    text: str
    finish: FinishReason | None
    prompt_tokens: int
    cached_tokens: int | None
    tokens: int
    first_token_s: float
    decode_s: float

    @property
    def tokens_per_s(self) -> float:
        """Speed after the first token; 0 for an answer too short to tell."""
        return (self.tokens - 1) / self.decode_s if self.tokens > 1 and self.decode_s > 0 else 0.0


def ask(
    frontend: Frontend,
    messages: list[dict[str, str]],
    sampling: SamplingParams,
    write: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """The answer to the last message, handed to `write` piece by piece as it is made.

    Ctrl-C (KeyboardInterrupt) ends it early: the request is aborted and what was written so far is returned. Errors of
    the engine are raised, CapacityError among them for a conversation that has outgrown the context.
    """
    start = clock()
    prompt = frontend.chat_prompt(messages)
    pieces: list[str] = []
    finish: FinishReason | None = None
    prompt_tokens, tokens = len(prompt), 0
    cached_tokens: int | None = None
    first = last = start
    with contextlib.closing(frontend.stream(prompt, sampling)) as stream:
        try:
            for delta in stream:
                if delta.tokens:
                    last = clock()
                    first = first if tokens else last
                    tokens += len(delta.tokens)
                if delta.text:
                    pieces.append(delta.text)
                    write(delta.text)
                if delta.usage is not None:
                    prompt_tokens, cached_tokens = delta.usage.prompt_tokens, delta.usage.cached_tokens
                    tokens = delta.usage.completion_tokens
                if delta.finish is FinishReason.ERROR:
                    raise frontend.client.failure or LlmctlError(delta.error)
                finish = delta.finish or finish
        except KeyboardInterrupt:
            finish = None
    return Answer("".join(pieces), finish, prompt_tokens, cached_tokens, tokens, first - start, last - first)
