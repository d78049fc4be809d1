"""Keeps what was found out about a model beside its packed weights, for the next start."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)


def keep_bytes(path: Path, data: bytes, what: str) -> None:
    """Write the file as a whole or not at all. A folder that cannot be written to costs time at every start, no more.

    what   is done again at every start then, as in "the KV cache is fitted"
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".keep-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        log.warning("%s again at every start: cannot write %s: %s", what, path, error)
