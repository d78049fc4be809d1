"""Disks that are full: found out before the work where the size is known, and told with the figures.

Downloaders wrap a failed write in errors of their own, or in another process's last words, so a full disk is looked for
in the whole chain of an error and in its text.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from ...kernels.errors import CapacityError
from ..sizes import format_bytes

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_TEXTS = ("[errno 28]", "no space left on device", "disk quota exceeded")
_REMEDY = "LLMCTL_CACHE names another folder"


def check_room(folder: Path, needed: int, what: str, remedy: str = _REMEDY) -> None:
    """Raise CapacityError if the disk of `folder`, which need not exist yet, has fewer than `needed` bytes free."""
    if needed > free_bytes(folder):
        raise disk_full(folder, needed, what, remedy)


def check_swap_room(folder: Path, needed: int) -> None:
    """Raise CapacityError if a swap space of so many bytes cannot be in `folder`: it is there or can be made, may be
    written to, and its disk has so much free."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        raise no_swap_file(folder, f"`{existing}` is no folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise no_swap_file(folder, f"`{existing}` may not be written to")
    check_room(folder, needed, "swapped KV blocks", "lower --swap-space, or let LLMCTL_CACHE name another folder")


def no_swap_file(folder: Path, why: str) -> CapacityError:
    """The error of a folder that cannot take the file of the swap space."""
    return CapacityError(
        f"cannot make a file for swapped KV blocks in `{folder}`: {why}",
        "let LLMCTL_CACHE name a folder that can be written, or use `--swap-space 0`",
    )


def disk_full(folder: Path, needed: int, what: str, remedy: str = _REMEDY) -> CapacityError:
    """The error of a disk that cannot hold `needed` bytes of `what` in `folder`."""
    free = free_bytes(folder)
    return CapacityError(
        f"no space left in `{folder}` for {what}: it needs {format_bytes(needed)} ({needed} bytes), "
        f"{format_bytes(free)} ({free} bytes) are free",
        f"free some, for example with `llmctl models prune`; {remedy}",
    )


def is_disk_full(error: BaseException) -> bool:
    """Whether a full disk is what the error, or one that it was raised from, is about."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, OSError) and chain.errno in NO_SPACE:
            return True
        if says_disk_full(str(chain)):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def says_disk_full(text: str) -> bool:
    """Whether somebody else's message is about a full disk."""
    return any(part in text.lower() for part in _TEXTS)


def free_bytes(folder: Path) -> int:
    """Bytes that can still be written where `folder` is or will be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free
