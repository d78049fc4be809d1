"""`Driver`: what the engine needs of a CUDA driver, so that one can be stood in for where there is no GPU.

Handles (streams, events, functions, graphs) are plain ints, as are addresses. Copies and launches are asynchronous on
the stream that they name: the host may go on, and may touch what they read or write again only when an event recorded
behind them has come, or the stream was waited for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import LlmctlError
from .arguments import Argument
from .jit import Cubin

Grid = tuple[int, int, int]


class DriverError(LlmctlError):
    """A call of the CUDA driver failed."""


class OutOfMemory(DriverError):
    """The GPU, or the host for pinned memory, has not as much memory as was asked for."""


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A GPU. `capability` as CUDA counts it: (8, 0), (9, 0); `processors` are its SMs; memory in bytes."""

    index: int
    name: str
    capability: tuple[int, int]
    processors: int
    memory_total: int


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """The arguments of a launch, and pointers to them as the driver wants them. What is here is read at the launch."""

    arguments: tuple[Argument, ...]
    pointers: ctypes.Array[ctypes.c_void_p]


def pack_arguments(arguments: Sequence[Argument]) -> Packed:
    """These arguments, ready to be launched with again and again."""
    kept = tuple(arguments)
    pointers = (ctypes.c_void_p * len(kept))(*(ctypes.addressof(argument) for argument in kept))
    return Packed(kept, pointers)


class Driver(Protocol):
    """A driver with one GPU in use, whose primary context it shares with every other library of this process."""

    def version(self) -> tuple[int, int]:
        """The newest CUDA that it knows, such as (13, 0)."""
        ...

    def devices(self) -> tuple[DeviceInfo, ...]: ...

    def open(self, index: int) -> None:
        """Make the device's primary context; what follows is meant for it."""
        ...

    def enter(self) -> None:
        """Make the open device's context that of the calling thread."""
        ...

    def close(self) -> None:
        """Let go of the context: all memory of ours must have been freed."""
        ...

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the open device."""
        ...

    def allocate(self, num_bytes: int) -> int:
        """Device memory, not initialised. Raises OutOfMemory."""
        ...

    def free(self, address: int) -> None: ...

    def pin(self, num_bytes: int) -> int:
        """Host memory that copies can be asynchronous with. Raises OutOfMemory."""
        ...

    def unpin(self, address: int) -> None: ...

    def stream(self) -> int: ...

    def destroy_stream(self, stream: int) -> None: ...

    def event(self, *, timed: bool = False) -> int: ...

    def destroy_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None:
        """The event comes when all has been done that the stream was given so far."""
        ...

    def wait(self, event: int) -> None:
        """Let the calling thread wait for the event; one that was never recorded has come."""
        ...

    def follow(self, stream: int, event: int) -> None:
        """Let what the stream is given from now on wait for the event, as it was last recorded; the host does not."""
        ...

    def came(self, event: int) -> bool: ...

    def elapsed_ms(self, first: int, last: int) -> float:
        """Between two timed events that have come."""
        ...

    def synchronize(self, stream: int) -> None: ...

    def upload(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """From pinned host memory to the device."""
        ...

    def download(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """From the device to pinned host memory."""
        ...

    def move(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        """Within the device; the two must not overlap."""
        ...

    def fill(self, target: int, value: int, num_bytes: int, stream: int) -> None:
        """Set every byte."""
        ...

    def load(self, cubin: Cubin) -> int:
        """The kernel of a cubin, loaded into the context for good."""
        ...

    def allow_shared(self, function: int, num_bytes: int) -> None:
        """Let launches of the function ask for so much dynamic shared memory."""
        ...

    def launch(
        self, function: int, grid: Grid, threads: int, shared_bytes: int, stream: int, arguments: Packed
    ) -> None: ...

    def begin_capture(self, stream: int) -> None:
        """What the stream is given from now on is written down instead of done."""
        ...

    def end_capture(self, stream: int) -> tuple[int, int]:
        """(what was written down, ready to be replayed; how many nodes that are)."""
        ...

    def replay(self, graph: int, stream: int) -> None: ...

    def destroy_graph(self, graph: int) -> None: ...
