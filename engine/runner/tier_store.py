"""Tier 2 of the KV cache on a CPU: an unlinked file with places, each for one block of the KV groups that share it.

The groups that keep everything share places, each group with a window has its own behind them. A block is one stretch
of the arena, so it is written from there and read into it without a copy of ours. The checksum of what was written
stays in memory. A place whose content has another one, whatever happened to it, holds nothing, and neither does one
that could not be written: whoever asks for it is told so. The file has no name, so it is gone with the process, however
that ends.
"""

from __future__ import annotations

import logging
import os
import tempfile
import zlib
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

from ..load.disk import check_swap_room, no_swap_file
from ..schedule.step import Swap
from ..sizes import format_bytes
from .shelves import Shelves

log = logging.getLogger(__name__)


def open_tier(folder: Path, shelves: Shelves, block_size: int) -> TierStore:
    """A store of these places in a new file in `folder`. CapacityError if there can be none, or not of that size."""
    check_swap_room(folder, shelves.num_bytes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = tempfile.TemporaryFile(buffering=0, dir=folder, prefix="swap-")  # noqa: SIM115  (the store closes it)
    except OSError as error:
        raise no_swap_file(folder, error.strerror or str(error)) from error
    assert isinstance(file, FileIO)
    size = format_bytes(shelves.num_bytes)
    log.info("swap space: %s blocks of %d tokens, %s at most, in `%s`", shelves, block_size, size, folder)
    return TierStore(file, shelves)


class TierStore:
    """The file of tier 2, which it owns, and the checksums of its places, which are numbered shelf after shelf."""

    def __init__(self, file: FileIO, shelves: Shelves) -> None:
        self._file = file
        self._shelves = shelves
        self._checksums: dict[int, int] = {}  # of the places that hold something
        self._full = False

    def move(self, swaps: Iterable[Swap]) -> tuple[int, ...]:
        """Make these moves, one after the other; the places of those that went wrong."""
        failed = [swap.place for swap in swaps if not (self._write(swap) if swap.out else self._read(swap))]
        return tuple(dict.fromkeys(failed))

    def close(self) -> None:
        """Give the file back."""
        self._file.close()

    def _write(self, swap: Swap) -> bool:
        self._checksums.pop(swap.place, None)
        checksum = swap.place
        offset, blocks = self._found(swap)
        try:
            for part in blocks:
                _write_all(self._file.fileno(), part, offset)
                checksum = zlib.crc32(part, checksum)
                offset += len(part)
        except OSError as error:
            if not self._full:  # later ones would say the same again
                log.warning(
                    "swap space: a block could not be written (%s); the cache goes on with the %d it has there",
                    error.strerror or error,
                    len(self._checksums),
                )
            self._full = True
            return False
        self._full = False
        self._checksums[swap.place] = checksum
        return True

    def _read(self, swap: Swap) -> bool:
        expected = self._checksums.pop(swap.place, None)
        if expected is None:
            return False
        fault = "is not what was written there"
        checksum = swap.place
        offset, blocks = self._found(swap)
        try:
            for part in blocks:
                _read_all(self._file.fileno(), part, offset)
                checksum = zlib.crc32(part, checksum)
                offset += len(part)
        except OSError as error:
            fault = f"cannot be read ({error})"
        else:
            if checksum == expected:
                self._checksums[swap.place] = expected
                return True
        log.error("swap space: place %d %s, its tokens are computed again", swap.place, fault)
        for part in blocks:
            part[:] = bytes(len(part))  # what is behind a block's last token is multiplied by zero: it must be finite
        return False

    def _found(self, swap: Swap) -> tuple[int, list[memoryview]]:
        """Where its place begins in the file, and its blocks."""
        groups, offset = self._shelves.spot(swap.place)
        sizes = [cache.bytes_per_block for cache in groups]
        arenas = [cache.arena.data for cache in groups]
        return offset, [arena[at * size : (at + 1) * size] for arena, size, at in zip(arenas, sizes, swap.blocks)]


def _write_all(file: int, part: memoryview, offset: int) -> None:
    """Write all of it. OSError if the disk takes only a part, which it says at the second try."""
    done = 0
    while done < len(part):
        count = os.pwrite(file, part[done:], offset + done)
        if count == 0:
            raise OSError("nothing more is taken")
        done += count


def _read_all(file: int, part: memoryview, offset: int) -> None:
    done = 0
    while done < len(part):
        count = os.preadv(file, [part[done:]], offset + done)
        if count == 0:
            raise OSError("the file ends too early")
        done += count
