"""transformers as a target: asks its worker process and turns what it reports into pieces."""

from __future__ import annotations

import asyncio
import itertools
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator
from typing import IO

import msgspec

from ...engine.load.hub import Source
from ...kernels.errors import LlmctlError
from .targets import Counts, Piece, RequestFailed
from .transformers_worker import Ask, Cancel, Happened, Loaded, Told
from .workload import Item, form_of, ids_of

_LINE_LIMIT = 1 << 24
_LAST_LINES = 3


class Transformers:
    """The worker process and the requests that are open in it. Made by `start_transformers`, closed by `close`."""

    def __init__(self, process: Process, errors: IO[bytes], stop_ids: tuple[int, ...]) -> None:
        self.backend = "transformers float32"
        self.pids: tuple[int, ...] = (process.pid,)
        self._process, self._errors, self._stop_ids = process, errors, stop_ids
        self._ids = itertools.count()
        self._open: dict[int, asyncio.Queue[bool | None]] = {}  # True ends the answer, None: the worker is gone
        self._decoder: msgspec.json.Decoder[Happened] = msgspec.json.Decoder(Happened)
        self._reader: asyncio.Task[None] | None = None

    async def wait_loaded(self) -> None:
        """Until the model is ready. Raises LlmctlError with the worker's last words if it ends instead."""
        if not isinstance(await self._next(), Loaded):
            raise LlmctlError(f"transformers could not be started: {self.last_words()}")
        self._reader = asyncio.ensure_future(self._read())

    async def send(self, item: Item) -> AsyncGenerator[Piece, None]:
        """See Target."""
        assert form_of(item.prompt) == "ids", "the worker has no tokenizer"
        assert self._reader is not None, "not loaded yet"
        if self._reader.done():
            raise LlmctlError(f"transformers has ended: {self.last_words()}")
        number, happened = next(self._ids), asyncio.Queue[bool | None]()
        self._open[number] = happened
        self._tell(Ask(number, ids_of(item.prompt), item.max_tokens, self._stop_ids))
        tokens, done = 0, False
        try:
            while not done:
                came = await happened.get()
                if came is None:
                    raise RequestFailed(f"transformers has ended: {self.last_words()}")
                tokens, done = tokens + 1, came
                yield Piece(1, Counts(len(item.prompt), tokens, 0) if done else None)
        finally:
            del self._open[number]
            if not done:
                self._tell(Cancel(number))

    async def close(self) -> None:
        """End the worker."""
        if self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._errors.close()

    def last_words(self) -> str:
        """The end of what the worker wrote to its stderr."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return " / ".join(lines[-_LAST_LINES:]) or "it said nothing"

    async def _read(self) -> None:
        while (happened := await self._next()) is not None:
            assert not isinstance(happened, Loaded), happened
            for number in happened.ids:
                if number in self._open:
                    self._open[number].put_nowait(number in happened.done)
        for waiting in self._open.values():
            waiting.put_nowait(None)

    async def _next(self) -> Happened | None:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        return self._decoder.decode(line) if line else None

    def _tell(self, told: Told) -> None:
        assert self._process.stdin is not None
        if self._process.returncode is None:
            self._process.stdin.write(msgspec.json.encode(told) + b"\n")


async def start_transformers(source: Source, threads: int, stop_ids: tuple[int, ...]) -> Transformers:
    """The model in transformers with so many threads, loaded and ready."""
    errors = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the target
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"{__package__}.transformers_worker", str(source.path), source.kind, source.name,
        str(threads), stdin=PIPE, stdout=PIPE, stderr=errors, limit=_LINE_LIMIT, start_new_session=True,
    )  # fmt: skip
    target = Transformers(process, errors, stop_ids)
    try:
        await target.wait_loaded()
    except BaseException:
        await target.close()
        raise
    return target
