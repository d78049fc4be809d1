"""Tier 2 of the KV cache on a CPU: an unlinked file with a place for one block of every KV group that keeps everything.

A block is one stretch of the arena, so it is written from there and read into it without a copy of ours. The checksum
of what was written stays in memory. A place whose content has another one, whatever happened to it, holds nothing, and
neither does one that could not be written: whoever asks for it is told so. The file has no name, so it is gone with the
process, however that ends.
"""

from __future__ import annotations

import logging
import os
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from io import FileIO
from pathlib import Path

from ..load.disk import check_swap_room, no_swap_file
from ..schedule.step import Swap
from ..sizes import format_bytes
from .cache import GroupCache

log = logging.getLogger(__name__)


def open_tier(folder: Path, groups: Sequence[GroupCache], num_places: int, block_size: int) -> TierStore:
    """A store of so many places in a new file in `folder`. CapacityError if there can be none, or not of that size."""
    needed = num_places * sum(cache.bytes_per_block for cache in groups)
    check_swap_room(folder, needed)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = tempfile.TemporaryFile(buffering=0, dir=folder, prefix="swap-")  # noqa: SIM115  (the store closes it)
    except OSError as error:
        raise no_swap_file(folder, error.strerror or str(error)) from error
    assert isinstance(file, FileIO)
    log.info(
        "swap space: %d blocks of %d tokens, %s at most, in `%s`", num_places, block_size, format_bytes(needed), folder
    )
    return TierStore(file, groups)


class TierStore:
    """The file of tier 2, which it owns, and the checksums of its places. A place takes one block of every group."""

    def __init__(self, file: FileIO, groups: Sequence[GroupCache]) -> None:
        self._file = file
        self._arenas = [cache.arena.data for cache in groups]
        self._sizes = [cache.bytes_per_block for cache in groups]
        self._stride = sum(self._sizes)
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
        checksum, offset = swap.place, swap.place * self._stride
        try:
            for part in self._parts(swap):
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
        checksum, offset = swap.place, swap.place * self._stride
        try:
            for part in self._parts(swap):
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
        for part in self._parts(swap):
            part[:] = bytes(len(part))  # what is behind a block's last token is multiplied by zero: it must be finite
        return False

    def _parts(self, swap: Swap) -> Iterable[memoryview]:
        for arena, size, block in zip(self._arenas, self._sizes, swap.blocks):
            yield arena[block * size : (block + 1) * size]


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
