"""How an engine is, asked in this process or of a server: open requests, and what KV blocks hold."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

import httpx

from ...engine.frontend import Frontend
from .http_target import join_url
from .soak import Figures

_TIMEOUT_S = 30.0
_METRIC = re.compile(r"^(?:llmctl|vllm):(\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def of_engine(frontend: Frontend) -> Callable[[], Awaitable[Figures]]:
    """Asks an engine of this process."""

    async def ask() -> Figures:
        stats = await asyncio.to_thread(frontend.stats)
        return Figures(
            open=stats.running + stats.waiting,
            blocks_total=stats.blocks_total,
            blocks_free=stats.blocks_free,
            blocks_cached=stats.blocks_cached,
        )

    return ask


def of_server(client: httpx.AsyncClient, base_url: str) -> Callable[[], Awaitable[Figures]]:
    """Asks a server's `/metrics`; one that has none, or does not answer, says nothing."""
    url = join_url(base_url.rstrip("/").removesuffix("/v1"), "/metrics")

    async def ask() -> Figures:
        try:
            response = await client.get(url, timeout=_TIMEOUT_S)
        except httpx.HTTPError:
            return Figures()
        return read_metrics(response.text) if response.status_code == httpx.codes.OK else Figures()

    return ask


def read_metrics(text: str) -> Figures:
    """The figures in what Prometheus scrapes."""
    found = {name: int(float(value)) for name, value in _METRIC.findall(text) if name in _NAMES}
    running, waiting = found.get("num_requests_running"), found.get("num_requests_waiting")
    return Figures(
        open=None if running is None or waiting is None else running + waiting,
        blocks_total=found.get("kv_blocks"),
        blocks_free=found.get("kv_blocks_free"),
        blocks_cached=found.get("kv_blocks_cached"),
    )


_NAMES = ("num_requests_running", "num_requests_waiting", "kv_blocks", "kv_blocks_free", "kv_blocks_cached")
