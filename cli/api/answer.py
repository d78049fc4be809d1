"""From an accepted request to its answer, whole or streamed, and to its abort when nobody waits for it any more.

The connection is watched from the first moment: while the request waits for its turn, in the middle of a prompt,
between two chunks. When the client leaves, the work is cancelled, and leaving its `with` blocks aborts the sequences.
The status line is held back until the first token (or a while has passed), so that an error before it has its real
HTTP status.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...engine.frontend import Frontend, TextDelta
from ...engine.request import FinishReason, Request, TokenLogprobs
from ...kernels.errors import LlmctlError
from .admission import Place
from .deltas import Deltas, opened
from .errors import ApiError, bug, of_llmctl
from .journal import Record
from .service import Service
from .shape import Piece, Shape, Tally

log = logging.getLogger(__name__)

TURNS = 2  # of the loop, after which it has heard of a client that left right after its request
MORE_TURNS = 8  # after which the work of such a client has been cancelled too
PING_S = 15.0  # a stream that says nothing for so long is sent a comment, lest a proxy close it

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True)
class Job:
    """What an endpoint asks for.

    samples   sequences for each prompt
    prepare   makes the requests, one for each prompt; encoding may take long, so it is called on a thread
    shape     how to write the answer to these requests
    details   whether pieces without text matter: their logprobs or ids were asked for
    prompt    the field that holds the prompt, for errors
    max_wait_s  how long it can wait for its turn; None: as long as it takes
    """

    prompts: int
    samples: int
    prepare: Callable[[Frontend], Sequence[Request]]
    shape: Callable[[Frontend, Sequence[Request]], Shape]
    stream: bool
    include_usage: bool
    details: bool
    prompt: str
    max_wait_s: float | None = None

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples


class Answer(Response):
    """An ASGI response that does its work while it is sent, and is cancelled when the client leaves."""

    def __init__(self, job: Job, service: Service, record: Record) -> None:
        super().__init__()
        self._job, self._service, self._record = job, service, record

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or stop as soon as nobody listens."""
        leaving = asyncio.create_task(_client_left(receive))
        for _ in range(TURNS):
            await asyncio.sleep(0)
        if leaving.done():
            self._record.client_left()
            return
        working = asyncio.create_task(self._work(scope, receive, send, leaving))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)
        if working.cancelled():
            self._record.client_left()
        else:
            working.result()

    async def _work(self, scope: Scope, receive: Receive, send: Send, leaving: asyncio.Task[None]) -> None:
        job, service, record = self._job, self._service, self._record
        events = EventStream(send)
        try:
            engine = service.ready()
            frontend = engine.frontend
            await self._let_others_leave()
            with service.admission.admit(job.sequences, job.max_wait_s, record.tenant) as place:
                requests = await asyncio.to_thread(job.prepare, frontend)
                if leaving.done():  # while we were encoding, and it has not been our turn to be cancelled yet
                    raise asyncio.CancelledError
                tally = record.tally = Tally(requests)
                shape = job.shape(frontend, requests)
                with opened(frontend, engine.mailbox, requests) as deltas:
                    if job.stream:
                        await self._stream(deltas, shape, place, tally, events)
                    else:
                        body = await self._whole(deltas, shape, place, tally)
                        await Response(body, media_type="application/json")(scope, receive, send)
                record.answered()
        except Exception as error:  # whatever it is, the client gets an answer
            answer = service.explained(self._api_error(error))
            record.error = answer.code or answer.message
            if answer.status == 429 and answer.code:
                service.metrics.refused(answer.code)
            if events.begun:
                await events.fail(answer)
            else:
                await answer.response()(scope, receive, send)

    async def _let_others_leave(self) -> None:
        """Before a queue is called full: let the loop hear of clients that have left it meanwhile."""
        for _ in range(MORE_TURNS):
            if self._service.admission.has_room(self._job.sequences, self._record.tenant):
                break
            await asyncio.sleep(0)

    def _api_error(self, error: Exception) -> ApiError:
        if isinstance(error, ApiError):
            return error
        if isinstance(error, LlmctlError):
            return of_llmctl(error, self._job.prompt)
        log.error("request %s failed", self._record.id, exc_info=error)
        return bug(error)

    async def _stream(self, deltas: Deltas, shape: Shape, place: Place, tally: Tally, events: EventStream) -> None:
        gathered = [_Gathered() for _ in range(self._job.sequences)]
        opened_choices: set[int] = set()
        of_prompts: dict[int, tuple[TokenLogprobs, ...]] = {}  # they come with the first delta of each request
        while not deltas.finished:
            items = await deltas.next(PING_S)
            if not items:
                await events.ping()
                continue
            chunks: list[bytes] = []
            for choice, delta in self._noted(items, place, tally):
                gathered[choice].add(delta)
                of_prompt = of_prompts.setdefault(choice // self._job.samples, delta.prompt_logprobs)
                if choice not in opened_choices:
                    opened_choices.add(choice)
                    if (opening := shape.opening(choice, of_prompt)) is not None:
                        chunks.append(opening)
                if delta.text or delta.finish is not None:
                    piece = gathered[choice].take()
                    if piece.text or (piece.tokens and self._job.details):
                        chunks.append(shape.piece(choice, piece))
                if delta.finish is not None:
                    chunks.append(shape.ending(choice, delta.finish))
            await events.send(chunks)
        if self._job.include_usage:
            await events.send([shape.totals(tally.usage())])
        await events.done()

    async def _whole(self, deltas: Deltas, shape: Shape, place: Place, tally: Tally) -> bytes:
        gathered = [_Gathered() for _ in range(self._job.sequences)]
        finishes: dict[int, FinishReason] = {}
        of_prompts: dict[int, tuple[TokenLogprobs, ...]] = {}
        while not deltas.finished:
            for choice, delta in self._noted(await deltas.next(PING_S), place, tally):
                gathered[choice].add(delta)
                of_prompts.setdefault(choice // self._job.samples, delta.prompt_logprobs)
                if delta.finish is not None:
                    finishes[choice] = delta.finish
        choices = [
            (gathered[choice].take(of_prompts[choice // self._job.samples]), finishes[choice])
            for choice in range(self._job.sequences)
        ]
        return shape.whole(choices, tally.usage())

    def _noted(
        self, items: Sequence[tuple[int, TextDelta]], place: Place, tally: Tally
    ) -> Iterator[tuple[int, TextDelta]]:
        """The deltas and the choices they belong to, each after everything that counts has counted it."""
        now = time.monotonic()
        for which, delta in items:
            choice = which * self._job.samples + delta.index
            place.begin(choice)
            self._record.tokens_came(choice, delta, now)
            tally.add(which, delta)
            yield choice, delta


class EventStream:
    """Server-sent events. The response begins with the first of them."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def send(self, payloads: Sequence[bytes]) -> None:
        """Send these as one event each."""
        if payloads:
            await self._write(b"".join(b"data: " + payload + b"\n\n" for payload in payloads))

    async def ping(self) -> None:
        """Send a comment, which clients skip."""
        await self._write(b": ping\n\n")

    async def done(self) -> None:
        """End the stream the way clients wait for."""
        await self._write(b"data: [DONE]\n\n", more=False)

    async def fail(self, error: ApiError) -> None:
        """End the stream with an error, and without what would say that it is complete."""
        await self._write(b"data: " + error.body + b"\n\n", more=False)

    async def _write(self, data: bytes, more: bool = True) -> None:
        if not self.begun:
            self.begun = True
            head = Response(headers=_STREAM_HEADERS, media_type="text/event-stream").raw_headers
            headers = [pair for pair in head if pair[0] != b"content-length"]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})


class _Gathered:
    """Deltas of one choice that have not been written yet."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def add(self, delta: TextDelta) -> None:
        self._texts.append(delta.text)
        self._tokens += delta.tokens
        self._logprobs += delta.logprobs

    def take(self, of_prompt: tuple[TokenLogprobs, ...] = ()) -> Piece:
        piece = Piece("".join(self._texts), tuple(self._tokens), tuple(self._logprobs), of_prompt)
        for gathered in (self._texts, self._tokens, self._logprobs):
            gathered.clear()
        return piece


async def _client_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
