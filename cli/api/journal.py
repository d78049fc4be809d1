"""One line per request, on stderr, for people and for programs: `key=value` pairs, never any text of a prompt.

The middleware is plain ASGI, so that an answer that streams is measured to its end. It makes a `Record`, which the
endpoint fills in with what only it knows.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...engine.frontend import TextDelta
from ...engine.request import FinishReason
from .errors import bug
from .metrics import Metrics
from .shape import Tally

log = logging.getLogger(__name__)

CLIENT_LEFT = 499  # nobody receives this status; it is nginx's name for the case
_QUIET = frozenset({"/health", "/metrics"})  # asked for every few seconds by programs
_PLAIN = re.compile(r"[\w./:@+-]+")


@dataclass(slots=True)
class Record:
    """What is known of one HTTP request so far."""

    metrics: Metrics
    id: str
    endpoint: str = "other"
    started: float = field(default_factory=time.monotonic)
    status: int = CLIENT_LEFT
    stream: bool = False
    sequences: int = 0
    tenant: str = ""
    error: str = ""
    tally: Tally | None = None
    first_token_s: float | None = None
    finishes: dict[FinishReason, int] = field(default_factory=dict)
    last_tokens: dict[int, float] = field(default_factory=dict)  # when each choice last got tokens

    def tokens_came(self, choice: int, delta: TextDelta, now: float) -> None:
        """Take note of a delta that came at this time."""
        if delta.tokens:
            if self.first_token_s is None:
                self.first_token_s = now - self.started
                self.metrics.first_token(self.first_token_s)
            if (last := self.last_tokens.get(choice)) is not None:
                self.metrics.more_tokens(now - last, len(delta.tokens))
            self.last_tokens[choice] = now
        if delta.finish is not None:
            self.finishes[delta.finish] = self.finishes.get(delta.finish, 0) + 1
            self.metrics.sequence_ended(delta.finish)

    def client_left(self) -> None:
        """Nobody listens any more."""
        self.status, self.error = CLIENT_LEFT, "client left"

    def answered(self) -> None:
        """The whole answer was sent."""
        assert self.tally is not None, "an answer without a tally"
        self.metrics.answered(time.monotonic() - self.started, self.tally.prompt_tokens, self.tally.completion_tokens)

    def line(self) -> str:
        """The log line."""
        pairs: dict[str, object] = {"id": self.id, "endpoint": self.endpoint, "status": self.status}
        if self.tally is not None:
            pairs |= {
                "stream": int(self.stream),
                "sequences": self.sequences,
                "prompt_tokens": self.tally.prompt_tokens,
                "cached_tokens": self.tally.cached_tokens,
                "completion_tokens": self.tally.completion_tokens,
                "finish": ",".join(f"{reason}:{count}" for reason, count in self.finishes.items()) or "none",
            }
        if self.first_token_s is not None:
            pairs["ttft_ms"] = f"{self.first_token_s * 1000:.1f}"
        pairs["total_ms"] = f"{(time.monotonic() - self.started) * 1000:.1f}"
        if self.tenant:
            pairs["tenant"] = self.tenant
        if self.error:
            pairs["error"] = self.error
        return " ".join(f"{name}={_quoted(str(value))}" for name, value in pairs.items())


class Journal:
    """ASGI middleware: a Record for each HTTP request, an `x-request-id` on its answer, a log line at its end."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record(self._metrics, uuid.uuid4().hex)
        scope.setdefault("state", {})["record"] = record

        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", record.id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except ClientDisconnect:  # in the middle of its body: nobody is left to answer
            record.client_left()
        except Exception as error:
            log.exception("request %s failed", record.id)
            record.error = type(error).__name__
            if begun:
                raise
            await bug(error).response()(scope, receive, noted)
        finally:
            self._metrics.responded(record.endpoint, record.status)
            if record.endpoint not in _QUIET:
                log.info("%s", record.line())


def _quoted(value: str) -> str:
    return value if _PLAIN.fullmatch(value) else json.dumps(value)
