"""Server processes: started in a group of their own, waited for, and ended whatever happens.

A group, because a server may have children, and because Ctrl-C in a terminal must reach this command only, which then
ends its servers itself. What they write goes to a file; its end is shown when a server dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import httpx

from ....kernels.errors import EngineDead, UsageError
from .subjects import HOST, Subject

POLL_S = 0.02  # between two questions whether a server is ready
GRACE_S = 10.0  # for a server to end by itself
LAST_LINES = 8

_CONNECT_S = 5.0


class Server:
    """One running server. Made by `Servers.start`."""

    def __init__(
        self, subject: Subject, process: subprocess.Popen[bytes], port: int, log: Path, began_s: float
    ) -> None:
        self.subject, self._process, self._log = subject, process, log
        self.base_url = f"http://{HOST}:{port}"
        self.began_s = began_s

    @property
    def pids(self) -> tuple[int, ...]:
        return (self._process.pid,)

    async def wait_ready(self, client: httpx.AsyncClient, patience_s: float) -> None:
        """Return once `/health` says 200. Raises EngineDead if the process ends or is not ready in time."""
        deadline = time.monotonic() + patience_s
        while True:
            self.check()
            with contextlib.suppress(httpx.HTTPError):
                answer = await client.get(f"{self.base_url}/health", timeout=_CONNECT_S)
                if answer.status_code == httpx.codes.OK:
                    return
            if time.monotonic() > deadline:
                raise EngineDead(
                    f"{self.subject.name} was not ready within {patience_s:g} s{self._said()}",
                    "give it time with --ready-timeout",
                )
            await asyncio.sleep(POLL_S)

    def check(self) -> None:
        """Raise EngineDead if the process has ended."""
        code = self._process.poll()
        if code is not None:
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise EngineDead(f"{self.subject.name} has ended with {how}{self._said()}", "try its command by itself")

    async def answers_or_ends(self, client: httpx.AsyncClient) -> None:
        """Return once the server answers or its process has ended: connections are lost a moment before."""
        deadline = time.monotonic() + GRACE_S
        while self._process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                await client.get(f"{self.base_url}/health", timeout=_CONNECT_S)
                return
            await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """End the process and everything that it started; at once if it does not end by itself in time."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while self._process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        self.kill()

    def kill(self) -> None:
        """End the whole group now."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _said(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
        return ": it wrote\n  " + "\n  ".join(lines) if lines else ""


class Servers:
    """The servers that run now. `running` ends all of them."""

    def __init__(self, folder: Path, threads: int) -> None:
        self._folder, self._threads = folder, threads
        self._running: list[Server] = []
        self._started = 0

    def start(self, subject: Subject) -> Server:
        """Start the subject's own server on a free port. Raises UsageError if it cannot be started."""
        port = free_port()
        self._started += 1
        log = self._folder / f"{self._started}.log"
        command = subject.command(port, self._threads)
        began_s = time.monotonic()
        try:
            with log.open("wb") as output:
                process = _spawn(command, output)
        except OSError as error:
            raise UsageError(
                f"cannot run `{command[0]}`: {error.strerror}", f"check --subject {subject.name}"
            ) from error
        server = Server(subject, process, port, log, began_s)
        self._running.append(server)
        return server

    async def stop(self, server: Server) -> None:
        """End one of them."""
        await server.stop()
        self._running.remove(server)

    def check(self) -> None:
        """Raise EngineDead if one of them has ended."""
        for server in self._running:
            server.check()

    async def check_after_failures(self, client: httpx.AsyncClient) -> None:
        """As `check`, when requests have failed, which may be because one of them is about to end."""
        for server in self._running:
            await server.answers_or_ends(client)
        self.check()

    def kill(self) -> None:
        """End all that run, now."""
        for server in self._running:
            server.kill()
        self._running.clear()


@contextlib.contextmanager
def running(threads: int) -> Iterator[Servers]:
    """Servers that use `threads` threads each; none of them outlives the block."""
    with tempfile.TemporaryDirectory(prefix="llmctl-compare-") as folder:
        servers = Servers(Path(folder), threads)
        try:
            yield servers
        finally:
            servers.kill()


@contextlib.contextmanager
def on_cpus(cpus: tuple[int, ...]) -> Iterator[None]:
    """Run this thread, and what it starts, on these CPUs. Raises UsageError if it may not."""
    before = os.sched_getaffinity(0)
    if not set(cpus) <= before:
        raise UsageError(
            f"--cpus is {','.join(map(str, cpus))}, this process may run on {','.join(map(str, sorted(before)))}"
        )
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _spawn(command: tuple[str, ...], output: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
