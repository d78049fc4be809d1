"""A worker that is started early: it waits for its orders, and ends without a word if there are none."""

import subprocess
import sys

import pytest

from llmctl.engine import early
from llmctl.engine.config import EngineConfig
from llmctl.engine.process import EngineProcess


def test_a_worker_without_orders_ends_without_a_word():
    done = subprocess.run([sys.executable, "-m", "llmctl.engine.worker"], input=b"", capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_worker_that_was_begun_gets_the_orders_and_the_next_engine_another():
    early.begin_worker()
    (begun,) = early._begun
    engines = [EngineProcess(EngineConfig(model="/no/such/model"), epoch) for epoch in (1, 2)]
    assert engines[0].process is begun and engines[1].process is not begun
    for engine in engines:
        engine.end()


def test_a_worker_that_ended_meanwhile_is_replaced():
    early.begin_worker()
    (begun,) = early._begun
    begun.kill()
    begun.wait()
    worker = early.take_worker()
    assert worker is not begun and worker.poll() is None
    worker.communicate()
    assert worker.returncode == 0


@pytest.mark.parametrize("options", [["--no-such-option"], ["--port", "many"], ["--help"]])
def test_a_serve_that_comes_to_nothing_leaves_no_worker_and_no_word_of_it(options):
    # Its output ends when the last process that could write to it has ended.
    done = subprocess.run(
        [sys.executable, "-m", "llmctl", "serve", *options], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == (0 if options == ["--help"] else 2)
    said = done.stdout + done.stderr
    assert "Traceback" not in said and said.startswith("Usage: " if options == ["--help"] else "error: ")
