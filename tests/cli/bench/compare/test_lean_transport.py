"""The measuring client's own HTTP, against a server that writes exactly these bytes."""

import asyncio

import httpx
import pytest

from llmctl.cli.bench.compare.lean_transport import LeanTransport


def ask(answer, *, method="GET", content=None, scheme="http", slices=1):
    """(status, lines of the body, the request's bytes) of one request that is answered so, in so many writes."""
    received = []

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")), 0)
        received.append(head + await reader.readexactly(length))
        for start in range(0, len(answer), max(1, len(answer) // slices)):
            writer.write(answer[start : start + max(1, len(answer) // slices)])
            await writer.drain()
        writer.close()

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, httpx.AsyncClient(transport=LeanTransport()) as client:
            request = client.build_request(method, f"{scheme}://127.0.0.1:{port}/a?b=c", json=content)
            response = await client.send(request, stream=True)
            lines = [line async for line in response.aiter_lines()]
            await response.aclose()
            return response.status_code, lines

    status, lines = asyncio.run(main())
    return status, lines, received[0]


CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"9\r\ndata: 1\n\n\r\n11\r\ndata: 22\n\ndata: \n\r\n0\r\n\r\n"
)


@pytest.mark.parametrize("slices", [1, 7, len(CHUNKED)])
def test_a_stream_of_chunks_is_the_same_however_it_is_cut(slices):
    assert ask(CHUNKED, slices=slices)[:2] == (200, ["data: 1", "", "data: 22", "", "data: "])


def test_answers_by_length_and_to_the_end_of_the_connection_are_read_whole():
    assert ask(b"HTTP/1.1 503 Busy\r\nContent-Length: 5\r\n\r\nhelloxx")[:2] == (503, ["hello"])
    assert ask(b"HTTP/1.0 200 OK\r\n\r\na\nb")[:2] == (200, ["a", "b"])
    assert ask(b"HTTP/1.1 204 \r\nContent-Length: 0\r\n\r\n")[0] == 204


def test_the_request_is_whole_and_closes_its_connection():
    request = ask(CHUNKED, method="POST", content={"a": [1, 2]})[2]
    head, _, body = request.partition(b"\r\n\r\n")
    assert head.startswith(b"POST /a?b=c HTTP/1.1\r\n") and b"connection: close" in head and b"host: 127.0.0.1:" in head
    assert body == b'{"a":[1,2]}'


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "left before it answered"),
        (b"SSH-2.0-x\r\n\r\n", "does not answer like HTTP"),
        (CHUNKED[:-20], "left in the middle"),
        (CHUNKED.replace(b"11\r\n", b"zz\r\n"), "left in the middle"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello", "left in the middle"),
    ],
)
def test_what_is_not_whole_is_an_error(answer, message):
    with pytest.raises(httpx.RemoteProtocolError, match=message):
        ask(answer)


def test_nobody_at_the_other_end_and_other_protocols_are_errors():
    async def main(url):
        async with httpx.AsyncClient(transport=LeanTransport()) as client:
            await client.get(url, timeout=5)

    with pytest.raises(httpx.ConnectError):
        asyncio.run(main("http://127.0.0.1:1/"))
    with pytest.raises(httpx.UnsupportedProtocol):
        asyncio.run(main("https://127.0.0.1:1/"))
