"""`Call`: one launch of a kernel with all its arguments, the same for a GPU and for the emulator."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

from .driver import Packed, pack_arguments
from .source import Kernel

Argument = ctypes.c_void_p | ctypes.c_int32 | ctypes.c_int64 | ctypes.c_float


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """grid in blocks, threads of one block, dynamic shared memory of one block in bytes.

    packed  the arguments as a driver wants them: a call that is kept is packed once
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    arguments: tuple[Argument, ...]
    packed: Packed = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "packed", pack_arguments(self.arguments))
