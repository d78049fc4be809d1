"""Errors as OpenAI's clients expect them: a real HTTP status, and a body whose four keys are always there.

One exception carries both, and every other error is turned into it here. 422 does not occur, and neither does an error
inside a 200, unless the stream had begun.
"""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from ...engine.request import ParameterError
from ...kernels.errors import CapacityError, EngineDead, LlmctlError, UsageError

ENGINE_DEAD = "engine_dead"
OVERDUE = "max_wait_exceeded"
RETRY_S = 5  # what to wait when nothing is known about how long it takes


class ApiError(Exception):
    """An answer that is an error. `retry_s` becomes the Retry-After header."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_s = status, message, param, code, retry_s

    @property
    def body(self) -> bytes:
        """`{"error": {message, type, param, code}}`."""
        error = {"message": self.message, "type": _type(self.status), "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        """The error as a whole HTTP answer."""
        headers = {}
        if self.retry_s is not None:
            headers["retry-after"] = str(self.retry_s)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return Response(self.body, self.status, headers, media_type="application/json")


def of_llmctl(error: LlmctlError, prompt: str) -> ApiError:
    """The answer to a request that raised `error`; `prompt` is the field that holds its text."""
    message = f"{error.message} ({error.hint})" if error.hint else error.message
    if isinstance(error, ParameterError):
        return ApiError(400, message, param=error.field)
    if isinstance(error, CapacityError):
        return ApiError(400, message, param=prompt, code="context_length_exceeded")
    if isinstance(error, UsageError):
        return ApiError(400, message, param=prompt)
    if isinstance(error, EngineDead):
        return engine_dead(error.message)
    return ApiError(500, message)


def engine_dead(message: str) -> ApiError:
    """The answer when the engine is gone."""
    return ApiError(503, message, code=ENGINE_DEAD, retry_s=RETRY_S)


def shutting_down(message: str) -> ApiError:
    """The answer when the server ends before it could answer."""
    return ApiError(503, message, code="shutting_down", retry_s=RETRY_S)


def of_failed_sequence(message: str, failure: EngineDead | None) -> ApiError:
    """The answer when the engine ended a sequence with an error; `failure` says why if the engine itself has ended."""
    return ApiError(500, message, code="generation_failed") if failure is None else engine_dead(failure.message)


def overdue(message: str, retry_s: int = RETRY_S) -> ApiError:
    """The answer when a request's turn did not come in time."""
    return ApiError(429, message, param="max_wait", code=OVERDUE, retry_s=retry_s)


def bug(error: Exception) -> ApiError:
    """The answer when it is our own fault; what went wrong is in the log, not in the answer."""
    return ApiError(500, f"internal error ({type(error).__name__})")


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
