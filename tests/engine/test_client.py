"""Engines behind a client: in this process and in another, healthy and dying."""

from __future__ import annotations

import gc
import os
import queue
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from llmctl.engine.assemble import assemble, find_model
from llmctl.engine.config import EngineConfig
from llmctl.engine.llm import LLM
from llmctl.engine.local_client import LocalClient
from llmctl.engine.process import PREFIX, EngineProcess, sweep
from llmctl.engine.process_client import ProcessClient
from llmctl.engine.request import FinishReason, Output, SamplingParams
from llmctl.kernels.errors import CapacityError, EngineDead, LlmctlError, UsageError

from .tiny import write_checkpoint

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
OPTIONS = {"max_model_len": 256, "num_gpu_blocks_override": 40}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(params=[False, True], ids=["thread", "process"])
def llm(request: pytest.FixtureRequest, folder: str) -> Iterator[LLM]:
    with LLM(folder, process=request.param, **OPTIONS) as llm:
        yield llm


def test_closing_a_stream_frees_every_block_at_once(llm: LLM) -> None:
    stream = llm.frontend.stream([5] * 50, LONG)
    next(stream)
    assert llm.frontend.stats().running == 1
    stream.close()
    stats = llm.frontend.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total


def test_a_prompt_longer_than_the_context_is_refused_and_the_next_one_runs(llm: LLM) -> None:
    with pytest.raises(CapacityError, match="300 tokens, the context holds 256") as refused:
        llm.generate([[5] * 300])
    assert "45 tokens" in refused.value.hint
    assert (
        llm.generate([[5] * 10], SamplingParams(max_tokens=3, ignore_eos=True))[0].outputs[0].finish_reason == "length"
    )


def test_a_request_id_in_use_is_refused(llm: LLM) -> None:
    stream = llm.frontend.stream([5] * 5, LONG, request_id="mine")
    next(stream)
    with pytest.raises(UsageError, match="`mine` is in use"):
        llm.frontend.stream([5] * 5, LONG, request_id="mine")
    stream.close()


def test_one_of_n_sequences_can_be_ended_alone(llm: LLM) -> None:
    sampling = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    request = llm.frontend.request([5] * 20, sampling)
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    llm.frontend.client.submit(request, outputs.put)
    llm.frontend.client.abort(request.id, 1)
    ends: dict[int, FinishReason] = {}
    while len(ends) < 3:
        output = outputs.get()
        if output.finish is not None:
            ends[output.index] = output.finish
    assert ends == {0: FinishReason.LENGTH, 1: FinishReason.ABORT, 2: FinishReason.LENGTH}


def test_a_closed_engine_refuses_requests_and_ends_open_ones(folder: str) -> None:
    llm = LLM(folder, **OPTIONS)
    stream = llm.frontend.stream([5] * 50, LONG)
    next(stream)
    llm.close()
    last = list(stream)[-1]
    assert last.finish in (FinishReason.ERROR, FinishReason.LENGTH)
    with pytest.raises(EngineDead, match="closed"):
        llm.frontend.stream([5], LONG)


@pytest.mark.parametrize(
    ("number", "meaning"),
    [
        (signal.SIGKILL, "more memory"),
        (signal.SIGBUS, "was cut short"),
        (signal.SIGSEGV, "a fault of llmctl"),
        (signal.SIGTERM, "somebody ended it"),
    ],
)
def test_a_killed_engine_process_fails_open_requests_and_says_so(
    folder: str, number: signal.Signals, meaning: str
) -> None:
    with LLM(folder, process=True, **OPTIONS) as llm:
        assert isinstance(llm.frontend.client, ProcessClient)
        stream = llm.frontend.stream([5] * 50, LONG)
        next(stream)
        os.kill(llm.frontend.client.pid, number)
        last = list(stream)[-1]
        assert last.finish is FinishReason.ERROR and f"exit code -{number:d}" in last.error
        with pytest.raises(EngineDead, match=f"exit code -{number:d} .{number.name}.") as dead:
            llm.generate([[5]])
        assert meaning in dead.value.hint


def test_closing_gives_the_engine_s_memory_back_while_its_name_is_still_there(folder: str) -> None:
    engine, info = assemble(EngineConfig(model=folder, **OPTIONS), find_model(EngineConfig(model=folder)), epoch=1)
    client, there = LocalClient(engine, info), weakref.ref(engine)
    del engine
    client.close()
    gc.collect()
    assert there() is None


def test_an_engine_process_that_cannot_load_raises_the_same_error_as_a_thread(tmp_path: object) -> None:
    errors = []
    for process in (False, True):
        with pytest.raises(LlmctlError) as raised:
            LLM(str(tmp_path), process=process)
        errors.append((type(raised.value), raised.value.message, raised.value.hint))
    assert errors[0] == errors[1]


def test_outputs_of_an_earlier_epoch_or_of_an_ended_sequence_are_dropped(folder: str) -> None:
    with LLM(folder, **OPTIONS) as llm:
        client = llm.frontend.client
        request = llm.frontend.request([5] * 4, LONG)
        seen: list[Output] = []
        client._open.add(request, seen.append)  # type: ignore[attr-defined]
        old = Output(request_id=request.id, index=0, epoch=client.info.epoch - 1, first=0, tokens=(1,))
        client._open.deliver([old])  # type: ignore[attr-defined]
        assert seen == []


def test_aborts_and_questions_after_an_engine_process_was_killed_do_not_hang(folder: str) -> None:
    with LLM(folder, process=True, **OPTIONS) as llm:
        client = llm.frontend.client
        assert isinstance(client, ProcessClient)
        ended: queue.SimpleQueue[Output] = queue.SimpleQueue()
        request = llm.frontend.request([5] * 20, LONG)
        psutil.Process(client.pid).suspend()
        client.submit(request, ended.put)
        os.kill(client.pid, signal.SIGKILL)
        for _ in range(3000):  # more than a socket would hold for a reader that does not read
            client.abort(request.id)
        assert ended.get().finish is FinishReason.ERROR
        with pytest.raises(EngineDead, match="exit code -9"):
            client.stats()


def test_closing_ends_an_engine_process_that_does_not_react(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llmctl.engine.process_client.CLOSE_S", 0.2)
    llm = LLM(folder, process=True, **OPTIONS)
    assert isinstance(llm.frontend.client, ProcessClient)
    process = psutil.Process(llm.frontend.client.pid)
    process.suspend()
    llm.close()
    assert not process.is_running()


def test_loading_in_a_process_can_be_given_up(folder: str) -> None:
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(EngineDead, match="stopped while it was loading"):
        ProcessClient(EngineConfig(model=folder), cancelled=cancelled)


def test_a_process_that_was_started_beforehand_is_taken_over(folder: str) -> None:
    config = EngineConfig(model=folder, **OPTIONS)
    engine = EngineProcess(config, 77)
    client = ProcessClient(config, started=engine)
    assert client.pid == engine.process.pid and client.info.epoch == 77
    client.close()
    assert engine.process.poll() == 0 and not engine.folder.exists()
    engine.end()


def test_a_process_that_nobody_takes_over_is_ended(folder: str) -> None:
    engine = EngineProcess(EngineConfig(model=folder), 1)
    engine.end()
    engine.end()
    assert engine.process.poll() is not None and not engine.folder.exists()


def test_the_folder_of_a_process_that_was_killed_is_swept_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    engine = EngineProcess(EngineConfig(model="/no/such/model"), 1)
    stale, other = tmp_path / f"{PREFIX}stale", tmp_path / f"{PREFIX}other"
    for folder in (stale, other):
        folder.mkdir()
    (stale / "lock").touch()
    sweep()
    assert engine.folder.exists() and other.exists() and not stale.exists()
    engine.end()
    assert not engine.folder.exists()


def test_a_temporary_folder_whose_name_is_too_long_for_a_socket_is_not_used_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = tmp_path / ("x" * 100)
    usual.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(usual))
    engine = EngineProcess(EngineConfig(model="/no/such/model"), 1)
    assert engine.folder.parent == Path("/tmp") and list(usual.iterdir()) == []
    engine.end()
    monkeypatch.setattr("llmctl.engine.process._SHORT", "/no/such/folder")
    with pytest.raises(UsageError, match="too long for a socket's path, which may have 107 bytes") as raised:
        EngineProcess(EngineConfig(model="/no/such/model"), 1)
    assert "TMPDIR" in raised.value.hint


def run_script(body: str, folder: str) -> subprocess.CompletedProcess[str]:
    script = f"FOLDER = {folder!r}\nOPTIONS = {OPTIONS!r}\n" + textwrap.dedent(body)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize("process", [False, True])
def test_a_script_that_ends_while_tokens_come_ends_quietly(folder: str, process: bool) -> None:
    body = f"""
    from llmctl import LLM, SamplingParams
    llm = LLM(FOLDER, process={process}, **OPTIONS)
    stream = llm.frontend.stream([5] * 20, SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    """
    done = run_script(body, folder)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_forked_child_is_told_that_the_engine_is_not_its_own_and_can_make_one(folder: str) -> None:
    body = """
    import os, sys
    from llmctl import LLM, SamplingParams
    from llmctl.kernels.errors import EngineDead
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm = LLM(FOLDER, threads=2, **OPTIONS)
    expected = llm.generate([[5] * 20], sampling)[0].outputs
    if (child := os.fork()) == 0:
        try:
            llm.generate([[5] * 20], sampling)
        except EngineDead as error:
            assert "forked" in error.message
            with LLM(FOLDER, threads=2, **OPTIONS) as own:
                os._exit(0 if own.generate([[5] * 20], sampling)[0].outputs == expected else 3)
        os._exit(4)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    done = run_script(body, folder)
    assert done.returncode == 0, done.stderr


def test_a_callback_that_raises_harms_its_own_request_only(folder: str) -> None:
    with LLM(folder, **OPTIONS) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        expected = llm.generate([[5] * 20], sampling)[0].outputs

        def broken(output: Output) -> None:
            raise RuntimeError("mine")

        llm.frontend.client.submit(llm.frontend.request([7] * 20, sampling), broken)
        assert llm.generate([[5] * 20], sampling)[0].outputs == expected


def test_ctrl_c_never_reaches_the_engine_process(folder: str) -> None:
    """Blocked from its first instruction on, so that it cannot strike while the process imports what it needs."""
    client = ProcessClient(EngineConfig(model=folder, **OPTIONS))
    try:
        status = Path(f"/proc/{client.pid}/status").read_text()
        blocked = int(status.split("SigBlk:")[1].split()[0], 16)
        assert blocked >> signal.SIGINT - 1 & 1
        os.kill(client.pid, signal.SIGINT)
        assert client.stats().running == 0 and client.failure is None
    finally:
        client.close()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
