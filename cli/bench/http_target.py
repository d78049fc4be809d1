"""Any server that speaks the OpenAI API, by streaming.

What a server leaves out stays None: a usage that was not sent is not made up. Everything that keeps an answer from
being whole (a status, an error inside the stream, a stream that ends before its finish_reason) fails the request.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

import httpx

from ...engine.request import SamplingParams
from ...kernels.errors import UsageError
from .targets import Counts, Piece, RequestFailed
from .workload import Item, form_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_TEXT_KEYS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")  # of a delta: each is an answer
_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go: `url` ends in `path`; `model` is the server's name for it."""

    url: str
    chat: bool
    model: str
    api_key: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}


class OpenAIServer:
    """A server at a URL, called `name` in tables. `pids` may name its processes, if they are on this machine."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        endpoint: Endpoint,
        sampling: SamplingParams,
        pids: tuple[int, ...] = (),
        name: str = "",
    ) -> None:
        self._client, self._endpoint, self._sampling = client, endpoint, sampling
        self.backend = name or httpx.URL(endpoint.url).netloc.decode()
        self.pids = pids

    async def send(self, item: Item) -> AsyncGenerator[Piece, None]:
        """See Target."""
        request = self._client.build_request(
            "POST", self._endpoint.url, json=self.body(item), headers=self._endpoint.headers
        )
        try:
            response = await self._client.send(request, stream=True)
            try:
                if response.status_code != httpx.codes.OK:
                    raise RequestFailed(_refusal(response.status_code, await response.aread()))
                async for piece in _pieces(response.aiter_lines()):
                    yield piece
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}".rstrip(": ")) from error

    def body(self, item: Item) -> dict[str, object]:
        """The request's JSON. Fields that are not OpenAI's are sent only where they say something."""
        sampling, prompt = self._sampling, item.prompt
        kind = form_of(prompt)
        body: dict[str, object] = {"model": self._endpoint.model}
        if self._endpoint.chat:
            assert kind == "chat", kind
            body["messages"] = list(prompt)
        else:
            assert kind != "chat", kind
            body["prompt"] = prompt if isinstance(prompt, str) else list(prompt)
        body |= {"max_tokens": item.max_tokens, "stream": True, "stream_options": {"include_usage": True}}
        for name, value, silent in (
            ("temperature", sampling.temperature, 1.0),
            ("top_p", sampling.top_p, 1.0),
            ("top_k", sampling.top_k, 0),
            ("min_p", sampling.min_p, 0.0),
            ("repetition_penalty", sampling.repetition_penalty, 1.0),
            ("seed", sampling.seed, None),
            ("stop", list(sampling.stop), []),
            ("ignore_eos", sampling.ignore_eos, False),
        ):
            if value != silent:
                body[name] = value
        return body


def join_url(base_url: str, path: str) -> str:
    """`base_url` with `path`; a `/v1` that both have is there once. Raises UsageError for what is no HTTP URL."""
    try:
        base = httpx.URL(base_url if "://" in base_url else f"http://{base_url}")
    except httpx.InvalidURL as error:
        raise UsageError(f"--base-url is `{base_url}`: {error}", "such as http://localhost:8000") from error
    if base.scheme not in ("http", "https") or not base.host:
        raise UsageError(f"--base-url is `{base_url}`, which is no HTTP URL", "such as http://localhost:8000")
    root, path = str(base).rstrip("/"), "/" + path.lstrip("/")
    if root.endswith("/v1") and path.startswith("/v1/"):
        root = root.removesuffix("/v1")
    return root + path


def make_client(transport: httpx.AsyncBaseTransport | None = None, *, keep_alive: bool = True) -> httpx.AsyncClient:
    """A client without limits of its own: how many requests are open, and for how long, is the run's affair.

    Without `keep_alive` every request opens a connection: a server that closes idle ones may do so just when the next
    request is sent.
    """
    return httpx.AsyncClient(
        transport=transport,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None if keep_alive else 0),
        timeout=httpx.Timeout(None, connect=_CONNECT_S),
    )


async def find_model(
    client: httpx.AsyncClient, base_url: str, api_key: str, wanted: str, patience_s: float
) -> tuple[str, int]:
    """(the server's name for the model, its context or 0 if it does not say), once the server is ready.

    The model is `wanted` if the server has it, else its only one. Raises UsageError if it does not answer in time or
    has no such model.
    """
    url = join_url(base_url, "/v1/models")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while True:
        try:
            response = await client.get(url, headers=headers, timeout=_CONNECT_S)
            problem = "" if response.status_code == httpx.codes.OK else _refusal(response.status_code, response.content)
        except httpx.HTTPError as error:
            problem = f"{type(error).__name__}: {error}".rstrip(": ")
        if not problem:
            break
        if loop.time() >= deadline:
            raise UsageError(
                f"no server answers at {url}: {problem}",
                "start it, or give it time with --ready-check-timeout-sec",
            )
        await asyncio.sleep(1)
    try:
        models = {str(model["id"]): model.get("max_model_len") for model in response.json()["data"]}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{url} does not answer like an OpenAI server", "check --base-url") from error
    if wanted and models and wanted not in models:
        raise UsageError(f"the server has no model `{wanted}`", f"it has: {', '.join(models)}")
    if not wanted and len(models) != 1:
        raise UsageError(f"the server has {len(models)} models", f"name one with --model: {', '.join(models)}")
    name = wanted or next(iter(models))
    context = models.get(name)
    return name, context if type(context) is int else 0


async def _pieces(lines: AsyncIterator[str]) -> AsyncGenerator[Piece, None]:
    """Pieces out of the lines of a server-sent event stream."""
    finished = False
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            finished = True
            break
        try:
            event = json.loads(data)
        except json.JSONDecodeError as error:
            raise RequestFailed(f"the stream holds no JSON: {data[:80]!r}") from error
        if not isinstance(event, dict):
            raise RequestFailed(f"the stream holds no object: {data[:80]!r}")
        if event.get("error"):
            raise RequestFailed(f"error in the stream: {_message(event)}")
        for choice in event.get("choices") or ():
            finished = finished or choice.get("finish_reason") is not None
            if _has_text(choice):
                yield Piece()
        if event.get("usage"):
            yield Piece(0, _counts(event["usage"]))
    if not finished:
        raise RequestFailed("the stream ended before the answer was finished")


def _has_text(choice: dict[str, object]) -> bool:
    """Whether this chunk brings something of the answer: text, reasoning, or part of a tool call."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return any(delta.get(key) for key in _TEXT_KEYS)
    return bool(choice.get("text"))


def _counts(usage: dict[str, object]) -> Counts:
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Counts(*(value if type(value) is int else None for value in (
        usage.get("prompt_tokens"), usage.get("completion_tokens"), cached
    )))  # fmt: skip


def _refusal(status: int, content: bytes) -> str:
    try:
        message = _message(json.loads(content))
    except ValueError:
        message = content.decode(errors="replace").strip()
    return f"HTTP {status}" + (f": {message[:300]}" if message else "")


def _message(event: object) -> str:
    error = event.get("error", event) if isinstance(event, dict) else event
    return str(error.get("message", error) if isinstance(error, dict) else error)
