"""Errors a user can act on.

Each says what was wrong with the values and the limit in `message`, and the smallest change that would work in `hint`.
Lower case, no period after one sentence, backticks round commands and paths. They are rendered once, in `cli/app.py`.
"""

from __future__ import annotations


class LlmctlError(Exception):
    """An error that is displayed to the user as it stands, without a traceback."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[type[LlmctlError], tuple[str, str]]:
        return type(self), (self.message, self.hint)


class UsageError(LlmctlError):
    """A flag, option or request field has a value that cannot work."""


class CheckpointError(LlmctlError):
    """A model's files are missing, broken, or say something that does not hold together."""


class UnsupportedModel(LlmctlError):
    """The files are fine, but nothing here can run this family or format."""


class CapacityError(LlmctlError):
    """What was asked does not fit: memory, context length, queue."""


class NoKernel(LlmctlError):
    """No registered kernel accepts an op's formats on this machine; the message lists each candidate's reason."""


class EngineDead(LlmctlError):
    """The engine stopped while requests were open."""
