"""`Machine`: what runs calls. The ops of `register.py` know no more of a GPU, so an emulator can take its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..ops import AnyArray
from .call import Call
from .source import Kernel


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

    def launch(self, calls: Sequence[Call]) -> None:
        """Run the calls in order, behind everything launched before."""
        ...
