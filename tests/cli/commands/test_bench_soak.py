"""`llmctl bench soak`: what it asks, what it finds, and that it finds what was planted."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import AsyncGenerator

import pytest

from llmctl.cli import app
from llmctl.cli.bench.mixture import Mixture
from llmctl.cli.bench.soak import Figures, Limits, Sample, Soak, judge, leaks
from llmctl.cli.bench.soak_figures import read_metrics
from llmctl.cli.bench.targets import Piece, RequestFailed
from llmctl.cli.bench.workload import Item, ids_of
from llmctl.cli.exits import ExitCode
from tests.cli.api.live import ENGINE, Server
from tests.engine.tiny import write_checkpoint

MIB = 1 << 20
LIMITS = Limits(0, 60, 4, 60.0, 0.001, 0.25, 0.03)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen2"))


class Engine:
    """A target that counts who is open; `keep` of those who leave early stay open, every `fail`th request fails."""

    backend, pids = "mock", ()

    def __init__(self, keep=0, lose=0, fail=0):
        self.open, self.asked, self._keep, self._lose, self._fail = 0, 0, keep, lose, fail

    async def send(self, item: Item) -> AsyncGenerator[Piece, None]:
        self.asked += 1
        if self._fail and self.asked % self._fail == 0:
            raise RequestFailed("HTTP 500: planted")
        self.open += 1
        done = False
        try:
            for _ in range(item.max_tokens):
                await asyncio.sleep(0)
                yield Piece(1)
            done = True
        finally:
            if done or not self._keep:
                self.open -= 1
            else:
                self._keep -= 1

    async def figures(self) -> Figures:
        return Figures(open=self.open, blocks_total=100, blocks_free=10, blocks_cached=90 - self._lose)


def soak(engine, monkeypatch, limits=LIMITS):
    monkeypatch.setattr("llmctl.cli.bench.soak.SETTLE_S", 0.0)
    mixture = Mixture(1, range(100), 8, 6, 100)
    return asyncio.run(Soak(engine, engine, mixture, limits, engine.figures, lambda *_: None).run())


def test_a_mixture_is_the_same_for_a_seed_and_has_every_kind_and_no_prompt_too_long():
    def tasks(seed):
        mixture = Mixture(seed, range(50), 20, 10, 70)
        return [mixture.next() for _ in range(300)]

    found = tasks(1)
    assert found == tasks(1) != tasks(2)
    kinds = {kind: [task for task in found if task.kind == kind] for kind in ("new", "long", "again", "left")}
    assert all(len(each) > 20 for each in kinds.values())
    assert max(len(ids_of(task.item.prompt)) for task in found) == 70
    assert all((task.leaves_after is not None) == (task.kind == "left") for task in found)
    prompts = [ids_of(task.item.prompt) for task in found]
    again = [number for number, task in enumerate(found) if task.kind == "again" and number > 100]
    assert all(any(prompts[n][: len(p)] == p for p in prompts[:n] if len(p) > 5) for n in again)
    words = Mixture(1, ["a", "bc"], 5, 3, 9)
    assert all(re.fullmatch(r"(a|bc)( (a|bc))*", words.next().item.prompt) for _ in range(20))


def test_an_engine_that_gives_everything_back_passes(monkeypatch):
    engine = Engine()
    found = soak(engine, monkeypatch)
    assert found.requests == engine.asked >= 60 and found.answered + found.left == found.requests
    assert found.left == found.kinds["left"] and found.failed == 0
    assert found.leaks == () and found.end.lost_blocks == 0


def test_a_request_that_stays_open_and_a_block_that_is_lost_are_found(monkeypatch):
    assert soak(Engine(keep=2), monkeypatch).leaks == ("2 requests are still open, 0 s after the last client left",)
    assert soak(Engine(lose=3), monkeypatch).leaks == ("3 of 100 KV blocks are neither free nor cached",)


def test_failed_requests_are_counted_by_what_they_say(monkeypatch):
    found = soak(Engine(fail=10), monkeypatch)
    assert found.failed == found.requests // 10 and found.errors == {"HTTP 500: planted": found.failed}
    assert found.leaks == ()


def samples(sizes, free=itertools.repeat(0)):  # noqa: B008  (endless, and the same always)
    return [Sample(float(at), size, blocks) for at, (size, blocks) in enumerate(zip(sizes, free))]


def test_memory_that_grows_is_a_leak_and_what_wavers_is_not():
    growing = [100 * MIB + number * MIB // 4 for number in range(60)]
    wavering = [100 * MIB + number % 3 * MIB for number in range(60)]
    found = judge(samples(growing), 15.0, 0.03, 100)
    assert found.leak and found.growth == pytest.approx(0.069, abs=0.001) and found.samples == 45
    assert leaks(Figures(), found) == ("memory grew by 6.9 % after the warm-up",)
    calm = judge(samples(wavering), 15.0, 0.03, 100)
    assert calm.leak is False and calm.spread == pytest.approx(2 / 101, rel=0.01)
    assert judge(samples([200 * MIB] * 15 + wavering), 15.0, 0.03, 100).leak is False
    warming = [number * MIB for number in range(1, 61)] + [61 * MIB] * 60
    assert judge(samples(warming), 60.0, 0.03, 100).leak is False


def test_memory_is_not_judged_by_few_looks_or_while_the_pool_fills():
    growing = [100 * MIB + number * MIB for number in range(60)]
    assert judge(samples(growing), 55.0, 0.03, 100).leak is None
    filling = judge(samples(growing, range(100, 40, -1)), 15.0, 0.03, 100)
    assert filling.leak is None and "while the KV pool filled" in filling.note
    assert judge([Sample(0.0, None, 5)], 0.0, 0.03, 100) is None


def test_figures_are_read_from_a_servers_metrics():
    text = "\n".join(
        f'llmctl:{name}{{model_name="m"}} {value}'
        for name, value in (
            ("num_requests_running", "2.0"), ("num_requests_waiting", "1.0"), ("kv_blocks", "8.0"),
            ("kv_blocks_free", "5.0"), ("kv_blocks_cached", "1.0"),
        )
    )  # fmt: skip
    found = read_metrics(text)
    assert (found.open, found.lost_blocks) == (3, 2)
    assert read_metrics("python_info 1.0\n") == Figures()
    assert read_metrics('vllm:num_requests_running{a="b"} 4\nvllm:num_requests_waiting{a="b"} 0\n').open == 4


def test_a_tiny_model_in_this_process_is_soaked_and_nothing_is_left(console, folder):
    line = ["bench", "soak", folder, "--max-requests", "24", "--max-concurrency", "6", "--prompt-tokens", "24"]
    engine = ["--max-model-len", "128", "--num-gpu-blocks-override", "20", "--block-size", "8", "--threads", "1"]
    line += ["--output-tokens", "8", "--interval", "0.05", "--json", *engine]
    assert app.run(line, console) == ExitCode.OK, console.stderr.getvalue()
    found = json.loads(console.stdout.getvalue())
    assert found["requests"] >= 24 and found["failed"] == found["timed_out"] == 0
    assert found["end"]["open"] == 0 and found["leaks"] == []
    end = found["end"]
    assert end["blocks_free"] + end["blocks_cached"] == end["blocks_total"] == 20
    assert found["memory"]["min_bytes"] > 10 * MIB
    assert app.run([*line, "--request-timeout", "0.001"], console) == ExitCode.FAILURE
    assert "requests failed: no complete answer within 0.001 s" in console.stderr.getvalue()


def test_a_server_is_soaked_too_and_one_that_is_gone_is_told(console, folder):
    server = Server(folder, "--served-model-name", "tiny", "--port", "0", *ENGINE).ready()
    try:
        line = ["bench", "soak", "--base-url", server.url, "--server-pid", str(server.process.pid), "-n", "12"]
        line += ["--prompt-tokens", "4", "--output-tokens", "6", "--max-concurrency", "3"]
        assert app.run(line, console) == ExitCode.OK, console.stderr.getvalue()
        shown = console.stdout.getvalue()
        assert re.search(r"KV blocks lost +0", shown) and "memory" in shown
        server.engine.kill()
        server.process.wait()
        assert app.run(line, console) == ExitCode.USAGE
        assert "no server answers" in console.stderr.getvalue()
    finally:
        server.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--warmup-percent", "95"], "must be from 0 to 90"),
        (["--max-concurrency", "0"], "must be from 1 to 4096"),
        (["--output-tokens", "0"], "both count from 1"),
        (["--server-pid", "1"], "there is none"),
        (["--base-url", "http://x", "--block-size", "8"], "--block-size cannot change a server"),
    ],
)
def test_what_cannot_be_soaked_is_a_usage_error(console, options, said):
    assert app.run(["bench", "soak", *options], console) == ExitCode.USAGE
    assert said in console.stderr.getvalue()
