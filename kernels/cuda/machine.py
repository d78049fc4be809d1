"""`Machine`: what runs calls. The ops of `register.py` know no more of a GPU, so an emulator can take its place."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeVar

from ..ops import AnyArray, U8Array
from .call import Call
from .source import Kernel

T = TypeVar("T")


class Machine(Protocol):
    """A GPU as ops see it.

    capability     as CUDA counts it: (8, 0), (9, 0)
    processors     its SMs
    deterministic  ops must give a row the same bits whatever else is in the batch
    """

    @property
    def capability(self) -> tuple[int, int]: ...

    @property
    def processors(self) -> int: ...

    @property
    def deterministic(self) -> bool: ...

    def prepare(self, kernels: Sequence[Kernel]) -> None:
        """Compile and load what will be launched, so that no launch has to."""
        ...

    def address(self, array: AnyArray) -> int:
        """Where kernels find a buffer that steps read and write: on a GPU, its twin there."""
        ...

    def reserve(self, num_bytes: int) -> U8Array:
        """A buffer of zeros that kernels alone read and write, such as a KV arena; the host knows its address only."""
        ...

    def upload(self, array: AnyArray) -> int:
        """The address of a copy that kernels read, kept as long as the machine is."""
        ...

    def workspace(self, num_bytes: int) -> int:
        """The address of memory of at least this size, shared by all ops: nothing in it outlives one list of calls.

        What was given before stays valid when more is asked for.
        """
        ...

    def send(self, array: AnyArray) -> int:
        """The address of a copy for the launches that come next, valid until those of a later step."""
        ...

    def bring(self, array: AnyArray, count: int) -> None:
        """Let the buffer's twin (`address`) have its first `count` items, for the launches that come next."""
        ...

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was made for this key before, else what `make` makes: what ops of several layers share."""
        ...

    def launch(self, calls: Sequence[Call]) -> None:
        """Run the calls in order, behind everything launched before."""
        ...
