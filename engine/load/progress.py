"""How long work (downloads, packing) tells what it is doing, without knowing who shows it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Called now and then, perhaps from another thread. `total` 0 means that the end is not known."""

    def __call__(self, description: str, done: int, total: int) -> None: ...


def silent(description: str, done: int, total: int) -> None:
    """Progress that nobody watches."""
