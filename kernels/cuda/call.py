"""`Call`: one launch of a kernel with all its arguments, the same for a GPU and for the emulator."""

from __future__ import annotations

from dataclasses import dataclass, field

from .arguments import Argument
from .driver import Packed, pack_arguments
from .source import Kernel


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
