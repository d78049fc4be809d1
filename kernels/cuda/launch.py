"""Launches compiled kernels on a stream of somebody else's, such as torch's current one.

An op is bound once: its arguments are packed, its module is loaded and may use its shared memory, and a launch is then
one call of the driver with nothing to convert. A launch on a stream that is being captured is recorded like any other;
so every kernel has to be bound before. The engine's own stream is `gpu.py`'s matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .arguments import Argument
from .driver import Driver, Grid, Packed, pack_arguments
from .jit import Jit
from .source import Kernel

ALWAYS_ALLOWED_BYTES = 48 << 10  # of dynamic shared memory


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A launch with all its arguments. What they point to may change, where they point may not."""

    driver: Driver
    stream: Callable[[], int]
    function: int
    grid: Grid
    threads: int
    shared_bytes: int
    arguments: Packed

    def run(self) -> None:
        """Start the kernel on the current stream."""
        self.driver.launch(self.function, self.grid, self.threads, self.shared_bytes, self.stream(), self.arguments)


@dataclass(slots=True, eq=False)
class Launcher:
    """Kernels of one GPU, loaded when first bound; a context has to be current, as it is once torch has used the GPU.

    stream  gives the handle of the stream to launch on: `lambda: torch.cuda.current_stream().cuda_stream`
    """

    jit: Jit
    driver: Driver
    stream: Callable[[], int]
    _functions: dict[Kernel, int] = field(default_factory=dict)
    _allowed: dict[Kernel, int] = field(default_factory=dict)

    def bind(self, kernel: Kernel, grid: Grid, threads: int, shared_bytes: int, arguments: Sequence[Argument]) -> Bound:
        """The kernel compiled, loaded and ready to start again and again."""
        function = self._functions.get(kernel)
        if function is None:
            function = self._functions[kernel] = self.driver.load(self.jit.get(kernel))
        if shared_bytes > max(ALWAYS_ALLOWED_BYTES, self._allowed.get(kernel, 0)):
            self.driver.allow_shared(function, shared_bytes)
            self._allowed[kernel] = shared_bytes
        return Bound(self.driver, self.stream, function, grid, threads, shared_bytes, pack_arguments(arguments))

    def launch(
        self, kernel: Kernel, grid: Grid, threads: int, shared_bytes: int, arguments: Sequence[Argument]
    ) -> None:
        """Bind, and start once."""
        self.bind(kernel, grid, threads, shared_bytes, arguments).run()
