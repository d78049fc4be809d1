"""The emulator as a machine that ops are bound to: the way to run whole models through CUDA kernels without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..ops import AnyArray, U8Array
from .call import Call
from .emulate import Emulation, build
from .source import Kernel


@dataclass(slots=True, eq=False)
class EmulatedMachine:
    """A GPU of compute capability 8.0 whose memory is the host's, so that arrays are used where they lie."""

    folder: Path
    capability: tuple[int, int] = (8, 0)
    processors: int = 4
    deterministic: bool = True
    _kernels: dict[Kernel, None] = field(default_factory=dict)
    _built: Emulation | None = None
    _kept: list[AnyArray] = field(default_factory=list)
    _work: U8Array = field(default_factory=lambda: np.zeros(0, np.uint8))

    def prepare(self, kernels: Sequence[Kernel]) -> None:
        if any(kernel not in self._kernels for kernel in kernels):
            self._kernels.update(dict.fromkeys(kernels))
            self._built = None

    def address(self, array: AnyArray) -> int:
        return int(array.ctypes.data)

    def upload(self, array: AnyArray) -> int:
        copy = np.ascontiguousarray(array)
        self._kept.append(copy)
        return int(copy.ctypes.data)

    def workspace(self, num_bytes: int) -> int:
        if self._work.nbytes < num_bytes:
            self._work = np.zeros(num_bytes, np.uint8)
        return int(self._work.ctypes.data)

    def launch(self, calls: Sequence[Call]) -> None:
        self.prepare([call.kernel for call in calls])
        if self._built is None:
            self._built = build(list(self._kernels), "values", self.folder)
        for call in calls:
            done = self._built.launch(call.kernel, call.grid, call.threads, call.shared_bytes, call.arguments)
            reports = self._built.reports()
            assert done and not reports, (call.kernel.expression, reports)
