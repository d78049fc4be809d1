"""The engine as the endpoints see it: loading, there, draining, stuck or dead."""

from __future__ import annotations

import hmac
import time
from dataclasses import dataclass

from ...engine.frontend import Frontend
from ...engine.request import SamplingParams
from ...engine.schedule.states import SequenceState
from .admission import Admission
from .deltas import Mailbox
from .errors import ENGINE_DEAD, OVERDUE, RETRY_S, ApiError, engine_dead, overdue, shutting_down
from .metrics import Metrics
from .monitor import Monitor
from .responses import Health
from .settings import ServeSettings, tenant_of


@dataclass(frozen=True, slots=True)
class _Engine:
    frontend: Frontend
    mailbox: Mailbox
    monitor: Monitor


HEALTH_S = 0.02  # that `/health` waits for fresh figures: it is for whoever wants to know soon; others are a second old


class Service:
    """What the endpoints share. Only the event loop's thread uses it, but for `report_loading`."""

    def __init__(self, settings: ServeSettings, max_num_seqs: int) -> None:
        self.settings = settings
        self.created = int(time.time())
        self.admission = Admission(max_num_seqs, settings.max_queue, settings.tenant_queues)
        self.metrics = Metrics(settings.names[0])
        self._loading = "starting"
        self._engine: _Engine | None = None
        self._cut_short = False

    def report_loading(self, description: str, done: int, total: int) -> None:
        """How far loading has come."""
        self._loading = f"{description}, {100 * done // total} %" if total else description

    def attach(self, frontend: Frontend, monitor: Monitor) -> None:
        """The model is loaded: requests are served from now on."""
        self._engine = _Engine(frontend, Mailbox(), monitor)
        self.metrics.watch_engine(lambda: monitor.stats)

    def cut_short(self) -> None:
        """The engine is about to be ended by us, whatever is open."""
        self._cut_short = True

    def explained(self, error: ApiError) -> ApiError:
        """The error as the client should see it.

        An engine that we ended is a server that shuts down; whose turn did not come may try when the backlog is done.
        """
        if error.code == OVERDUE:
            return overdue(error.message, self.admission.retry_s)
        if self._cut_short and error.code == ENGINE_DEAD:
            return shutting_down("the server shut down before the answer was complete")
        return error

    def ready(self) -> _Engine:
        """The engine, for a new request. ApiError 503 if it can take none."""
        self.admission.check_open()
        return self.loaded()

    def loaded(self) -> _Engine:
        """The engine if it is there and alive, else ApiError 503."""
        if self._engine is None:
            raise ApiError(503, f"the model is loading: {self._loading}", code="loading", retry_s=RETRY_S)
        if (failure := self._engine.frontend.client.failure) is not None:
            raise engine_dead(failure.message)
        return self._engine

    async def health(self) -> Health:
        """Whether the engine makes progress."""
        if self._engine is None:
            return Health("loading", self._loading)
        monitor = self._engine.monitor
        await monitor.refresh(HEALTH_S)
        stats, age = monitor.stats, monitor.last_step_age_s
        status, detail = "ok", ""
        if (failure := self._engine.frontend.client.failure) is not None:
            status, detail = "dead", failure.message
        elif age > self.settings.stuck_after_s:
            status, detail = "stuck", f"the engine has finished no step for {age:.0f} s"
        elif self.admission.draining:
            status, detail = "draining", "open requests finish, new ones are refused"
        return Health(status, detail, self.admission.open, round(age, 3), stats.steps, stats.running, stats.waiting)

    async def refresh(self) -> None:
        """Let the engine's figures be as they are now, if it answers soon."""
        if self._engine is not None:
            await self._engine.monitor.refresh()

    async def states(self) -> tuple[SequenceState, ...]:
        """Every sequence's state. ApiError 503 if the engine does not answer soon."""
        assert self._engine is not None, "asked before `loaded`"
        states = await self._engine.monitor.states()
        if states is None:
            raise ApiError(503, "the engine is in the middle of a long step", code="busy", retry_s=RETRY_S)
        return states

    def check_model(self, name: str | None) -> str:
        """The name to answer with. ApiError 404 for a model that is not served; naming none is allowed."""
        names = self.settings.names
        if name is None:
            return names[0]
        if name not in names:
            served = ", ".join(f"`{one}`" for one in names)
            raise ApiError(
                404,
                f"the model `{name}` does not exist here, served is {served}",
                param="model",
                code="model_not_found",
            )
        return name

    def check_key(self, authorization: str | None) -> str:
        """The tenant that this Authorization header stands for, "" if no keys are needed. ApiError 401 otherwise."""
        keys = self.settings.api_keys
        if not keys:
            return ""
        scheme, _, given = (authorization or "").partition(" ")
        matches = [hmac.compare_digest(given.strip().encode(), key.encode()) for key in keys]
        if scheme.lower() != "bearer" or not any(matches):
            wrong = "the API key is wrong" if authorization else "an API key is needed, as `Authorization: Bearer KEY`"
            raise ApiError(401, wrong, code="invalid_api_key")
        return tenant_of(given.strip())

    def sampling_defaults(self, frontend: Frontend) -> SamplingParams:
        """What a sampling field is that a request leaves out; max_tokens: what the context leaves."""
        return frontend.sampling_defaults if self.settings.model_defaults else SamplingParams(max_tokens=None)
