"""A world of known delays: an event loop whose time passes only while everybody waits, and a server inside it.

Nothing depends on how fast the machine is, and a run of minutes takes milliseconds.
"""

import asyncio
import dataclasses
import json
from collections.abc import Callable

import httpx


class VirtualLoop(asyncio.SelectorEventLoop):
    """Instead of sleeping it moves its clock. `patience` are real seconds to wait for sockets before that."""

    patience = 0.0

    def __init__(self):
        super().__init__()
        self._virtual_s = 1000.0
        real_select = self._selector.select

        def select(timeout=None):
            if timeout is None:
                return real_select(None)
            events = real_select(min(timeout, self.patience))
            if not events:
                self._virtual_s += timeout
            return events

        self._selector.select = select

    def time(self):
        return self._virtual_s


def run(main):
    """The coroutine's result, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


@dataclasses.dataclass(frozen=True)
class Answer:
    """How one request is answered: `ttft_s`, then `pieces` of `tokens_per_piece` tokens, `gap_s` between them.

    status, error_after, cut_after   an HTTP error; an error event, or the end of the stream, after so many pieces
    """

    ttft_s: float = 0.2
    gap_s: float = 0.05
    pieces: int = 11
    tokens_per_piece: int = 1
    prompt_tokens: int = 100
    cached_tokens: int | None = 0
    usage: bool = True
    counted: int | None = None  # what usage says, if not the truth
    status: int = 200
    error_after: int | None = None
    cut_after: int | None = None

    @property
    def e2e_s(self):
        return self.ttft_s + self.gap_s * (self.pieces - 1)


class Server(httpx.AsyncBaseTransport):
    """Answers request number i as `script(i)` says, at most `capacity` at once. Keeps the requests' bodies."""

    def __init__(self, script: Callable[[int], Answer], capacity: int = 1 << 30):
        self.script, self.bodies, self.open, self.headers = script, [], 0, []
        self.capacity = asyncio.Semaphore(capacity)
        self.models = {"data": [{"id": "mock", "max_model_len": 8192}]}
        self.down = 0  # how many times nobody answers yet

    async def handle_async_request(self, request):
        if self.down:
            self.down -= 1
            raise httpx.ConnectError("refused", request=request)
        self.headers.append(dict(request.headers))
        if request.url.path == "/v1/models":
            return httpx.Response(200, json=self.models)
        answer = self.script(len(self.bodies))
        self.bodies.append(json.loads(request.content))
        if answer.status != 200:
            return httpx.Response(answer.status, json={"error": {"message": "overloaded", "type": "x"}})
        return httpx.Response(200, stream=_Stream(self, answer, request.url.path.endswith("/chat/completions")))


class _Stream(httpx.AsyncByteStream):
    def __init__(self, server, answer, chat):
        self.server, self.answer, self.chat = server, answer, chat

    async def __aiter__(self):
        answer = self.answer
        self.server.open += 1
        try:
            async with self.server.capacity:
                for number in range(answer.pieces):
                    await asyncio.sleep(answer.gap_s if number else answer.ttft_s)
                    if number == answer.error_after:
                        yield event({"error": {"message": "out of memory"}})
                        return
                    if number == answer.cut_after:
                        return
                    yield event({"choices": [self._choice(number, number == answer.pieces - 1)]})
                if answer.usage:
                    yield event({"choices": [], "usage": self._usage()})
                yield b"data: [DONE]\n\n"
        finally:
            self.server.open -= 1

    def _choice(self, number, last):
        finish = "length" if last else None
        text = f"t{number} "
        return {"delta": {"content": text}, "finish_reason": finish} if self.chat else {
            "text": text, "finish_reason": finish,
        }  # fmt: skip

    def _usage(self):
        answer = self.answer
        tokens = answer.pieces * answer.tokens_per_piece if answer.counted is None else answer.counted
        usage = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": tokens}
        if answer.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": answer.cached_tokens}
        return usage


def event(value):
    return b"data: " + json.dumps(value).encode() + b"\n\n"
