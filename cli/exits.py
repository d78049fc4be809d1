"""Exit codes: one number per reason, so that a script can tell a typo from a full disk without reading stderr."""

from __future__ import annotations

import enum

from ..kernels.errors import (
    CapacityError,
    CheckpointError,
    EngineDead,
    LlmctlError,
    NoKernel,
    UnsupportedModel,
    UsageError,
)


class ExitCode(enum.IntEnum):
    """Why the program ended."""

    OK = 0
    FAILURE = 1  # a check did not pass, or an error of no other kind (a bug included)
    USAGE = 2  # the command line cannot be understood or cannot work
    CHECKPOINT = 3  # a model's files are missing, broken or not reachable
    UNSUPPORTED = 4  # the files are fine, but nothing here can run them on this machine
    CAPACITY = 5  # what was asked does not fit: memory, disk or context length
    ENGINE = 6  # the engine stopped while it was working
    INTERRUPTED = 130  # 128 + SIGINT, as shells report it
    PIPE = 141  # 128 + SIGPIPE: whoever read our output went away
    TERMINATED = 143  # 128 + SIGTERM


_CODES: tuple[tuple[type[LlmctlError], ExitCode], ...] = (
    (UsageError, ExitCode.USAGE),
    (CheckpointError, ExitCode.CHECKPOINT),
    (UnsupportedModel, ExitCode.UNSUPPORTED),
    (NoKernel, ExitCode.UNSUPPORTED),
    (CapacityError, ExitCode.CAPACITY),
    (EngineDead, ExitCode.ENGINE),
)


def exit_code(error: LlmctlError) -> ExitCode:
    """The exit code for this kind of error."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return ExitCode.FAILURE
