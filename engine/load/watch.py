"""Progress of a download that someone else makes: the bytes that appear in its folder.

Watching the disk needs nothing of the downloader's own progress bars, whose interface changes from version to version.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .progress import Progress

_INTERVAL_S = 0.25


@contextmanager
def watched(folder: Path, description: str, total: int, progress: Progress) -> Iterator[None]:
    """While the body runs, tell `progress` how many of `total` bytes the files in `folder` hold."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_INTERVAL_S):
            progress(description, min(folder_bytes(folder), total), total)

    progress(description, 0, total)
    watcher = threading.Thread(target=watch, name="download-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    progress(description, total, total)


def folder_bytes(folder: Path) -> int:
    """Size of the files directly in `folder`, 0 if it does not exist; files may come and go meanwhile."""
    total = 0
    try:
        for path in folder.iterdir():
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
    except FileNotFoundError:
        return 0
    return total
