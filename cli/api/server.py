"""One server from its listening socket to its end: load, serve, drain.

uvicorn carries HTTP. Its own way to end is replaced: it would close the listening socket at the first signal, and here
a load balancer should still be told 503 while open requests finish. The engine is a process, loaded while the server
already answers `/health`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Coroutine

import uvicorn
import uvloop
from starlette.applications import Starlette

from ...engine.attach import attach
from ...engine.client import EngineClient
from ...engine.config import EngineConfig
from ...engine.frontend import Frontend
from ...engine.process import EngineProcess
from ...kernels.errors import EngineDead
from ..console import Console
from . import journal
from .app import make_app
from .monitor import Monitor
from .service import Service
from .settings import ServeSettings
from .sockets import url

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75  # longer than clients' pools keep an idle connection, so that it is they who close it
LAST_WORDS_S = 5  # for answers that are being sent when the engine is closed already


def serve(
    settings: ServeSettings, config: EngineConfig, engine: EngineProcess, listener: socket.socket, console: Console
) -> signal.Signals | None:
    """Serve as `Server` does, on an event loop of this thread."""
    serving = Server(settings, config, engine, listener, console).run()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serving)
    finally:
        serving.close()  # or Python complains, should Ctrl-C strike before it has begun


class Server:
    """Serves one engine on one socket. `run` may be called once, on the main thread's event loop.

    `engine` was started with `config`, and loads already; the server ends it.
    """

    def __init__(
        self,
        settings: ServeSettings,
        config: EngineConfig,
        engine: EngineProcess,
        listener: socket.socket,
        console: Console,
    ) -> None:
        self._settings, self._config, self._engine = settings, config, engine
        self._listener, self._console = listener, console
        self._service = Service(settings, config.max_num_seqs)
        self._cancelled = threading.Event()  # nobody wants the engine that is being loaded any more
        self._client: EngineClient | None = None
        self._failure: Exception | None = None
        self._loading: list[asyncio.Task[None]] = []
        self._signals: list[signal.Signals] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._http = uvicorn.Server(
            uvicorn.Config(
                make_app(self._service, self._life),
                http="httptools",
                lifespan="on",
                log_config=None,
                access_log=False,
                ws="none",
                server_header=False,
                root_path=settings.root_path,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=LAST_WORDS_S,
                ssl_keyfile=settings.ssl_keyfile or None,
                ssl_certfile=settings.ssl_certfile or None,
            )
        )
        journal.log.setLevel(logging.INFO if settings.log_requests else logging.WARNING)

    async def run(self) -> signal.Signals | None:
        """Serve until a signal ends it, and return which.

        Raises LlmctlError if the model cannot be loaded, and EngineDead if the engine ends by itself: whoever watches
        over the server starts it anew.
        """
        try:
            await self._http.serve(sockets=[self._listener])
        finally:
            self._cancelled.set()
            await asyncio.gather(*self._loading)
            for task in self._tasks:
                task.cancel()
            if self._client is not None:
                await asyncio.to_thread(self._client.close)
        if self._failure is not None:
            raise self._failure
        return self._signals[0] if self._signals else None

    @contextlib.asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        """Take the signals over from uvicorn, and begin to load, just before connections are accepted."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        self._loading.append(asyncio.create_task(self._load()))
        yield

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self) -> None:
        try:
            frontend = await asyncio.to_thread(self._start_engine)
        except Exception as error:  # a bug as well must end the server, or it would be loading for ever
            if not (self._cancelled.is_set() and isinstance(error, EngineDead)):
                self._failure = error
            self._http.should_exit = True
            return
        client = self._client = frontend.client
        if self._cancelled.is_set():
            return
        monitor = Monitor(client)
        self._service.attach(frontend, monitor)
        self._spawn(self._watch(client, monitor))
        where, info = url(self._listener, bool(self._settings.ssl_certfile)), frontend.info
        self._console.say(
            f"serving {self._settings.names[0]} ({info.weight_format}, {info.max_model_len} tokens) on {where}"
        )
        self._console.data(where)

    async def _watch(self, client: EngineClient, monitor: Monitor) -> None:
        await monitor.watch()
        if client.failure is not None and not self._signals:
            log.error("%s; the server ends", client.failure.message)
            self._failure = client.failure
            self._http.should_exit = True  # open requests have been told, and have `LAST_WORDS_S` to pass it on

    def _start_engine(self) -> Frontend:
        with self._console.progress() as progress:

            def tell(description: str, done: int, total: int) -> None:
                self._service.report_loading(description, done, total)
                progress(description, done, total)

            return attach(
                self._engine,
                self._config,
                template=self._settings.chat_template,
                progress=tell,
                cancelled=self._cancelled,
            )

    def _on_signal(self, number: signal.Signals) -> None:
        self._signals.append(number)
        if len(self._signals) > 1:
            self._quit()
        elif self._client is None:
            self._cancelled.set()
            self._http.should_exit = True
        else:
            self._spawn(self._drain(self._client))

    async def _drain(self, client: EngineClient) -> None:
        """Let open requests finish, refuse new ones, then end. What takes too long is told so."""
        admission, timeout_s = self._service.admission, self._settings.shutdown_timeout_s
        if admission.open:
            self._console.say(
                f"shutting down: {admission.open} sequences have {timeout_s:g} s to finish; Ctrl-C again quits at once"
            )
        if left := await admission.drain(timeout_s):
            log.warning("%d sequences did not finish within %g s and are ended", left, timeout_s)
        self._service.cut_short()
        await asyncio.to_thread(client.close)
        self._http.should_exit = True

    def _quit(self) -> None:
        """End now. Without an engine every open answer ends at once, unless its client does not read it."""
        self._cancelled.set()
        if self._client is not None:
            self._service.cut_short()
            self._engine.kill()
        self._http.config.timeout_graceful_shutdown = 1
        self._http.should_exit = True
