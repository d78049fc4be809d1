"""`Gpu`: the Machine of a real GPU, over any Driver.

Everything runs on one stream of its own. Weights are packed on the host and copied once, through pinned memory; buffers
of steps are device memory with a twin on the host, which is never read nor written unless a step brings it. What steps
send goes through a `Feed`. Nothing here waits for the GPU but `wait` and what loading does.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..device import default_threads
from ..ops import AnyArray, U8Array
from .call import Call
from .driver import DeviceInfo, Driver
from .feed import Feed, make_feed
from .jit import Cubin
from .launch import ALWAYS_ALLOWED_BYTES
from .machine import T
from .rows import SCATTER_RUNS
from .source import Kernel

log = logging.getLogger(__name__)

_ALIGNMENT = 256
SENT_BYTES = 1 << 18  # of what `send` gives: more than the calls of one step refer to
# Of a graph's node. What a driver takes differs from version to version and is not known before a capture: an estimate,
# which no GPU has confirmed.
NODE_BYTES = 4 << 10
_CHUNK_BYTES = 16 << 20  # of pinned memory through which weights go, twice


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Launches that were captured together.

    num_bytes  of device memory: what the driver's free memory fell by when it was captured, or NODE_BYTES for each node
               if that is more: drivers take memory for several graphs at once
    """

    handle: int
    nodes: int
    num_bytes: int


@dataclass(slots=True, eq=False)
class Gpu:
    """One GPU as ops see it (see Machine), and as a runner does.

    code  gives a kernel's machine code: `Jit.get`
    used  bytes of device memory that it took
    """

    driver: Driver
    info: DeviceInfo
    code: Callable[[Kernel], Cubin]
    deterministic: bool
    stream: int
    feed: Feed
    functions: dict[Kernel, int]
    used: int = 0
    launches: int = 0
    _allowed: dict[int, int] = field(default_factory=dict)
    _twins: dict[tuple[int, int], tuple[int, AnyArray]] = field(default_factory=dict)
    _uploaded: dict[tuple[int, int], tuple[weakref.ref[AnyArray], int]] = field(default_factory=dict)
    _shared: dict[Hashable, Any] = field(default_factory=dict)
    _allocated: list[int] = field(default_factory=list)
    _pinned: list[int] = field(default_factory=list)
    _chunks: list[tuple[int, int]] = field(default_factory=list)  # address and event, while weights are copied
    _work: tuple[int, int] = (0, 0)  # address and size
    _work_given: bool = False  # calls that were made may have its address
    _sent: tuple[int, int] = (0, 0)  # address, and bytes given out
    _thread: int = 0
    _capturing: bool = False
    _collected: dict[Kernel, None] | None = None

    @property
    def capability(self) -> tuple[int, int]:
        return self.info.capability

    @property
    def processors(self) -> int:
        return self.info.processors

    def enter(self) -> None:
        """Let the calling thread use the GPU. Every way in that another thread may take begins with it."""
        if (thread := threading.get_ident()) != self._thread:
            self.driver.enter()
            self._thread = thread

    def prepare(self, kernels: Sequence[Kernel]) -> None:
        missing = [kernel for kernel in dict.fromkeys(kernels) if kernel not in self.functions]
        # The compiler lets several threads in, and is most of the time that a first start takes.
        with ThreadPoolExecutor(default_threads()) as pool:
            for kernel, cubin in zip(missing, pool.map(self.code, missing), strict=True):
                self.functions[kernel] = self.driver.load(cubin)

    def collect(self, launch: Callable[[], None]) -> tuple[Kernel, ...]:
        """Every kernel that `launch` would launch. Nothing is, and nothing is sent."""
        self._collected, self._work_given = {}, True
        try:
            launch()
        finally:
            found, self._collected = tuple(self._collected), None
        return found

    def address(self, array: AnyArray) -> int:
        key = int(array.ctypes.data), array.nbytes
        if key not in self._twins:
            assert array.flags.c_contiguous, array.strides
            address = self.allocate(array.nbytes)
            self.driver.fill(address, 0, max(array.nbytes, 1), self.stream)
            self._twins[key] = address, array  # kept, so that no other array gets its address
        return self._twins[key][0]

    def reserve(self, num_bytes: int) -> U8Array:
        # Pages that nobody may touch: they cost nothing, and give the device memory a name among the host's arrays.
        if num_bytes == 0:
            return np.zeros(0, np.uint8)
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)
        return np.frombuffer(pages, np.uint8)

    def upload(self, array: AnyArray) -> int:
        key = int(array.ctypes.data), array.nbytes
        if (known := self._uploaded.get(key)) is not None and known[0]() is array:
            return known[1]  # rope tables, say, which every layer brings
        data: U8Array = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address = self.allocate(data.nbytes)
        self._copy(address, data)
        self._uploaded[key] = weakref.ref(array), address
        return address

    def workspace(self, num_bytes: int) -> int:
        address, size = self._work
        if size < num_bytes:
            if address and not self._work_given:
                self._free(address, size)
            address = self.allocate(num_bytes)
            self._work = address, num_bytes
        return address

    def send(self, array: AnyArray) -> int:
        address, given = self._sent
        size = -(-array.nbytes // 16) * 16
        assert size <= SENT_BYTES // 4, size
        if not address:
            address = self.allocate(SENT_BYTES)
        if given + size > SENT_BYTES:
            given = 0
            self.feed.flush()  # no two pieces of one flush have the same place
        self._sent = address, given + size
        self.feed.put(address + given, array)
        return address + given

    def bring(self, array: AnyArray, count: int) -> None:
        self.feed.put(self.address(array), array[:count])

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._shared:
            self._shared[key] = make()
        made: T = self._shared[key]
        return made

    def launch(self, calls: Sequence[Call]) -> None:
        if self._collected is not None:
            self._collected.update((call.kernel, None) for call in calls)
            return
        self._work_given = True
        if self.feed.pending:
            assert not self._capturing, "what a step sends is sent before a capture begins"
            self.feed.flush()
        for call in calls:
            function = self._function(call.kernel)
            if call.shared_bytes > max(ALWAYS_ALLOWED_BYTES, self._allowed.get(function, 0)):
                self.driver.allow_shared(function, call.shared_bytes)
                self._allowed[function] = call.shared_bytes
            self.driver.launch(function, call.grid, call.threads, call.shared_bytes, self.stream, call.packed)
        self.launches += len(calls)

    def allocate(self, num_bytes: int) -> int:
        """Device memory until `close`, not initialised. Raises OutOfMemory."""
        size = max(_ALIGNMENT, -(-num_bytes // _ALIGNMENT) * _ALIGNMENT)
        address = self.driver.allocate(size)
        self._allocated.append(address)
        self.used += size
        return address

    def _free(self, address: int, num_bytes: int) -> None:
        self.driver.free(address)
        self._allocated.remove(address)
        self.used -= max(_ALIGNMENT, -(-num_bytes // _ALIGNMENT) * _ALIGNMENT)

    def pin(self, num_bytes: int) -> U8Array:
        """Pinned host memory until `close`. Raises OutOfMemory."""
        address = self.driver.pin(num_bytes)
        self._pinned.append(address)
        return np.frombuffer(memoryview((ctypes.c_ubyte * num_bytes).from_address(address)), np.uint8)

    def capture(self, launch: Callable[[], None]) -> Graph:
        """What `launch` launches, as a graph; its kernels must have been launched before. Nothing is computed."""
        before, _ = self.driver.memory()
        self.driver.begin_capture(self.stream)
        self._capturing = True
        try:
            launch()
        finally:
            self._capturing = False
            handle, nodes = self.driver.end_capture(self.stream)
        return Graph(handle, nodes, max(NODE_BYTES * nodes, before - self.driver.memory()[0]))

    def replay(self, graph: Graph) -> None:
        """Launch all of the graph, behind what was sent."""
        self.feed.flush()
        self.driver.replay(graph.handle, self.stream)
        self.launches += 1

    def settle(self) -> None:
        """Wait until all is done, and give back what only loading needed."""
        self.enter()
        self.driver.synchronize(self.stream)
        for address, event in self._chunks:
            self.driver.unpin(address)
            self.driver.destroy_event(event)
        self._chunks.clear()

    def close(self) -> None:
        """Give everything back. Nothing that was made with it may be used again."""
        self.settle()
        self.feed.close()
        for address in self._pinned:
            self.driver.unpin(address)
        for address in self._allocated:
            self.driver.free(address)
        self._pinned.clear()
        self._allocated.clear()
        self._twins.clear()
        self.driver.destroy_stream(self.stream)
        self.driver.close()

    def _function(self, kernel: Kernel) -> int:
        if (function := self.functions.get(kernel)) is None:
            function = self.functions[kernel] = self.driver.load(self.code(kernel))
        return function

    def _copy(self, address: int, data: U8Array) -> None:
        """To the device by way of pinned memory, which is faster than the driver's own way from any other."""
        if not self._chunks:
            self._chunks += ((self.driver.pin(_CHUNK_BYTES), self.driver.event()) for _ in range(2))
        for start in range(0, data.nbytes, _CHUNK_BYTES):
            chunk, copied = self._chunks[0]
            self._chunks.reverse()
            count = min(_CHUNK_BYTES, data.nbytes - start)
            self.driver.wait(copied)
            ctypes.memmove(chunk, int(data.ctypes.data) + start, count)
            self.driver.upload(address + start, chunk, count, self.stream)
            self.driver.record(copied, self.stream)


def open_gpu(driver: Driver, info: DeviceInfo, code: Callable[[Kernel], Cubin], *, deterministic: bool) -> Gpu:
    """The GPU in use by this thread; its memory is taken as it is needed."""
    driver.open(info.index)
    stream = driver.stream()
    scatter = driver.load(code(SCATTER_RUNS))
    feed = make_feed(driver, stream, scatter)
    log.info("%s: compute capability %d.%d, %d SMs", info.name, *info.capability, info.processors)
    gpu = Gpu(driver, info, code, deterministic, stream, feed, {SCATTER_RUNS: scatter})
    gpu.enter()
    return gpu
