"""A folder that appears complete or not at all.

Everything is written into a hidden folder beside the target, which is renamed into place as the last step. A killed run
leaves the hidden folder, which the next run to the same target clears away; a lock on it keeps two runs apart.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..kernels.errors import CapacityError, UsageError


@contextmanager
def staged_folder(target: Path, replace: bool = False) -> Iterator[Path]:
    """An empty folder that becomes `target` when the block ends well, and disappears if it raises.

    `replace` allows for a `target` that exists: it stays whole until the new one is, and is removed then. UsageError if
    there is one otherwise, except an empty folder, or if another process is writing it.
    """
    if not replace and target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UsageError(f"`{target}` already exists", "choose another output folder, or remove it first")
    staging = target.parent / f".{target.name}.partial"
    lock = _locked(staging, target)
    try:
        _clear(staging)
        yield staging
        with disk_errors(target):
            os.fsync(lock)
            _put_in_place(staging, target)
            sync(target.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write a JSON file and flush it to the disk."""
    write_file(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


def write_file(path: Path, content: bytes) -> None:
    """Write a file and flush it to the disk."""
    with disk_errors(path.parent), path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a failing write into a CapacityError that names the place."""
    try:
        yield
    except OSError as error:
        raise CapacityError(
            f"cannot write to `{path}`: {error.strerror}", "make room on this disk, or write to another one"
        ) from error


def _locked(staging: Path, target: Path) -> int:
    """A descriptor of the staging folder, made if need be, with an exclusive lock that ends with the process."""
    try:
        staging.mkdir(parents=True, exist_ok=True)
        lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise UsageError(f"cannot write to `{target.parent}`: {error.strerror}", "choose another folder") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours = os.path.samestat(os.stat(staging), os.fstat(lock))  # else it was renamed meanwhile
    except OSError:
        ours = False
    if not ours:
        os.close(lock)
        raise UsageError(f"another process is writing `{target}`", "wait for it, or stop it")
    return lock


def _put_in_place(staging: Path, target: Path) -> None:
    """Rename; a folder that is there goes aside first, since no rename replaces one that is not empty."""
    aside = target.parent / f".{target.name}.replaced"
    if target.exists() and any(target.iterdir()):
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(target, aside)
    os.replace(staging, target)
    shutil.rmtree(aside, ignore_errors=True)


def _clear(folder: Path) -> None:
    """Remove what a killed run left in the folder."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
