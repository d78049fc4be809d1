"""`Feed`: small things that a step sends to a GPU, all of them by one copy and one launch.

What is put goes into pinned memory at once, together with where it shall lie; `flush` copies that stretch, however many
pieces are in it, and a kernel takes the pieces to their places. So a step that changes a block table here and a token
there costs as much as one that changes nothing. There are several stretches in turn, and one is written again only when
the copy from it is done.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from ..ops import AnyArray, I32Array
from .driver import Driver, Packed, pack_arguments

THREADS = 128

RUN = np.dtype([("to", np.uint64), ("from", np.int32), ("words", np.int32)])  # as in step.cuh
MOST_RUNS = 1024
RUN_WORDS = 4096  # the longest run: longer ones are cut, so that several blocks share them
SLOT_BYTES = 1 << 20
SLOTS = 4  # one more than steps are in flight, and one to write


@dataclass(slots=True, eq=False)
class Feed:
    """The way of what is small. `pinned` and `staged` are SLOTS stretches of host memory, and one of the device's."""

    driver: Driver
    stream: int
    function: int  # SCATTER_RUNS, loaded
    pinned: int
    staged: int
    slots: tuple[_Slot, ...]
    _slot: int = 0
    _runs: int = 0
    _words: int = MOST_RUNS * RUN.itemsize // 4  # where the next piece begins
    _ready: bool = True

    @property
    def pending(self) -> bool:
        """Whether anything waits for a flush."""
        return self._runs > 0

    def put(self, address: int, array: AnyArray) -> None:
        """Let `address` have the array's content after the next flush; a multiple of 4 bytes, aligned as such."""
        data: I32Array = np.ascontiguousarray(array).reshape(-1).view(np.int32)
        done = 0
        while done < len(data):
            if self._runs == MOST_RUNS or self._words == SLOT_BYTES // 4:
                self.flush()
            slot = self._writable()
            count = min(len(data) - done, RUN_WORDS, SLOT_BYTES // 4 - self._words)
            slot.words[self._words : self._words + count] = data[done : done + count]
            slot.runs[self._runs] = (address + 4 * done, self._words, count)
            self._runs, self._words, done = self._runs + 1, self._words + count, done + count

    def flush(self) -> None:
        """Send what was put, in front of the launches that come next."""
        if not self._runs:
            return
        slot = self.slots[self._slot]
        self.driver.upload(self.staged, slot.address, 4 * self._words, self.stream)
        self.driver.launch(self.function, (self._runs, 1, 1), THREADS, 0, self.stream, slot.arguments)
        self.driver.record(slot.copied, self.stream)
        self._slot = (self._slot + 1) % len(self.slots)
        self._runs, self._words, self._ready = 0, MOST_RUNS * RUN.itemsize // 4, False

    def _writable(self) -> _Slot:
        """The slot that is being filled, once the GPU is done with what it held before."""
        slot = self.slots[self._slot]
        if not self._ready:
            self.driver.wait(slot.copied)
            self._ready = True
        return slot

    def close(self) -> None:
        """Give everything back; the stream must have been waited for."""
        for slot in self.slots:
            self.driver.destroy_event(slot.copied)
        self.driver.unpin(self.pinned)
        self.driver.free(self.staged)


@dataclass(frozen=True, slots=True, eq=False)
class _Slot:
    """One stretch of pinned memory: runs, then what they say where it goes. `copied`: the device has it."""

    address: int
    runs: np.ndarray[tuple[int], np.dtype[np.void]]
    words: I32Array
    copied: int
    arguments: Packed


def make_feed(driver: Driver, stream: int, function: int) -> Feed:
    """A feed with its memory; `function` is SCATTER_RUNS, loaded."""
    pinned, staged = driver.pin(SLOTS * SLOT_BYTES), driver.allocate(SLOT_BYTES)
    arguments = pack_arguments((ctypes.c_void_p(staged), ctypes.c_void_p(staged)))
    slots = []
    for place in range(SLOTS):
        address = pinned + place * SLOT_BYTES
        words = np.frombuffer(memoryview((ctypes.c_ubyte * SLOT_BYTES).from_address(address)), np.int32)
        runs = words[: MOST_RUNS * RUN.itemsize // 4].view(RUN)
        slots.append(_Slot(address, runs, words, driver.event(), arguments))
    return Feed(driver, stream, function, pinned, staged, tuple(slots))
