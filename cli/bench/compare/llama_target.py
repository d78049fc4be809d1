"""llama.cpp's server through its own `/completion`: every piece says which tokens it holds, and the last one counts.

Its sampler chain is set to the shortest that is greedy, so that it is not slowed down by samplers that change nothing.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator

import httpx

from ..targets import Counts, Piece, RequestFailed
from ..workload import Item, ids_of


class LlamaTarget:
    """A llama-server whose endpoint is `url`."""

    def __init__(self, name: str, client: httpx.AsyncClient, url: str, pids: tuple[int, ...]) -> None:
        self._client, self._url = client, url
        self.backend, self.pids = name, pids

    async def send(self, item: Item) -> AsyncGenerator[Piece, None]:
        """See Target."""
        request = self._client.build_request("POST", self._url, json=self.body(item))
        try:
            response = await self._client.send(request, stream=True)
            try:
                if response.status_code != httpx.codes.OK:
                    content = (await response.aread()).decode(errors="replace")
                    raise RequestFailed(f"HTTP {response.status_code}: {content[:300]}")
                async for piece in _pieces(response.aiter_lines()):
                    yield piece
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}".rstrip(": ")) from error

    def body(self, item: Item) -> dict[str, object]:
        """The request's JSON."""
        return {
            "prompt": list(ids_of(item.prompt)),
            "n_predict": item.max_tokens,
            "ignore_eos": True,
            "cache_prompt": False,
            "stream": True,
            "samplers": ["top_k"],
            "top_k": 1,
            "temperature": 0.0,
        }


async def _pieces(lines: AsyncIterator[str]) -> AsyncGenerator[Piece, None]:
    finished = False
    async for line in lines:
        field, _, data = line.partition(":")
        if field not in ("data", "error") or data.strip() == "[DONE]":
            continue
        try:
            event = json.loads(data)
        except json.JSONDecodeError as error:
            raise RequestFailed(f"the stream holds no JSON: {data[:80]!r}") from error
        if field == "error" or "error" in event:
            raise RequestFailed(f"error in the stream: {event.get('error', event)}")
        if tokens := event.get("tokens"):
            yield Piece(len(tokens))
        if event.get("stop"):
            finished = True
            cached = event.get("timings", {}).get("cache_n")
            yield Piece(0, Counts(event.get("tokens_evaluated"), event.get("tokens_predicted"), cached))
    if not finished:
        raise RequestFailed("the stream ended before the answer was finished")
