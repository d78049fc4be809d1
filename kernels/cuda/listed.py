"""`Listed`: a registered kernel as the static gate looks at it."""

from __future__ import annotations

from dataclasses import dataclass

from .source import Kernel


@dataclass(frozen=True, slots=True)
class Listed:
    """A kernel as it is launched: how many threads and how much dynamic shared memory a block of it has.

    in_flight  bytes that a block has asked memory for while it computes, 0 where that is not by design
    """

    kernel: Kernel
    threads: int
    shared_bytes: int = 0
    in_flight: int = 0
