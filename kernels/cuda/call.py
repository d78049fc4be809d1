"""`Call`: one launch of a kernel with all its arguments, the same for a GPU and for the emulator."""

from __future__ import annotations

from dataclasses import dataclass

from .emulate import Argument
from .source import Kernel


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """grid in blocks, threads of one block, dynamic shared memory of one block in bytes."""

    kernel: Kernel
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    arguments: tuple[Argument, ...]
