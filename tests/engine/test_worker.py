"""An engine's process never outlives the one that started it, whenever that ends, and leaves nothing half made.

What a process writes to its stdout ends for a reader when the last one that has inherited it has ended.
"""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from .tiny import write_checkpoint

DEADLINE_S = 120

# Starts an engine and is killed before the engine's process has read anything.
STARTER = """
import os, signal
from llmctl.engine.config import EngineConfig
from llmctl.engine.process import EngineProcess
print(EngineProcess(EngineConfig(model=FOLDER), 1).process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

# Gives orders to WORKER and waits for its end, which it prints.
PARENT = """
import os, subprocess, sys
import msgspec
from llmctl.engine.config import EngineConfig
from llmctl.engine.process import Orders
worker = subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE)
worker.communicate(msgspec.json.encode(Orders("ipc://" + ADDRESS, os.getpid(), 1, EngineConfig(model=FOLDER))))
print(worker.returncode)
"""

# A worker to which something happens when a part of its packed weights is written already.
WORKER = """
import os, select, signal
from pathlib import Path
from llmctl.engine.load import build
from llmctl.engine.worker import main

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup

def lose_parent():
    parent = os.pidfd_open(os.getppid())
    os.kill(os.getppid(), signal.SIGKILL)
    select.select([parent], [], [])

def written(file, *rest):
    (folder,) = Path(PACKED).iterdir()
    if os.stat(folder / "weights.bin").st_size and not happened:
        happened.append(True)
        HAPPENING
    return write(file, *rest)

happened, write, build._write_cut = [], build._write_cut, written
main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


def run(script, **names):
    """The script's end, and that of all that it started."""
    given = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    return subprocess.run([sys.executable, "-c", given + script], capture_output=True, text=True, timeout=DEADLINE_S)


def test_a_worker_ends_whose_parent_was_killed_before_it_looked(folder):
    pid = 0
    try:
        done = run(STARTER, FOLDER=folder)
        pid = int(done.stdout)
    except subprocess.TimeoutExpired as late:
        pid = int(late.stdout)
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")


@pytest.mark.parametrize(
    ("happening", "said"),
    [
        ("lose_parent()", ""),  # nobody is left to say it
        ("signal.raise_signal(signal.SIGTERM)", f"{-signal.SIGTERM}\n"),
        ("signal.raise_signal(signal.SIGHUP)", f"{-signal.SIGHUP}\n"),  # as when a terminal is closed
    ],
)
def test_a_worker_that_is_packing_ends_and_leaves_nothing_when_it_is_told_to_or_alone(
    folder, tmp_path, monkeypatch, happening, said
):
    monkeypatch.setenv("LLMCTL_CACHE", str(tmp_path))
    packed = tmp_path / "packed"
    worker = f"PACKED = {str(packed)!r}\n" + WORKER.replace("HAPPENING", happening)
    done = run(PARENT, FOLDER=folder, WORKER=worker, ADDRESS=str(tmp_path / "socket"))
    assert (done.stdout, done.stderr) == (said, "")
    assert list(packed.iterdir()) == []
