"""The emulator as a machine that ops are bound to: the way to run whole models through CUDA kernels without a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..ops import AnyArray, U8Array
from .call import Call
from .emulate import Emulation, Mode, build
from .machine import T
from .source import Kernel

_SENT = 64  # more than one list of calls refers to


@dataclass(slots=True, eq=False)
class EmulatedMachine:
    """A GPU of compute capability 8.0 whose memory is the host's, so that arrays are used where they lie.

    mode  "checked": kernels may touch only what they have the address of, and only as emulate.py allows
    """

    folder: Path
    capability: tuple[int, int] = (8, 0)
    processors: int = 4
    deterministic: bool = True
    mode: Mode = "values"
    _built: dict[Kernel, Emulation] = field(default_factory=dict)
    _kept: list[AnyArray] = field(default_factory=list)
    _sent: deque[AnyArray] = field(default_factory=lambda: deque(maxlen=_SENT))
    _shared: dict[Hashable, Any] = field(default_factory=dict)
    _work: U8Array = field(default_factory=lambda: np.zeros(0, np.uint8))
    _known: dict[int, int] = field(default_factory=dict)

    def prepare(self, kernels: Sequence[Kernel]) -> None:
        # Each by itself: which kernels a model needs would else decide what is compiled together, and so again.
        for kernel in kernels:
            if kernel not in self._built:
                self._built[kernel] = build([kernel], self.mode, self.folder)

    def address(self, array: AnyArray) -> int:
        return self._note(array)

    def reserve(self, num_bytes: int) -> U8Array:
        return np.zeros(num_bytes, np.uint8)

    def upload(self, array: AnyArray) -> int:
        copy = np.ascontiguousarray(array)
        self._kept.append(copy)
        return self._note(copy)

    def workspace(self, num_bytes: int) -> int:
        if self._work.nbytes < num_bytes:
            self._kept.append(self._work)
            self._work = np.zeros(num_bytes, np.uint8)
        return self._note(self._work)

    def send(self, array: AnyArray) -> int:
        self._sent.append(np.ascontiguousarray(array).copy())
        return self._note(self._sent[-1])

    def bring(self, array: AnyArray, count: int) -> None:
        """Kernels see it where it lies."""

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._shared:
            self._shared[key] = make()
        made: T = self._shared[key]
        return made

    def launch(self, calls: Sequence[Call]) -> None:
        self.prepare([call.kernel for call in calls])
        for call in calls:
            emulation = self._built[call.kernel]
            for address, size in self._known.items() if self.mode == "checked" else ():
                emulation.register(address, size, hex(address))
            done = emulation.launch(call.kernel, call.grid, call.threads, call.shared_bytes, call.arguments)
            reports = emulation.reports()
            emulation.forget()
            assert done and not reports, (call.kernel.expression, reports)

    def _note(self, array: AnyArray) -> int:
        """The array's address, which kernels have from now on."""
        address = int(array.ctypes.data)
        self._known[address] = max(array.nbytes, self._known.get(address, 0))
        return address
