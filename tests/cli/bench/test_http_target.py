"""What is sent to an OpenAI server, and what is made of its answers."""

import asyncio
import json

import httpx
import pytest

from llmctl.cli.bench.drive import drive
from llmctl.cli.bench.http_target import (
    CHAT,
    COMPLETIONS,
    Endpoint,
    OpenAIServer,
    find_model,
    join_url,
    make_client,
)
from llmctl.cli.bench.load_shape import Load
from llmctl.cli.bench.measures import summarize
from llmctl.cli.bench.workload import Item
from llmctl.engine.request import SamplingParams
from llmctl.kernels.errors import UsageError

from .conftest import GREEDY
from .virtual import Answer, Server, VirtualLoop, event, run


def target(path=COMPLETIONS, sampling=GREEDY, **endpoint):
    return OpenAIServer(None, Endpoint(f"http://mock:1{path}", path == CHAT, "m", **endpoint), sampling)


def test_body_has_what_the_request_says_and_nothing_that_says_nothing():
    assert target().body(Item((1, 2), 7)) == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "ignore_eos": True,
    }
    chat = target(CHAT, SamplingParams(temperature=0.5, top_p=0.9, seed=3, stop=("x",))).body(
        Item(({"role": "user", "content": "hi"},), 7)
    )
    assert chat["messages"] == [{"role": "user", "content": "hi"}] and "prompt" not in chat
    assert (chat["temperature"], chat["top_p"], chat["seed"], chat["stop"]) == (0.5, 0.9, 3, ["x"])
    assert "ignore_eos" not in chat, "OpenAI's own server refuses it"
    assert "temperature" not in target(sampling=SamplingParams()).body(Item("text", 1))


def test_answers_of_a_chat_endpoint_are_timed_alike(bombard):
    message = ({"role": "user", "content": "hi"},)
    seen, server = bombard(lambda _: Answer(), 2, path=CHAT, prompt=message)
    assert summarize([seen], 0).ttft_ms.mean == pytest.approx(200)
    assert server.bodies[0]["messages"] == list(message)


@pytest.mark.parametrize("key", ["content", "reasoning_content", "reasoning", "tool_calls"])
def test_reasoning_and_tool_calls_are_part_of_the_answer(key):
    """The role comes first and is no text; a time to first token that waits for `content` would skip the reasoning."""

    class Reasons(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request):
            return httpx.Response(200, stream=self.stream())

        class stream(httpx.AsyncByteStream):
            async def __aiter__(self):
                yield event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
                await asyncio.sleep(1)
                yield event({"choices": [{"delta": {key: "x"}}]})
                await asyncio.sleep(3)
                yield event({"choices": [{"delta": {"content": "y"}, "finish_reason": "stop"}]})

    async def main():
        async with make_client(Reasons()) as client:
            server = OpenAIServer(client, Endpoint(f"http://mock:1{CHAT}", True, "m"), GREEDY)
            return await drive(server, [Item(({"role": "user", "content": "x"},), 2)], (0.0,), Load(), 60)

    assert run(main()).observations[0].arrivals_s == pytest.approx((1, 4))


def test_key_is_sent_as_a_bearer_token():
    async def main():
        server = Server(lambda _: Answer())
        async with make_client(server) as client:
            target = OpenAIServer(client, Endpoint("http://mock:1/v1/completions", False, "m", "secret"), GREEDY)
            await drive(target, [Item((1,), 11)], (0.0,), Load(), 60)
        return server

    assert run(main()).headers[0]["authorization"] == "Bearer secret"


def test_server_that_cannot_be_reached_fails_the_request_with_the_reason():
    async def main():
        server = Server(lambda _: Answer())
        server.down = 1
        async with make_client(server) as client:
            target = OpenAIServer(client, Endpoint("http://mock:1/v1/completions", False, "m"), GREEDY)
            return await drive(target, [Item((1,), 11)] * 2, (0.0, 0.0), Load(1), 60)

    first, second = run(main()).observations
    assert (first.outcome, first.error) == ("failed", "ConnectError: refused")
    assert second.outcome == "ok"


@pytest.mark.parametrize(
    ("base", "url"),
    [
        ("http://host:8000", "http://host:8000/v1/completions"),
        ("http://host:8000/", "http://host:8000/v1/completions"),
        ("http://host:8000/v1", "http://host:8000/v1/completions"),
        ("http://host/api/v1/", "http://host/api/v1/completions"),
        ("host:8000", "http://host:8000/v1/completions"),
    ],
)
def test_base_url_may_be_written_in_any_usual_way(base, url):
    assert join_url(base, "/v1/completions") == url


@pytest.mark.parametrize("base", ["ftp://host", "http://", "file:///x"])
def test_what_is_no_http_url_is_a_usage_error(base):
    with pytest.raises(UsageError, match="--base-url"):
        join_url(base, COMPLETIONS)


def ask_models(models, wanted="", down=0, patience_s=0.0):
    async def main():
        server = Server(lambda _: Answer())
        server.models, server.down = models, down
        async with make_client(server) as client:
            return await find_model(client, "http://mock:1", "", wanted, patience_s)

    return run(main())


def test_only_model_of_a_server_is_found_with_its_context():
    assert ask_models({"data": [{"id": "a", "max_model_len": 512}]}) == ("a", 512)
    assert ask_models({"data": [{"id": "a"}]}) == ("a", 0)
    assert ask_models({"data": [{"id": "a"}, {"id": "b"}]}, "b") == ("b", 0)


def test_model_that_is_not_there_or_not_named_is_a_usage_error():
    with pytest.raises(UsageError, match="no model `c`"):
        ask_models({"data": [{"id": "a"}]}, "c")
    with pytest.raises(UsageError, match="2 models"):
        ask_models({"data": [{"id": "a"}, {"id": "b"}]})
    with pytest.raises(UsageError, match="does not answer like an OpenAI server"):
        ask_models(["a"])


def test_server_that_starts_late_is_waited_for_only_if_asked():
    assert ask_models({"data": [{"id": "a"}]}, down=5, patience_s=10)[0] == "a"
    with pytest.raises(UsageError, match="no server answers at http://mock:1/v1/models: ConnectError: refused"):
        ask_models({"data": [{"id": "a"}]}, down=5)


def test_real_sockets_give_the_same_figures():
    """The whole client, chunked transfer included, against a server on a socket of this machine."""

    async def serve(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        for number in range(11):
            await asyncio.sleep(0.05 if number else 0.2)
            finish = "length" if number == 10 else None
            chunk(writer, event({"choices": [{"text": "x", "finish_reason": finish}]}))
        chunk(writer, event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 11}}))
        chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    def chunk(writer, data):
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    async def main():
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, make_client() as client:
            target = OpenAIServer(client, Endpoint(f"http://127.0.0.1:{port}{COMPLETIONS}", False, "m"), GREEDY)
            return await drive(target, [Item((1, 2, 3), 11)] * 4, (0.0,) * 4, Load(2), 60)

    class Loop(VirtualLoop):
        patience = 0.02

    with asyncio.Runner(loop_factory=Loop) as runner:
        result = summarize([runner.run(main())], 2)
    assert (result.num_requests, result.output_tokens, result.failed) == (4, 44, 0)
    assert result.ttft_ms.max == pytest.approx(200, rel=0.01)
    assert result.itl_ms.max == pytest.approx(50, rel=0.01)
    assert result.elapsed_sec == pytest.approx(1.4, rel=0.01)


def test_stream_of_something_else_fails_the_request():
    class Odd(httpx.AsyncBaseTransport):
        def __init__(self, content):
            self.content = content

        async def handle_async_request(self, request):
            return httpx.Response(200, content=self.content)

    async def main(content):
        async with make_client(Odd(content)) as client:
            server = OpenAIServer(client, Endpoint("http://mock:1/v1/completions", False, "m"), GREEDY)
            return await drive(server, [Item((1,), 2)], (0.0,), Load(), 60)

    for content, error in (
        (b"data: {oops\n\n", "the stream holds no JSON"),
        (b"data: [1]\n\n", "the stream holds no object"),
        (json.dumps({"choices": []}).encode(), "the stream ended before"),
    ):
        (seen,) = run(main(content)).observations
        assert seen.outcome == "failed" and error in seen.error
