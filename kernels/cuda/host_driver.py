"""`HostDriver`: a driver without a GPU, under which the engine's own code for GPUs runs in tests.

Device memory is the host's, and kernels are run by the emulator. Everything asynchronous is put off until somebody
waits for it, as late as a GPU could be: a host buffer that is written again too early, or read too early, then shows.
Each call is written down in order. What a real driver would answer with an error, or with wrong results some day, is a
`Misuse`: memory that was freed, copies beyond the end of an allocation, asynchronous copies with memory that is not
pinned, sources that change while they are copied; and in a capture whatever cannot be captured.

Streams know of each other's work by `follow` alone. So when a copy could begin, its stream being ready for it, what it
reads on the device is looked at, and what it writes is made useless; if another stream has changed either by the time
that the copy is made, nothing had put the two in order.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..ops import U8Array
from .arguments import Argument
from .driver import DeviceInfo, Grid, OutOfMemory, Packed
from .emulate import Emulation, build
from .jit import Cubin, Resources
from .source import Kernel

_ALIGNMENT = 256
_POISON = 0xFF  # a NaN in every float type, and an index far outside of everything


class Misuse(AssertionError):
    """The driver was called in a way that no GPU would get away with."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One call: its name, the kernel if it is a launch, and its numbers.

    launch    x, y, z of the grid, threads, shared bytes, then the arguments' values
    upload, download, move, fill    target, source (or value), bytes;   others: handle or size
    """

    name: str
    kernel: str = ""
    numbers: tuple[int | float, ...] = ()


@dataclass(slots=True, eq=False)
class _Area:
    """Allocations of one kind, found by any address inside."""

    kind: str
    real: bool = True  # else there are addresses, and nothing at them
    next: int = 1 << 44
    starts: list[int] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    arrays: dict[int, U8Array] = field(default_factory=dict)

    def add(self, num_bytes: int) -> int:
        raw = np.full(num_bytes + 2 * _ALIGNMENT if self.real else 0, _POISON, np.uint8)
        start = -(-(int(raw.ctypes.data) if self.real else self.next) // _ALIGNMENT) * _ALIGNMENT
        self.next = start + num_bytes + _ALIGNMENT
        bisect.insort(self.starts, start)
        self.sizes[start], self.arrays[start] = num_bytes, raw
        return start

    def remove(self, start: int) -> None:
        if start not in self.sizes:
            raise Misuse(f"{self.kind} {start:#x} is freed, which was not allocated or was freed already")
        self.arrays.pop(start).fill(_POISON)
        del self.sizes[start]
        self.starts.remove(start)

    def check(self, address: int, num_bytes: int, what: str) -> None:
        """Raise Misuse unless all of these bytes lie in one allocation."""
        place = bisect.bisect_right(self.starts, address) - 1
        start = self.starts[place] if place >= 0 else -1
        if start < 0 or address + num_bytes > start + self.sizes[start]:
            raise Misuse(f"{what}: {num_bytes} bytes at {address:#x} are not in {self.kind} that is allocated")

    @property
    def used(self) -> int:
        return sum(self.sizes.values())


@dataclass(slots=True, eq=False)
class HostDriver:
    """A GPU of compute capability 8.0 whose memory is the host's.

    folder   where emulated kernels are built and kept; None: launches are written down and compute nothing, there is no
             device memory behind its addresses, and all that comes back are bytes of 1
    """

    folder: Path | None
    capability: tuple[int, int] = (8, 0)
    processors: int = 4
    memory_total: int = 2 << 30
    node_bytes: int = 0  # of device memory that a captured launch takes
    most_used: int = 0  # bytes of device memory, graphs included
    calls: list[Recorded] = field(default_factory=list)
    _device: _Area = field(default_factory=lambda: _Area("device memory"))
    _pinned: _Area = field(default_factory=lambda: _Area("pinned memory"))
    _kernels: dict[bytes, Kernel] = field(default_factory=dict)
    _functions: dict[int, tuple[Kernel, Emulation | None]] = field(default_factory=dict)
    _shared: dict[int, int] = field(default_factory=dict)
    _waiting: dict[int, deque[_Work]] = field(default_factory=dict)  # by stream
    _events: dict[int, _Event] = field(default_factory=dict)
    _graphs: dict[int, tuple[_Work, ...]] = field(default_factory=dict)
    _captured: dict[int, list[_Work]] = field(default_factory=dict)  # by the stream that is being captured
    _handles: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _open: int = 0
    _arriving: dict[int, int] = field(default_factory=dict)  # pinned memory that downloads still write: start, end

    def __post_init__(self) -> None:
        self._device.real = self.folder is not None

    def get(self, kernel: Kernel) -> Cubin:
        """Stands for the compiler: code that `load` knows again."""
        code = f"{kernel.header} {kernel.expression}".encode()
        self._kernels[code] = kernel
        return Cubin(code, kernel.expression, Resources(1, 0, 0, 0, 0))

    @property
    def launches(self) -> list[Recorded]:
        """The launches that were written down, in order."""
        return [call for call in self.calls if call.name == "launch"]

    @property
    def loaded(self) -> tuple[Kernel, ...]:
        """Every kernel that was loaded, once."""
        return tuple(dict.fromkeys(kernel for kernel, _ in self._functions.values()))

    def version(self) -> tuple[int, int]:
        return 13, 0

    def devices(self) -> tuple[DeviceInfo, ...]:
        return (DeviceInfo(0, "emulated GPU", self.capability, self.processors, self.memory_total),)

    def open(self, index: int) -> None:
        if index != 0:
            raise Misuse(f"device {index} is opened, there is only 0")
        self._note("open", index)
        self._open += 1

    def enter(self) -> None:
        if not self._open:
            raise Misuse("a context is entered before the device was opened")

    def close(self) -> None:
        self._note("close")
        self._open -= 1
        if not self._open and (self._device.sizes or self._pinned.sizes):
            raise Misuse(f"{self._device.used} bytes of device memory and {self._pinned.used} pinned were not freed")

    def memory(self) -> tuple[int, int]:
        return self.memory_total - self._used, self.memory_total

    def allocate(self, num_bytes: int) -> int:
        self._outside_capture("allocate")
        self._note("allocate", num_bytes)
        if num_bytes <= 0:
            raise Misuse(f"{num_bytes} bytes of device memory are asked for")
        if self._used + num_bytes > self.memory_total:
            raise OutOfMemory(f"no room for {num_bytes} bytes beside {self._used} of {self.memory_total}")
        address = self._device.add(num_bytes)
        self.most_used = max(self.most_used, self._used)
        return address

    def free(self, address: int) -> None:
        self._outside_capture("free")
        self._note("free", address)
        for stream in self._waiting:
            self._drain(stream)
        self._device.remove(address)

    def pin(self, num_bytes: int) -> int:
        self._outside_capture("pin")
        self._note("pin", num_bytes)
        return self._pinned.add(num_bytes)

    def unpin(self, address: int) -> None:
        self._note("unpin", address)
        for stream in self._waiting:
            self._drain(stream)
        self._pinned.remove(address)

    def stream(self) -> int:
        handle = next(self._handles)
        self._waiting[handle] = deque()
        self._note("stream", handle)
        return handle

    def destroy_stream(self, stream: int) -> None:
        self._drain(stream)
        del self._waiting[stream]

    def event(self, *, timed: bool = False) -> int:
        handle = next(self._handles)
        self._events[handle] = _Event(timed)
        return handle

    def destroy_event(self, event: int) -> None:
        del self._events[event]

    def record(self, event: int, stream: int) -> None:
        self._outside_capture("record")
        self._note("record", event)
        state = self._events[event]
        state.stream, state.number = stream, state.number + 1
        number = state.number

        def come() -> None:
            state.came = number

        self._waiting[stream].append(_Work(come, passes=True))

    def wait(self, event: int) -> None:
        self._outside_capture("wait")
        self._note("wait", event)
        state = self._events[event]
        self._come(state, state.number)

    def follow(self, stream: int, event: int) -> None:
        self._outside_capture("follow")
        self._note("follow", stream, event)
        state = self._events[event]
        number = state.number
        self._waiting[stream].append(
            _Work(lambda: self._come(state, number), ready=lambda: state.came >= number, passes=True)
        )

    def came(self, event: int) -> bool:
        state = self._events[event]
        return state.came == state.number

    def elapsed_ms(self, first: int, last: int) -> float:
        if not (self._events[first].timed and self._events[last].timed and self.came(first) and self.came(last)):
            raise Misuse("the time between events that are not timed, or have not come")
        return 1.0

    def synchronize(self, stream: int) -> None:
        self._outside_capture("synchronize")
        self._note("synchronize", stream)
        self._drain(stream)

    def upload(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._outside_capture("upload")
        self._note("upload", target, source, num_bytes)
        check = self._checked_copy("upload", self._device, target, self._pinned, source, num_bytes)
        # What an earlier download brings there first is as it should be.
        fed = any(start < source + num_bytes and source < end for start, end in self._arriving.items())
        before = None if fed else _checksum(source, num_bytes)

        def copy() -> None:
            check()
            if before is not None and _checksum(source, num_bytes) != before:
                raise Misuse(f"upload: what it reads at {source:#x} was changed before it was waited for")
            if self._device.real:
                ctypes.memmove(target, source, num_bytes)

        self._give(stream, self._watched(copy, target, num_bytes, written=True))

    def download(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._outside_capture("download")
        self._note("download", target, source, num_bytes)
        check = self._checked_copy("download", self._pinned, target, self._device, source, num_bytes)
        ctypes.memset(target, _POISON, num_bytes)
        before = _checksum(target, num_bytes)
        self._arriving[target] = target + num_bytes

        def copy() -> None:
            check()
            if _checksum(target, num_bytes) != before:
                raise Misuse(f"download: what it writes at {target:#x} was used before it was waited for")
            if self._device.real:
                ctypes.memmove(target, source, num_bytes)
            else:
                ctypes.memset(target, 1, num_bytes)
            self._arriving.pop(target, None)

        self._give(stream, self._watched(copy, source, num_bytes, written=False))

    def move(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._note("move", target, source, num_bytes)
        check = self._checked_copy("move", self._device, target, self._device, source, num_bytes)
        if abs(target - source) < num_bytes:
            raise Misuse(f"move: {num_bytes} bytes from {source:#x} to {target:#x} overlap")

        def copy() -> None:
            check()
            if self._device.real:
                ctypes.memmove(target, source, num_bytes)

        self._give(stream, _Work(copy))

    def fill(self, target: int, value: int, num_bytes: int, stream: int) -> None:
        self._note("fill", target, value, num_bytes)
        self._device.check(target, num_bytes, "fill")

        def fill() -> None:
            self._device.check(target, num_bytes, "fill")
            if self._device.real:
                ctypes.memset(target, value, num_bytes)

        self._give(stream, _Work(fill))

    def load(self, cubin: Cubin) -> int:
        self._outside_capture("load")
        kernel = self._kernels[cubin.code]
        self.calls.append(Recorded("load", kernel.expression))
        handle = next(self._handles)
        # Each by itself: which kernels a model needs would else decide what is compiled together, and so again.
        self._functions[handle] = kernel, None if self.folder is None else build([kernel], "values", self.folder)
        return handle

    def allow_shared(self, function: int, num_bytes: int) -> None:
        self._outside_capture("allow_shared")
        self._note("allow_shared", function, num_bytes)
        self._shared[function] = num_bytes

    def launch(
        self, function: int, grid: Grid, threads: int, shared_bytes: int, stream: int, arguments: Packed
    ) -> None:
        if function not in self._functions:
            raise Misuse(f"launch of a function {function} that was not loaded")
        kernel, emulation = self._functions[function]
        if shared_bytes > max(48 << 10, self._shared.get(function, 0)):
            raise Misuse(f"{kernel.expression} asks for {shared_bytes} bytes of shared memory that were not allowed")
        if min(grid) < 1 or not 1 <= threads <= 1024 or max(grid[1:]) > 65535:
            raise Misuse(f"{kernel.expression} has a grid {grid} of {threads} threads")
        # What is launched later has to have what was passed now.
        read = arguments.arguments if emulation is None else tuple(map(_copy, arguments.arguments))
        values = tuple(argument.value or 0 for argument in read)
        self.calls.append(Recorded("launch", kernel.expression, (*grid, threads, shared_bytes, *values)))

        def check() -> None:
            for argument in read:
                if isinstance(argument, ctypes.c_void_p) and argument.value:
                    self._device.check(argument.value, 0, kernel.expression)

        def run() -> None:
            check()
            if emulation is not None:
                done = emulation.launch(kernel, grid, threads, shared_bytes, read)
                reports = emulation.reports()
                assert done and not reports, (kernel.expression, reports)

        check()
        self._give(stream, _Work(run))

    def compute(self, name: str, stream: int, run: Callable[[], None]) -> None:
        """What another library does on the stream."""
        self._note(name, stream)
        self._give(stream, _Work(run))

    def begin_capture(self, stream: int) -> None:
        self._outside_capture("begin_capture")
        self._note("begin_capture", stream)
        self._captured[stream] = []

    def end_capture(self, stream: int) -> tuple[int, int]:
        if stream not in self._captured:
            raise Misuse("a capture is ended that was not begun")
        works = tuple(self._captured.pop(stream))
        if self._used + self.node_bytes * len(works) > self.memory_total:
            raise OutOfMemory(f"no room for a graph of {len(works)} launches beside {self._used} bytes")
        handle = next(self._handles)
        self._graphs[handle] = works
        self.most_used = max(self.most_used, self._used)
        self._note("end_capture", handle, len(works))
        return handle, len(works)

    def replay(self, graph: int, stream: int) -> None:
        self._outside_capture("replay")
        if graph not in self._graphs:
            raise Misuse(f"replay of a graph {graph} that was destroyed or never made")
        self._note("replay", graph)
        self._waiting[stream].extend(self._graphs[graph])

    def destroy_graph(self, graph: int) -> None:
        self._note("destroy_graph", graph)
        del self._graphs[graph]

    @property
    def _used(self) -> int:
        return self._device.used + self.node_bytes * sum(map(len, self._graphs.values()))

    def _note(self, name: str, *numbers: int) -> None:
        self.calls.append(Recorded(name, "", numbers))

    def _outside_capture(self, name: str) -> None:
        if self._captured:
            raise Misuse(f"{name} while a stream is captured")

    def _give(self, stream: int, work: _Work) -> None:
        if stream not in self._waiting:
            raise Misuse(f"work for a stream {stream} that does not exist")
        if stream in self._captured:
            self._captured[stream].append(work)
        else:
            self._waiting[stream].append(work)

    def _drain(self, stream: int) -> None:
        while self._waiting[stream]:
            self._do_next(stream)

    def _come(self, state: _Event, number: int) -> None:
        """Do what the event, as it was recorded for the `number`th time, waits for."""
        while state.came < number:
            assert self._waiting.get(state.stream), "an event that was recorded is waited for by its stream"
            self._do_next(state.stream)

    def _do_next(self, stream: int) -> None:
        self._look_ahead()
        queue = self._waiting[stream]
        queue[0].run()  # which may be to wait for another stream, but never for this one
        queue.popleft()

    def _look_ahead(self) -> None:
        """Let every copy that could begin notice it: of each stream the first things that wait for nothing else."""
        for queue in self._waiting.values():
            read = False
            for work in queue:
                # What is written may be what a copy before has still to read, or one behind will.
                if not work.ready() or (work.begin is None and not work.passes) or (work.written and read):
                    break
                if work.begin is not None:
                    work.begin()
                    read = True
                if work.written:
                    break

    def _watched(self, copy: Callable[[], None], address: int, num_bytes: int, *, written: bool) -> _Work:
        """The copy, which complains if its device memory changes between when it could begin and when it is made."""
        seen: list[int] = []

        def begin() -> None:
            if not seen and self._device.real:
                if written:
                    ctypes.memset(address, _POISON, num_bytes)
                seen.append(_checksum(address, num_bytes))

        def run() -> None:
            if seen and _checksum(address, num_bytes) != seen[0]:
                what = "writes" if written else "reads"
                raise Misuse(f"a copy {what} {num_bytes} bytes at {address:#x} that another stream changed meanwhile")
            copy()

        return _Work(run, begin=begin, written=written)

    def _checked_copy(
        self, name: str, to: _Area, target: int, of: _Area, source: int, num_bytes: int
    ) -> Callable[[], None]:
        def check() -> None:
            to.check(target, num_bytes, f"{name}, its target")
            of.check(source, num_bytes, f"{name}, its source")

        if num_bytes <= 0:
            raise Misuse(f"{name} of {num_bytes} bytes")
        check()
        return check


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    """Something that a stream was given.

    ready   whether it need not wait for another stream;  passes: what comes behind could begin with it
    begin   notes that it could begin now, for a copy; `written` if it writes to the device
    """

    run: Callable[[], None]
    ready: Callable[[], bool] = lambda: True
    passes: bool = False
    begin: Callable[[], None] | None = None
    written: bool = False


@dataclass(slots=True, eq=False)
class _Event:
    timed: bool
    stream: int = 0
    number: int = 0  # of the last record
    came: int = 0


def _copy(argument: Argument) -> Argument:
    return type(argument).from_buffer_copy(argument)


def _checksum(address: int, num_bytes: int) -> int:
    return zlib.crc32((ctypes.c_ubyte * num_bytes).from_address(address))
