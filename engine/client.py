"""`EngineClient`: how everything above the core reaches an engine, wherever it runs.

Outputs are handed to the request's callback on the client's own thread; a callback must be quick and must not raise.
"""

from __future__ import annotations

from typing import Protocol

from ..kernels.errors import EngineDead
from .messages import EngineInfo, EngineStats
from .open_requests import OnOutput
from .request import Request
from .schedule.states import SequenceState


class EngineClient(Protocol):
    """Submit requests, get outputs, end requests. Thread-safe."""

    info: EngineInfo

    def submit(self, request: Request, on_output: OnOutput) -> None:
        """Queue the request; every Output of it goes to `on_output`. Raises EngineDead if the engine has stopped."""

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request (or one of its sequences); it gets an Output with FinishReason.ABORT if it was still open."""

    @property
    def failure(self) -> EngineDead | None:
        """Why the engine stopped, None while it runs."""

    def stats(self) -> EngineStats:
        """The engine's counters as they are now."""

    def states(self) -> tuple[SequenceState, ...]:
        """The sequences that ended last and every unfinished one, as they are now."""

    def close(self) -> None:
        """Stop the engine; open requests are ended."""
