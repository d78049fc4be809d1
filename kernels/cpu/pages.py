"""Weights on large pages: a step reads all of them, and with pages of 4 KiB it waits for address translation.

A mapped file has large pages where its file system keeps it in large pieces (Linux 6, ext4, XFS and others): the
mapping asks for them, and entries of the packed cache are written so that they come about. Where they do not, the
weights are copied into anonymous memory that has them, and that memory takes the mapping's place: every view of it
stays as it is. A copy belongs to one process alone, a mapped file is shared by all.
"""

from __future__ import annotations

import enum
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from .. import _cpu
from ..ops import U8Array

log = logging.getLogger(__name__)

LARGE_PAGE = 2 << 20
_ENOUGH = 0.8  # of the bytes on large pages; both ends may lie outside of one
STATE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_STATUS = Path("/proc/self/status")
_MAPS = Path("/proc/self/smaps")


class Pages(enum.Enum):
    """What weights lie on."""

    MAPPED = "large pages of the mapped file"
    COPIED = "large pages of a copy"
    SMALL = "small pages of the mapped file"


def large_pages_allowed() -> bool:
    """Whether the system gives large pages to whoever asks for them, and this process may."""
    try:
        return "[never]" not in STATE.read_text() and "\nTHP_enabled:\t0" not in _STATUS.read_text("ascii", "replace")
    except OSError:
        return False


def ask_for_large_pages(mapped: U8Array) -> None:
    """Have a whole mapped file read in large pieces, as far as it is not in memory yet."""
    _cpu.ask_for_large_pages(mapped.ctypes.data, mapped.nbytes)


def settle_on_large_pages(mapped: U8Array) -> Pages:
    """Put the bytes of a whole mapped file, read-only, on large pages if the system has any.

    Values and address stay as they are. A copy takes as much memory as `mapped` has bytes; where the system refuses
    that, the mapping stays.
    """
    if mapped.nbytes < 2 * LARGE_PAGE or not large_pages_allowed():
        return Pages.SMALL
    if _share_on_large_pages(mapped) >= _ENOUGH:
        return Pages.MAPPED
    if (error := _cpu.move_to_large_pages(mapped.ctypes.data, mapped.nbytes)) != 0:
        log.info("weights stay on small pages: %s", os.strerror(error))
        return Pages.SMALL
    if _share_on_large_pages(mapped) < _ENOUGH:
        log.info("the system has too few large pages left for all weights")
    return Pages.COPIED


def _share_on_large_pages(mapped: U8Array) -> float:
    """The part of the bytes that lies on large pages, once each of these was touched."""
    int(mapped[::LARGE_PAGE].sum())
    start, found = mapped.ctypes.data, 0
    try:
        maps = _MAPS.read_text(errors="surrogateescape")  # paths of files may be any bytes
    except OSError:  # a system that does not tell
        return 0.0
    for first, last, fields in _areas(maps):
        if first < start + mapped.nbytes and start < last:
            sizes = re.findall(r"^(?:FilePmdMapped|AnonHugePages): +(\d+) kB$", fields, re.MULTILINE)
            found += sum(int(size) << 10 for size in sizes)
    return found / mapped.nbytes


def _areas(maps: str) -> Iterator[tuple[int, int, str]]:
    """(first address, the one behind the last, lines) of every mapping of a process."""
    parts = re.split(r"^([0-9a-f]+)-([0-9a-f]+) ", maps, flags=re.MULTILINE)
    for first, last, fields in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        yield int(first, 16), int(last, 16), fields
