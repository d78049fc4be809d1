"""HTTP/1.1 over plain sockets for the measuring client, which shares its CPUs with the servers that it measures.

The usual transport of httpx costs about as much for each piece of a stream as a server does, and would take it from the
faster server's time rather than from the slower one's. This one knows what a benchmark meets, and no more: a request
with a body of known length on a connection of its own, answered in chunks, by length, or until the connection ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx

_HEAD_BYTES = 1 << 16


class LeanTransport(httpx.AsyncBaseTransport):
    """Plain HTTP, a connection for each request; anything else is an httpx.TransportError."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        if url.scheme != "http":
            raise httpx.UnsupportedProtocol(f"`{url.scheme}` is not plain HTTP", request=request)
        connect_s = request.extensions.get("timeout", {}).get("connect")
        try:
            async with asyncio.timeout(connect_s):
                reader, writer = await asyncio.open_connection(url.host, url.port or 80, limit=_HEAD_BYTES)
        except (OSError, TimeoutError) as error:
            raise httpx.ConnectError(str(error) or "no connection in time", request=request) from error
        body = _Body(reader, writer, request)
        try:
            content = await request.aread()
            head = [f"{request.method} {url.raw_path.decode()} HTTP/1.1"]
            head += [f"{name}: {value}" for name, value in request.headers.items() if name != "connection"]
            writer.write("\r\n".join([*head, "connection: close", "", ""]).encode() + content)
            return await body.begin()
        except BaseException:
            writer.close()
            raise


class _Body(httpx.AsyncByteStream):
    """The rest of an answer; closing it closes the connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: httpx.Request) -> None:
        self._reader, self._writer, self._request = reader, writer, request
        self._length: int | None = None
        self._chunked = False

    async def begin(self) -> httpx.Response:
        """The response, once its head has come."""
        try:
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(head[0].split(" ", 2)[1])
        except (OSError, asyncio.IncompleteReadError) as error:
            raise httpx.RemoteProtocolError("the server left before it answered", request=self._request) from error
        except (ValueError, IndexError, asyncio.LimitOverrunError) as error:
            raise httpx.RemoteProtocolError("the server does not answer like HTTP", request=self._request) from error
        headers = httpx.Headers(
            [(name, value.strip()) for name, _, value in (line.partition(":") for line in head[1:-2])]
        )
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        if not self._chunked and "content-length" in headers:
            self._length = int(headers["content-length"])
        return httpx.Response(status, headers=headers, stream=self, request=self._request)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            if self._chunked:
                while size := int(await self._reader.readuntil(b"\r\n"), 16):
                    yield (await self._reader.readexactly(size + 2))[:-2]
            elif self._length is not None:
                yield await self._reader.readexactly(self._length)
            else:
                while data := await self._reader.read(_HEAD_BYTES):
                    yield data
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            raise httpx.RemoteProtocolError(
                "the server left in the middle of its answer", request=self._request
            ) from error

    async def aclose(self) -> None:
        self._writer.close()
