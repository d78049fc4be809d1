"""Launches compiled kernels on torch's current stream, through the driver's own C interface.

An op is bound once: its arguments are packed, its module is loaded and may use its shared memory, and a launch is then
one call of the driver with nothing to convert. ctypes with reused arguments costs the host less than NVIDIA's Python
packages do (3.8 us against 5 to 6, on a driver that does nothing), these five functions have not changed since CUDA 4,
and they cannot be another version than the driver. A launch on a stream that is being captured is recorded like any
other; so every kernel has to be bound before.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import LlmctlError, UsageError
from .jit import Cubin, Jit
from .source import Argument, Kernel

Grid = tuple[int, int, int]

_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_ALWAYS_ALLOWED_BYTES = 48 << 10


class DriverError(LlmctlError):
    """A call of the CUDA driver failed."""


@dataclass(frozen=True, slots=True, eq=False)
class Driver:
    """The functions of libcuda that are needed; a context has to be current, as it is once torch has used the GPU."""

    library: ctypes.CDLL

    def load(self, cubin: Cubin) -> ctypes.c_void_p:
        """The kernel of a cubin, loaded into the current context for good."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._check("cuModuleLoadData", ctypes.byref(module), cubin.code)
        self._check("cuModuleGetFunction", ctypes.byref(function), module, cubin.symbol.encode())
        return function

    def allow_shared(self, function: ctypes.c_void_p, num_bytes: int) -> None:
        """Let launches of the function ask for so much dynamic shared memory."""
        self._check("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_BYTES, num_bytes)

    def launch(
        self,
        function: ctypes.c_void_p,
        grid: Grid,
        threads: int,
        shared_bytes: int,
        stream: int,
        pointers: ctypes.Array[ctypes.c_void_p],
    ) -> None:
        """Start the function; `pointers` are to its parameters, which are read before this returns."""
        status = self.library.cuLaunchKernel(
            function, *grid, threads, 1, 1, shared_bytes, ctypes.c_void_p(stream), pointers, None
        )
        if status != 0:
            self._fail("cuLaunchKernel", status)

    def _check(self, name: str, *arguments: object) -> None:
        if (status := getattr(self.library, name)(*arguments)) != 0:
            self._fail(name, status)

    def _fail(self, name: str, status: int) -> None:
        text = ctypes.c_char_p()
        self.library.cuGetErrorString(status, ctypes.byref(text))
        said = text.value.decode() if text.value else "unknown"
        raise DriverError(f"{name} failed with {status}: {said}")


def load_driver() -> Driver:
    """This machine's driver; raises UsageError if it has none."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise UsageError(
            f"no CUDA driver: {error}", "install NVIDIA's driver, or run on the CPU with `--device cpu`"
        ) from error


@dataclass(frozen=True, slots=True, eq=False)
class Bound:
    """A launch with all its arguments. What they point to may change, where they point may not."""

    driver: Driver
    stream: Callable[[], int]
    function: ctypes.c_void_p
    grid: Grid
    threads: int
    shared_bytes: int
    arguments: tuple[Argument, ...]
    pointers: ctypes.Array[ctypes.c_void_p]

    def run(self) -> None:
        """Start the kernel on the current stream."""
        self.driver.launch(self.function, self.grid, self.threads, self.shared_bytes, self.stream(), self.pointers)


@dataclass(slots=True, eq=False)
class Launcher:
    """Kernels of one GPU, loaded when first bound.

    stream  gives the handle of the stream to launch on: `lambda: torch.cuda.current_stream().cuda_stream`
    """

    jit: Jit
    driver: Driver
    stream: Callable[[], int]
    _functions: dict[Kernel, ctypes.c_void_p] = field(default_factory=dict)
    _allowed: dict[Kernel, int] = field(default_factory=dict)

    def bind(self, kernel: Kernel, grid: Grid, threads: int, shared_bytes: int, arguments: Sequence[Argument]) -> Bound:
        """The kernel compiled, loaded and ready to start again and again."""
        function = self._functions.get(kernel)
        if function is None:
            function = self._functions[kernel] = self.driver.load(self.jit.get(kernel))
        if shared_bytes > max(_ALWAYS_ALLOWED_BYTES, self._allowed.get(kernel, 0)):
            self.driver.allow_shared(function, shared_bytes)
            self._allowed[kernel] = shared_bytes
        kept = tuple(arguments)
        pointers = (ctypes.c_void_p * len(kept))(*(ctypes.addressof(argument) for argument in kept))
        return Bound(self.driver, self.stream, function, grid, threads, shared_bytes, kept, pointers)

    def launch(
        self, kernel: Kernel, grid: Grid, threads: int, shared_bytes: int, arguments: Sequence[Argument]
    ) -> None:
        """Bind, and start once."""
        self.bind(kernel, grid, threads, shared_bytes, arguments).run()
