"""What a run can be pointed at. A target turns an Item into a stream of Pieces; the driver notes when they come."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ...engine.frontend import Frontend, TextAssembler
from ...engine.request import FinishReason, Output, SamplingParams
from .workload import Item, Prompt, form_of, ids_of


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of a finished request as the target counts them; None where it does not say."""

    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Piece:
    """Something that arrived: text of at least one token, or the counts at the end. `tokens` is None where unknown."""

    tokens: int | None = None
    counts: Counts | None = None


class RequestFailed(Exception):
    """A request that was not answered in full, and why."""


class Target(Protocol):
    """`backend` names it in tables; `pids` are the roots of the process trees whose memory is counted as its own."""

    backend: str
    pids: tuple[int, ...]

    def send(self, item: Item) -> AsyncGenerator[Piece, None]:
        """The pieces of the answer. Raises RequestFailed; closing the generator ends the request at the target."""


class InProcess:
    """Our engine on a thread of this process."""

    def __init__(self, frontend: Frontend, sampling: SamplingParams) -> None:
        self._frontend, self._sampling = frontend, sampling
        self.backend = f"llmctl {frontend.info.weight_format}"
        self.pids: tuple[int, ...] = (os.getpid(),)

    async def send(self, item: Item) -> AsyncGenerator[Piece, None]:
        """See Target. Tokens become text on the way, as they do for a user."""
        frontend = self._frontend
        sampling = msgspec.structs.replace(self._sampling, max_tokens=item.max_tokens)
        request = frontend.request(self._prompt(item.prompt), sampling)
        assembler, inbox = TextAssembler(request, frontend.tokenizer), _Inbox()
        frontend.client.submit(request, inbox.put)
        try:
            while not assembler.finished:
                for output in await inbox.take():
                    delta = assembler.push(output)
                    if delta is None:
                        continue
                    if delta.finish in (FinishReason.ERROR, FinishReason.ABORT):
                        raise RequestFailed(delta.error or "the engine ended the request")
                    if delta.finish is not None and output.finish is None:
                        frontend.client.abort(request.id, output.index)
                    usage = delta.usage
                    yield Piece(
                        len(delta.tokens),
                        None
                        if usage is None
                        else Counts(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
                    )
        finally:
            if not assembler.finished:
                frontend.client.abort(request.id)

    def _prompt(self, prompt: Prompt) -> str | tuple[int, ...]:
        assert form_of(prompt) != "chat", "conversations are encoded when the workload is built"
        return prompt if isinstance(prompt, str) else ids_of(prompt)


class _Inbox:
    """Outputs of one request from the engine's thread to the event loop."""

    def __init__(self) -> None:
        self._loop, self._ready = asyncio.get_running_loop(), asyncio.Event()
        self._outputs: deque[Output] = deque()

    def put(self, output: Output) -> None:
        """On the engine's thread. An output may still come when the loop is gone; then nobody waits for it."""
        self._outputs.append(output)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._ready.set)

    async def take(self) -> list[Output]:
        """Everything that has come, at least one."""
        await self._ready.wait()
        self._ready.clear()
        taken = []
        while self._outputs:
            taken.append(self._outputs.popleft())
        return taken


def sending(target: Target, item: Item) -> AbstractAsyncContextManager[AsyncGenerator[Piece, None]]:
    """`target.send` as a context that ends the request when it is left early."""
    return aclosing(target.send(item))
