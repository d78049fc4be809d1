"""NVIDIA's driver through its own C interface: `LibCuda` is a `Driver`.

ctypes with reused arguments costs the host less than NVIDIA's Python packages do (3.8 us a launch against 5 to 6, on a
driver that does nothing), the functions that are called have not changed since CUDA 11.4, and they cannot be another
version than the driver. The context is the device's primary one, which torch uses too: whoever comes second finds it
there.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError
from .driver import DeviceInfo, DriverError, Grid, OutOfMemory, Packed
from .jit import Cubin

_OUT_OF_MEMORY, _NOT_READY = 2, 600  # CUresult
_MAX_DYNAMIC_SHARED_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROCESSORS, _MAJOR, _MINOR = 16, 75, 76  # CU_DEVICE_ATTRIBUTE_*
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: other libraries' work on the default stream does not hold ours up
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_THIS_THREAD = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: what other threads do meanwhile does not matter

_POINTERS = ctypes.POINTER(c_void_p)
_OUT = c_void_p  # ctypes.byref of anything
_PARAMETERS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (_OUT,),
    "cuDeviceGetCount": (_OUT,),
    "cuDeviceGet": (_OUT, c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (_OUT, c_int, c_int),
    "cuDeviceTotalMem_v2": (_OUT, c_int),
    "cuDevicePrimaryCtxRetain": (_OUT, c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemGetInfo_v2": (_OUT, _OUT),
    "cuMemAlloc_v2": (_OUT, c_size_t),
    "cuMemFree_v2": (c_uint64,),
    "cuMemHostAlloc": (_OUT, c_size_t, c_uint),
    "cuMemFreeHost": (c_void_p,),
    "cuStreamCreate": (_OUT, c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (_OUT, c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventQuery": (c_void_p,),
    "cuEventElapsedTime": (_OUT, c_void_p, c_void_p),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),
    "cuMemcpyDtoHAsync_v2": (c_void_p, c_uint64, c_size_t, c_void_p),
    "cuMemcpyDtoDAsync_v2": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemsetD8Async": (c_uint64, c_ubyte, c_size_t, c_void_p),
    "cuModuleLoadData": (_OUT, c_char_p),
    "cuModuleGetFunction": (_OUT, c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, _POINTERS, c_void_p),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, _OUT),
    "cuGraphGetNodes": (c_void_p, c_void_p, _OUT),
    "cuGraphInstantiateWithFlags": (_OUT, c_void_p, c_uint64),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphExecDestroy": (c_void_p,),
    "cuGraphDestroy": (c_void_p,),
}


@dataclass(slots=True, eq=False)
class LibCuda:
    """The driver of this machine. Until `open`, whatever context is current serves."""

    library: ctypes.CDLL
    _functions: dict[str, Any] = field(default_factory=dict)
    _device: int = -1
    _context: int = 0

    def version(self) -> tuple[int, int]:
        number = c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        return number.value // 1000, number.value % 1000 // 10

    def devices(self) -> tuple[DeviceInfo, ...]:
        self._call("cuInit", 0)
        count = c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return tuple(self._device_info(index) for index in range(count.value))

    def open(self, index: int) -> None:
        self._call("cuInit", 0)
        context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), index)
        self._device, self._context = index, context.value or 0
        self.enter()

    def enter(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def close(self) -> None:
        if self._context:
            self._call("cuDevicePrimaryCtxRelease_v2", self._device)
            self._context = 0

    def memory(self) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, num_bytes: int) -> int:
        address = c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), num_bytes)
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def pin(self, num_bytes: int) -> int:
        return self._made("cuMemHostAlloc", num_bytes, 0)

    def unpin(self, address: int) -> None:
        self._call("cuMemFreeHost", address)

    def stream(self) -> int:
        return self._made("cuStreamCreate", _NON_BLOCKING)

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def event(self, *, timed: bool = False) -> int:
        return self._made("cuEventCreate", 0 if timed else _NO_TIMING)

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def wait(self, event: int) -> None:
        self._call("cuEventSynchronize", event)

    def follow(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def came(self, event: int) -> bool:
        status = self._function("cuEventQuery")(event)
        if status not in (0, _NOT_READY):
            self._fail("cuEventQuery", status)
        return bool(status == 0)

    def elapsed_ms(self, first: int, last: int) -> float:
        time = c_float()
        self._call("cuEventElapsedTime", ctypes.byref(time), first, last)
        return time.value

    def synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def upload(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._call("cuMemcpyHtoDAsync_v2", target, source, num_bytes, stream)

    def download(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync_v2", target, source, num_bytes, stream)

    def move(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._call("cuMemcpyDtoDAsync_v2", target, source, num_bytes, stream)

    def fill(self, target: int, value: int, num_bytes: int, stream: int) -> None:
        self._call("cuMemsetD8Async", target, value, num_bytes, stream)

    def load(self, cubin: Cubin) -> int:
        module = self._made("cuModuleLoadData", cubin.code)
        return self._made("cuModuleGetFunction", module, cubin.symbol.encode())

    def allow_shared(self, function: int, num_bytes: int) -> None:
        self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_BYTES, num_bytes)

    def launch(
        self, function: int, grid: Grid, threads: int, shared_bytes: int, stream: int, arguments: Packed
    ) -> None:
        self._call("cuLaunchKernel", function, *grid, threads, 1, 1, shared_bytes, stream, arguments.pointers, None)

    def begin_capture(self, stream: int) -> None:
        self._call("cuStreamBeginCapture_v2", stream, _THIS_THREAD)

    def end_capture(self, stream: int) -> tuple[int, int]:
        graph = c_void_p()
        self._call("cuStreamEndCapture", stream, ctypes.byref(graph))
        try:
            nodes = c_size_t()
            self._call("cuGraphGetNodes", graph, None, ctypes.byref(nodes))
            return self._made("cuGraphInstantiateWithFlags", graph, 0), nodes.value
        finally:
            self._call("cuGraphDestroy", graph)

    def replay(self, graph: int, stream: int) -> None:
        self._call("cuGraphLaunch", graph, stream)

    def destroy_graph(self, graph: int) -> None:
        self._call("cuGraphExecDestroy", graph)

    def _device_info(self, index: int) -> DeviceInfo:
        device, total, name = c_int(), c_size_t(), ctypes.create_string_buffer(256)
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDeviceGetName", name, len(name), device)
        self._call("cuDeviceTotalMem_v2", ctypes.byref(total), device)
        processors, major, minor = (self._attribute(which, device) for which in (_PROCESSORS, _MAJOR, _MINOR))
        return DeviceInfo(index, name.value.decode(errors="replace"), (major, minor), processors, total.value)

    def _attribute(self, which: int, device: c_int) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), which, device)
        return value.value

    def _made(self, name: str, *arguments: object) -> int:
        """The handle or address that the function writes to its first parameter."""
        out = c_void_p()
        self._call(name, ctypes.byref(out), *arguments)
        return out.value or 0

    def _call(self, name: str, *arguments: object) -> None:
        if (status := self._function(name)(*arguments)) != 0:
            self._fail(name, status)

    def _function(self, name: str) -> Any:
        if (found := self._functions.get(name)) is None:
            found = getattr(self.library, name)
            found.argtypes, found.restype = _PARAMETERS[name], c_int
            self._functions[name] = found
        return found

    def _fail(self, name: str, status: int) -> None:
        text = c_char_p()
        self.library.cuGetErrorString(status, ctypes.byref(text))
        said = text.value.decode() if text.value else "unknown"
        kind = OutOfMemory if status == _OUT_OF_MEMORY else DriverError
        raise kind(f"{name} failed with {status}: {said}")


def load_driver() -> LibCuda:
    """This machine's driver; raises UsageError if it has none."""
    try:
        return LibCuda(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise UsageError(
            f"no CUDA driver: {error}", "install NVIDIA's driver, or run on the CPU with `--device cpu`"
        ) from error
