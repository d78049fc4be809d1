"""Requests against a mock server in virtual time, and a small tokenizer."""

import asyncio
import math

import msgspec
import pytest

from llmctl.cli.bench.drive import drive
from llmctl.cli.bench.http_target import COMPLETIONS, Endpoint, OpenAIServer, make_client
from llmctl.cli.bench.load_shape import Load
from llmctl.cli.bench.workload import Item
from llmctl.engine.load.text import ChatInfo
from llmctl.engine.request import SamplingParams
from llmctl.engine.tokenizer import Tokenizer
from tests.engine.tiny import SPECIAL, TEMPLATE, write_tokenizer

from .virtual import Server, run

GREEDY = SamplingParams(temperature=0, ignore_eos=True)


@pytest.fixture
def bombard():
    """A round of `count` requests against a server that answers by `script`."""

    def go(
        script, count, *, max_concurrency=0, request_rate=math.inf, burstiness=math.inf, capacity=1 << 30,
        timeout_s=600.0, prompt=(1, 2, 3), asked=11, path=COMPLETIONS, interrupt_s=None,
        on_quiet=None,
    ):  # fmt: skip
        async def main():
            server = Server(script, capacity)
            load = Load(max_concurrency, request_rate, burstiness)
            async with make_client(server) as client:
                target = OpenAIServer(client, Endpoint(f"http://mock:1{path}", "chat" in path, "mock"), GREEDY)
                items = [Item(prompt, asked)] * count
                if interrupt_s is not None:
                    loop = asyncio.get_running_loop()
                    loop.call_later(interrupt_s, asyncio.current_task().cancel)
                round_ = await drive(target, items, load.arrivals(count, None), load, timeout_s, on_quiet=on_quiet)
            return round_, server

        return run(main())

    return go


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    """One token per byte, three special tokens in front."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    info = ChatInfo(template=TEMPLATE, special_tokens={"eos_token": SPECIAL[2]}, eos_ids=(2,))
    (folder / "chat.json").write_bytes(msgspec.json.encode(info))
    return Tokenizer(folder)
