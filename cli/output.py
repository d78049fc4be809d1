"""A stdout whose failures are told as what they are.

Everything that a command prints goes through here, help included, so a full disk or a terminal that is gone is one
error with one text, wherever it strikes. A pipe whose reader left is no failure: `head -1` has seen enough, and
BrokenPipeError passes through to the boundary, which ends quietly.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from typing import TextIO

from ..kernels.errors import LlmctlError


class OutputError(LlmctlError):
    """What a command prints cannot be written."""


class Output(io.TextIOWrapper):
    """A text stream that raises OutputError, or BrokenPipeError for a reader that left."""

    def write(self, text: str, /) -> int:
        """Write; returns the number of characters."""
        with self._told():
            return super().write(text)

    def flush(self) -> None:
        """Hand on what is buffered."""
        with self._told():
            super().flush()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except UnicodeEncodeError as error:
            raise OutputError(
                f"cannot write {error.object[error.start]!a}: the output's encoding is {self.encoding}",
                "set PYTHONIOENCODING=utf-8, or a locale with UTF-8",
            ) from error
        except OSError as error:
            raise OutputError(
                f"cannot write the output: {error.strerror or error}",
                "send it elsewhere; what is there is not complete",
            ) from error


def guarded(stream: TextIO | None) -> TextIO:
    """`stream` as an Output over the same buffer; as it is if it has none, like one in memory.

    What is written goes nowhere if there is no stream.
    """
    if stream is None:
        return Output(open(os.devnull, "wb"), encoding="utf-8")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    return Output(
        stream.buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def abandon(stream: TextIO) -> None:
    """Let what is still buffered go nowhere: Python flushes at exit once more, and would complain about it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
