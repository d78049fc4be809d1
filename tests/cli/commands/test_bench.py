"""`llmctl bench` from its command line to its tables, its JSON and its exit codes."""

import asyncio
import errno
import json
import os
import signal
import threading

import msgspec
import pytest

from llmctl.cli import app
from llmctl.cli.bench.report import Report
from llmctl.cli.exits import ExitCode
from tests.cli.bench import virtual
from tests.cli.bench.virtual import Answer, Server
from tests.engine.tiny import write_checkpoint

URL = [
    "bench",
    "--base-url",
    "http://mock:8000",
    "--num-prompts",
    "6",
    "--prompt-tokens",
    "20",
    "--output-tokens",
    "11",
]


@pytest.fixture
def serve(monkeypatch):
    """Everything runs in virtual time against a server that answers by this script."""

    def arrange(script=lambda _: Answer()):
        server = Server(script)
        from llmctl.cli.bench import run
        from llmctl.cli.bench.http_target import make_client

        monkeypatch.setattr(run, "make_client", lambda: make_client(server))
        monkeypatch.setattr(asyncio, "run", virtual.run)
        return server

    return arrange


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


def ours(folder, *more):
    small = ["--num-prompts", "3", "--prompt-tokens", "20", "--output-tokens", "5", "--max-model-len", "128"]
    return ["bench", folder, *small, "--num-gpu-blocks-override", "64", "--allow-tainted", *more]


def report(console):
    return msgspec.json.decode(console.stdout.getvalue(), type=Report)


def test_json_is_the_report_with_every_request(console, serve):
    server = serve()
    assert app.run([*URL, "--max-concurrency", "2", "--json", "--salt", "abc", "--seed", "5"], console) == ExitCode.OK
    found = report(console)
    (result,) = found.results
    assert (result.backend, result.num_requests, result.concurrency) == ("mock:8000", 6, 2)
    assert result.elapsed_sec == pytest.approx(2.1, rel=0.01)
    assert result.qps == pytest.approx(6 / 2.1, rel=0.01)
    assert result.output_tokens == 66 and result.tokens_per_sec == pytest.approx(66 / 2.1, rel=0.01)
    assert [len(run.observations) for run in found.rounds] == [6]
    assert (found.workload.salt, found.workload.seed, found.workload.dataset) == ("abc", 5, "synthetic")
    assert found.provenance.model == "mock" and found.provenance.engine is None
    assert {"llmctl", "python", "httpx"} <= found.provenance.versions.keys()
    assert found.provenance.machine.cores > 0 and found.load.max_concurrency == 2
    assert "api_key" not in found.provenance.options and found.provenance.options["num_prompts"] == 6
    assert len(server.bodies) == 7, "one warm-up"
    assert all(body["prompt"].startswith("[") for body in server.bodies)


def test_json_has_the_fields_that_other_tools_read_and_is_strict(console, serve):
    serve()
    assert app.run([*URL, "--json", "--request-rate", "3"], console) == ExitCode.OK

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    (result,) = json.loads(console.stdout.getvalue(), parse_constant=refuse)["results"]
    named = ("backend", "num_requests", "concurrency", "elapsed_sec", "qps", "output_tokens", "tokens_per_sec")
    assert set(named) <= result.keys()
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        assert set(result[name]) == {"count", "mean", "median", "p50", "p90", "p95", "p99", "max"}


def test_table_has_headline_latencies_and_what_was_asked(console, serve):
    serve()
    assert app.run([*URL, "--max-concurrency", "2", "--goodput", "ttft:500"], console) == ExitCode.OK
    text = console.stdout.getvalue()
    head = next(line for line in text.splitlines() if "framework" in line)
    assert head.split() == ["framework", "tokens/s", "ms/token", "memory", "GB", "TTFT", "ms", "TPOT", "ms"]
    assert "mock:8000" in text and "31.4" in text, "66 tokens in 2.1 s"
    for name in ("TTFT", "ITL", "TPOT", "E2E"):
        assert name in text
    assert "6 answered in 2.10 s (2.86 requests/s, 317.1 tokens/s with prompts); 0 failed; 0 timed out" in text
    assert "600 prompt tokens, 0 from a cache" in text and "goodput 2.86 requests/s" in text
    assert "texts: sentences of common words; seed 0; salt " in text
    assert "no tokenizer was named" in console.stderr.getvalue()


def test_tainted_figures_are_withheld_unless_allowed(make_console, serve):
    serve(lambda _: Answer(cached_tokens=90))
    console = make_console()
    assert app.run(URL, console) == ExitCode.FAILURE
    assert "tokens/s" not in console.stdout.getvalue() and "TTFT" not in console.stdout.getvalue()
    assert "the figures are withheld: 540 prompt tokens of 6 requests came from a cache" in console.stderr.getvalue()
    console = make_console()
    assert app.run([*URL, "--json"], console) == ExitCode.FAILURE
    found = report(console)
    assert found.refused and found.results == () and len(found.rounds[0].observations) == 6, "raw rows stay"
    console = make_console()
    assert app.run([*URL, "--allow-tainted"], console) == ExitCode.OK
    assert "TAINTED" in console.stdout.getvalue() and "mock:8000" in console.stdout.getvalue()
    console = make_console()
    assert app.run([*URL, "--no-salt"], console) == ExitCode.OK
    assert "no salt: a warm cache may have helped" in console.stdout.getvalue()


def test_failures_are_counted_apart_in_the_table(console, serve):
    serve(lambda i: Answer(status=500) if i == 3 else Answer(ttft_s=99) if i == 5 else Answer())
    arguments = [*URL, "--num-prompts", "50", "--request-timeout", "5"]
    assert app.run(arguments, console) == ExitCode.OK
    assert "48 answered" in console.stdout.getvalue()
    assert "1 failed; 1 timed out (limit 5 s)" in console.stdout.getvalue()
    assert "2 of 50 requests failed or timed out: HTTP 500: overloaded" in console.stderr.getvalue()


def test_report_is_saved_whole_and_never_over_another(make_console, serve, tmp_path):
    serve()
    saves = [*URL, "--result-dir", str(tmp_path / "new"), "--result-filename", "one.json"]
    console = make_console()
    assert app.run(saves, console) == ExitCode.OK
    found = msgspec.json.decode((tmp_path / "new" / "one.json").read_bytes(), type=Report)
    assert found.results[0].num_requests == 6
    assert f"saved to {tmp_path}/new/one.json" in console.stderr.getvalue()
    console = make_console()
    assert app.run(saves, console) == ExitCode.USAGE
    assert "one.json` exists" in console.stderr.getvalue()
    assert app.run([*URL, "--save-result", "--result-dir", str(tmp_path / "dated")], make_console()) == ExitCode.OK
    (file,) = (tmp_path / "dated").iterdir()
    assert file.name.startswith("bench-mock-synthetic-2") and file.suffix == ".json"


def test_report_that_the_disk_cannot_hold_leaves_nothing_behind(console, serve, tmp_path, monkeypatch):
    serve()

    def write(path, content):
        path.open("wb").close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("llmctl.cli.bench.report.Path.write_bytes", write)
    assert app.run([*URL, "--result-dir", str(tmp_path)], console) == ExitCode.USAGE
    assert ".json`: No space left on device\n\nhint: choose another --result-dir" in console.stderr.getvalue()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("signal_number", "code"), [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED)]
)
def test_ctrl_c_and_sigterm_print_what_was_measured_and_that_it_is_partial(console, serve, signal_number, code):
    server = serve()

    def script(number):
        if number == 5:
            os.kill(os.getpid(), signal_number)
        return Answer()

    server.script = script
    assert threading.current_thread() is threading.main_thread()
    assert app.run([*URL, "--max-concurrency", "1"], console) == code
    assert "PARTIAL: interrupted" in console.stdout.getvalue()
    assert "4 answered" in console.stdout.getvalue() and "2 unfinished" in console.stdout.getvalue()
    assert "interrupted: these are the requests that were answered" in console.stderr.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "pg91"], "--dataset is `pg91`"),
        (["--dtype", "float32", "--base-url", "http://x"], "--dtype cannot change a server"),
        (["--endpoint", "/v1/completions"], "--endpoint says something about a server, and there is none"),
        (["--tokenizer", "x"], "--tokenizer says something about a server"),
        (["--against", "vllm"], "--against is `vllm`"),
        (["--against", "transformers", "--base-url", "http://x"], "name it with --tokenizer"),
        (["--request-rate", "0"], "--request-rate is 0.0"),
        (["--request-rate", "fast"], "`fast` is not a number"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--rounds", "9999999"], "--rounds is 9999999, it must be from 1 to 1000000"),
        (["--num-warmups", "9999999"], "--num-warmups is 9999999, it must be from 0 to 1000000"),
        (["--num-prompts", "99999999999"], "--num-prompts is 99999999999, it must be from 1 to 1000000"),
        (["--request-timeout", "0"], "--request-timeout is 0"),
        (["--salt", "x", "--no-salt"], "--salt needs a text and excludes --no-salt"),
        (["--goodput", "ttft"], "--goodput has `ttft`"),
        (["--goodput", "tttf:5"], "--goodput has `tttf:5`"),
        (["--goodput", "ttft:0"], "--goodput has `ttft:0`"),
        (["--result-filename", "a/b.json"], "which holds a folder"),
        (["--base-url", "ftp://x"], "--base-url is `ftp://x`"),
        (["--num-prompts", "0"], "--num-prompts is 0"),
    ],
)
def test_mistakes_on_the_command_line_are_named(console, arguments, message):
    assert app.run(["bench", *arguments], console) == ExitCode.USAGE
    assert message in console.stderr.getvalue() and console.stdout.getvalue() == ""


def test_own_engine_answers_in_full_and_its_memory_is_seen(console, folder):
    assert app.run(ours(folder, "--json", "--rounds", "2"), console) == ExitCode.OK
    found = report(console)
    (result,) = found.results
    assert (result.num_requests, result.output_tokens, result.prompt_tokens) == (6, 30, 120)
    assert result.cached_tokens == 0 and result.token_source == "usage" and result.failed == 0
    assert result.peak_pss_bytes > 1 << 20
    assert all(seen.streamed_tokens == seen.output_tokens == 5 for run in found.rounds for seen in run.observations)
    assert found.provenance.engine.fingerprint.startswith("llmctl-")
    assert [finding for finding in found.findings if finding.guard not in ("client", "schedule", "busy machine")] == []


def test_prompts_without_salt_come_from_the_cache_in_the_second_round(console, folder):
    assert app.run(ours(folder, "--json", "--rounds", "2", "--no-salt", "--num-warmups", "0"), console) == ExitCode.OK
    first, second = ([seen.cached_tokens for seen in run.observations] for run in report(console).rounds)
    assert sum(first) == 0 and second == [19] * 3, "all but the last token, which is always computed"


def test_prompt_that_does_not_fit_is_a_capacity_error(console, folder):
    assert app.run(ours(folder, "--prompt-tokens", "200"), console) == ExitCode.CAPACITY
    assert "do not fit the context of 128" in console.stderr.getvalue()


def test_pg19_runs_with_nothing_else_typed(console, folder, monkeypatch):
    from llmctl.cli.bench import longtext

    monkeypatch.setattr(longtext, "fetch_pg19", lambda folder: "the hub cannot be reached")
    monkeypatch.setattr(longtext, "ENOUGH_CHARACTERS", 50_000)
    arguments = ["bench", folder, "--dataset", "pg19", "--max-model-len", "100", "--allow-tainted"]
    assert app.run(arguments, console) == ExitCode.OK
    text = console.stdout.getvalue()
    assert "pg19 (stand-in texts); 3 prompts of 36 tokens" in text
    assert "documentation, standing in for PG-19 (the hub cannot be reached)" in text
    assert "prompts have 36 tokens because the model's context is 100" in console.stderr.getvalue()


def test_transformers_gets_the_same_requests_and_the_table_its_ratios(console, folder):
    assert app.run(ours(folder, "--against", "transformers", "--rounds", "2", "--json"), console) == ExitCode.OK
    found = report(console)
    assert [result.num_requests for result in found.results] == [6, 6]
    assert [result.backend for result in found.results] == ["llmctl f32", "transformers float32"]
    assert {ratio.measure for ratio in found.ratios} >= {"tokens_per_sec", "ttft_ms", "peak_pss_bytes"}
    assert all(result.peak_pss_bytes > 1 << 20 for result in found.results)
    assert {"torch", "transformers"} <= found.provenance.versions.keys()
    assert [run.backend[:6] for run in found.rounds] == ["llmctl", "transf", "transf", "llmctl"]
