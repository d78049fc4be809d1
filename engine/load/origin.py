"""Which file an error is about: what reads a config's values does not know where they came from, what opens it does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...kernels.errors import CheckpointError, UnsupportedModel


@contextmanager
def values_of(path: Path) -> Iterator[None]:
    """Errors about values that are raised inside name this file, unless they name it or one beside it already."""
    try:
        yield
    except (CheckpointError, UnsupportedModel) as error:
        if str(path.parent) in error.message:
            raise
        hint = error.hint or "fetch the model again, or correct the value there"
        raise type(error)(f"`{path}`: {error.message}", hint) from error
