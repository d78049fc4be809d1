"""`llmctl bench compare` from its command line to its ratios, against servers that are started for it."""

import asyncio
import dataclasses
import json
import os
import select
import signal
import sys
import threading
from pathlib import Path

import httpx
import msgspec
import pytest

from llmctl.cli import app
from llmctl.cli.bench.compare import run as running
from llmctl.cli.bench.compare.run import Comparison, Settings
from llmctl.cli.bench.compare.scenarios import Prompts, Scenario
from llmctl.cli.bench.compare.servers import Servers, on_cpus
from llmctl.cli.bench.compare.subjects import Url, parse_subject
from llmctl.cli.bench.http_target import make_client
from llmctl.cli.bench.workload import Item
from llmctl.cli.exits import ExitCode
from llmctl.kernels.errors import EngineDead, UsageError
from tests.cli.bench.virtual import Answer, Server
from tests.cli.bench.virtual import run as run_in_virtual_time

FAKE = Path(__file__).parent / "fake_llama.py"
ITEM = Item(tuple(range(100, 120)), 5)
POOL = tuple(range(100, 400))


@pytest.fixture
def fake(tmp_path):
    """(subject text, what the fake server of that name wrote) of a fake llama-server."""

    def make(name, mode=""):
        program, log = tmp_path / f"llama-{name}", tmp_path / f"{name}.log"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} {log} "$@"\n')
        program.chmod(0o755)
        more = f" --mode {mode}" if mode else ""
        return f"{name}=llama-server:{program}:model.gguf:-np 4{more}", log

    return make


def written(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def workload(tmp_path, prompt=20):
    path = tmp_path / "workload.json"
    request = {"prompt_token_ids": list(range(100, 100 + prompt)), "max_tokens": 5}
    path.write_text(json.dumps({"requests": [request] * 3}))
    return str(path)


def command(tmp_path, *subjects, only="mixed-16", rounds=2):
    named = [part for subject in subjects for part in ("--subject", subject)]
    return ["bench", "compare", *named, "--only", only, "--rounds", str(rounds), "--workload", workload(tmp_path),
            "--threads", "1"]  # fmt: skip


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_servers_are_started_asked_the_same_and_ended(console, fake, tmp_path):
    (one, one_log), (two, two_log) = fake("one"), fake("two")
    before = os.sched_getaffinity(0)
    assert app.run([*command(tmp_path, one, two, only="copy,mixed-16,mixed-64,startup"), "--json"], console) == 0
    found = msgspec.json.decode(console.stdout.getvalue(), type=Comparison)
    assert os.sched_getaffinity(0) == before and len(found.cpus) == 1
    scenarios = ["copy", "copy", "mixed-16", "mixed-16"] * 2 + ["startup", "mixed-64"] * 4
    assert [one.scenario for one in found.samples] == scenarios
    order = [one.subject for one in found.samples if one.scenario == "mixed-64"]
    assert order == ["one", "two", "two", "one"]
    assert all(one.failed == 0 and one.figures for one in found.samples)
    lines = {(line.scenario, line.measure): line for line in found.lines}
    assert {measure for scenario, measure in lines if scenario == "mixed-64"} >= {"output_tps", "peak_pss_mb"}
    assert [ratio.against for ratio in lines["startup", "first_token_s"].ratios] == ["two"]
    assert not found.partial and found.subjects[0].command[1:3] == ("-m", "model.gguf")
    first, second = written(one_log), written(two_log)
    starts = [entry for entry in first if "arguments" in entry]
    assert len(starts) == 3, "one for what is shared, one for each round of what is not"
    assert starts[0]["arguments"][-2:] == ["-np", "4"] and not any(alive(entry["pid"]) for entry in starts)
    bodies = [[entry["prompt"] for entry in log if "prompt" in entry] for log in (first, second)]
    assert sorted(bodies[0]) == sorted(bodies[1]), "both are asked the same"
    mixed = [tuple(prompt) for prompt in bodies[0] if len(prompt) == 20]
    assert len(set(mixed)) == len(mixed) == 12, "and no prompt twice"


def test_table_shows_medians_ratios_and_how_it_was_done(console, fake, tmp_path):
    (one, _), (two, _) = fake("one"), fake("two")
    assert app.run(command(tmp_path, one, two), console) == ExitCode.OK
    text = console.stdout.getvalue()
    assert "one, two: median of 2 rounds (lowest-highest); 1 threads" in text and "one / two" in text
    assert "output tokens/s" in text and "TTFT p50, ms" in text and "server + client" in text
    assert "llama-two -m model.gguf --host 127.0.0.1 --port 0 -t 1 -tb 1 -np 4" in text


def test_short_answers_are_told_and_not_counted(console, fake, tmp_path):
    (one, _), (two, _) = fake("one"), fake("two", "short")
    assert app.run([*command(tmp_path, one, two, rounds=1), "--json"], console) == ExitCode.OK
    found = msgspec.json.decode(console.stdout.getvalue(), type=Comparison)
    assert [[cell.subject for cell in line.cells] for line in found.lines] == [["one"]] * len(found.lines)
    assert all(line.ratios == () for line in found.lines)
    (finding,) = (finding for finding in found.findings if finding.guard == "failures")
    assert finding.backend == "two" and "3 of 3 requests failed" in finding.message
    assert "4 tokens of answer where 5 were asked for" in finding.message


def test_errors_in_the_stream_are_failures(console, fake, tmp_path):
    (one, _), (two, _) = fake("one"), fake("two", "error")
    assert app.run(command(tmp_path, one, two, rounds=1), console) == ExitCode.OK
    assert "error in the stream: {'code': 500, 'message': 'no slot'}" in console.stderr.getvalue()


def test_a_server_that_does_not_start_says_why_and_takes_the_others_with_it(console, fake, tmp_path):
    (one, log), (two, _) = fake("one"), fake("two", "die")
    assert app.run(command(tmp_path, one, two), console) == ExitCode.ENGINE
    message = console.stderr.getvalue()
    assert "two has ended with exit code 1: it wrote" in message and "cannot load the model: no such file" in message
    assert not alive(written(log)[0]["pid"])


def test_a_server_that_dies_while_it_is_asked_ends_the_comparison(console, fake, tmp_path):
    (one, log), (two, _) = fake("one"), fake("two", "dies-later")
    assert app.run(command(tmp_path, one, two, only="decode-128"), console) == ExitCode.ENGINE
    assert "two has ended with exit code 7" in console.stderr.getvalue() and not alive(written(log)[0]["pid"])


def test_a_program_that_is_not_there_is_named(console, fake, tmp_path):
    (one, log) = fake("one")
    two = "two=llama-server:/nowhere/llama-server:model.gguf"
    assert app.run(command(tmp_path, one, two), console) == ExitCode.USAGE
    assert "cannot run `/nowhere/llama-server`" in console.stderr.getvalue() and not alive(written(log)[0]["pid"])


def test_children_of_a_server_end_with_it(fake, tmp_path):
    async def main():
        servers = Servers(tmp_path, 1)
        subject, log = fake("one", "child")
        server = servers.start(parse_subject(subject))
        async with make_client() as client:
            await server.wait_ready(client, 60)
        (entry,) = written(log)
        assert alive(entry["pid"]) and alive(entry["child"])
        child = os.pidfd_open(entry["child"])
        try:
            await servers.stop(server)
            assert select.select([child], [], [], 60)[0], "a signal that was sent ends its process when that gets a CPU"
        finally:
            os.close(child)
        return entry

    entry = asyncio.run(main())
    assert not alive(entry["pid"]) and not alive(entry["child"])


def test_a_server_that_is_never_ready_is_given_up(fake, tmp_path):
    async def main():
        servers = Servers(tmp_path, 1)
        try:
            server = servers.start(parse_subject(fake("one", "never-ready")[0]))
            async with make_client() as client:
                await server.wait_ready(client, 0.5)
        finally:
            servers.kill()

    with pytest.raises(EngineDead, match=r"one was not ready within 0\.5 s"):
        asyncio.run(main())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_servers_and_shows_what_there_is(console, fake, tmp_path, monkeypatch, number):
    (one, one_log), (two, two_log) = fake("one"), fake("two")
    asked = []
    drive = running.drive

    async def counting(*arguments):
        asked.append(arguments)
        if len(asked) == 2 + 2 + 2:  # warm-ups, the first round, and one of the second
            os.kill(os.getpid(), number)
            await asyncio.sleep(0)
        return await drive(*arguments)

    monkeypatch.setattr(running, "drive", counting)
    assert threading.current_thread() is threading.main_thread()
    assert app.run(command(tmp_path, one, two, rounds=5), console) == ExitCode.INTERRUPTED
    assert "interrupted" in console.stderr.getvalue()
    assert not any(alive(written(log)[0]["pid"]) for log in (one_log, two_log))


def test_urls_are_compared_without_being_started():
    """In virtual time: two servers of known delays, so the ratios are known as well."""
    fast, slow = Server(lambda _: Answer(ttft_s=1.0, gap_s=0.5, pieces=5)), Server(lambda _: Answer(2.0, 1.0, 5))
    routes = {"fast": fast, "slow": slow}
    for server in routes.values():
        server.script = _with_lengths(server)

    class Both(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request):
            return await routes[request.url.host].handle_async_request(request)

    mixed = Scenario("mixed-16", "mixed", (ITEM,) * 4, 4)
    decode = Scenario("decode-128", "decode", (ITEM,), 1)
    settings = Settings(3, 1, tuple(sorted(os.sched_getaffinity(0))), 600, 5, "salt")

    async def main():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(running, "LeanTransport", Both)
            subjects = (Url("a", "http://fast"), Url("b", "http://slow"))
            return await running.run(subjects, Prompts((mixed, decode), POOL, "made up"), settings, lambda *_: None)

    found = run_in_virtual_time(main())
    lines = {(line.scenario, line.measure): line for line in found.lines}
    throughput = lines["mixed-16", "output_tps"]
    assert [cell.median for cell in throughput.cells] == [pytest.approx(20 / 3), pytest.approx(20 / 6)]
    assert throughput.ratios[0].median == pytest.approx(2.0) and throughput.ratios[0].rounds == 3
    assert lines["mixed-16", "ttft_p50_ms"].ratios[0].median == pytest.approx(0.5)
    assert [cell.median for cell in lines["decode-128", "decode_tps"].cells] == [pytest.approx(2), pytest.approx(1)]
    assert all(sample.cpu.server_s is None for sample in found.samples)
    assert fast.bodies == slow.bodies and all(body["ignore_eos"] for body in fast.bodies)
    prompts = [tuple(body["prompt"]) for body in fast.bodies[1:]]
    assert len(set(prompts)) == len(prompts) == 3 * 5


def _with_lengths(server):
    """Answers of the lengths that are asked for, with truthful counts: the first request is the warm-up."""
    plain = server.script(0)
    first = dataclasses.replace(plain, pieces=16, prompt_tokens=16)
    others = dataclasses.replace(plain, pieces=5, prompt_tokens=20)
    return lambda number: others if number else first


def test_cpus_must_be_ours():
    with pytest.raises(UsageError, match="--cpus is 4095"), on_cpus((4095,)):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "0 subjects are no comparison"),
        (["--subject", "x=llmctl:m"], "1 subjects are no comparison"),
        (["--subject", "x=what:m", "--subject", "y=llmctl:m"], "`what` is no kind of server"),
        (["--only", "prefil"], "--only has `prefil`"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--threads", "0"], "--threads is 0"),
        (["--cpus", "a"], "--cpus is `a`"),
        (["--request-timeout", "0"], "--request-timeout is 0"),
        (["--workload", "/nowhere.json"], "cannot read `/nowhere.json`"),
        (["--only", "startup"], "servers that run already cannot be started"),
    ],
)
def test_mistakes_on_the_command_line_are_named(console, tmp_path, arguments, message):
    urls = ["--subject", "a=url:http://127.0.0.1:1", "--subject", "b=url:http://127.0.0.1:2"]
    if not any("subject" in argument for argument in arguments) and arguments:
        arguments = [*urls, *arguments]
        if "--workload" not in arguments:
            arguments += ["--workload", workload(tmp_path)]
    assert app.run(["bench", "compare", *arguments], console) == ExitCode.USAGE
    assert message in console.stderr.getvalue() and console.stdout.getvalue() == ""


def test_without_a_known_model_a_tokenizer_must_be_named(console):
    urls = ["--subject", "a=url:http://127.0.0.1:1", "--subject", "b=url:http://127.0.0.1:2"]
    assert app.run(["bench", "compare", *urls], console) == ExitCode.USAGE
    assert "no subject's model is known here" in console.stderr.getvalue()
