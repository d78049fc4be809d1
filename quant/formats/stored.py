"""A tensor as the header of its file describes it, and the mapped file it is read from.

Both checkpoint containers (`safetensors.py`, `gguf.py`) parse headers of untrusted files into these records. Reading a
tensor is a view of the mapping, so opening a model of any size costs its headers only.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...kernels.errors import CheckpointError, UnsupportedModel
from ...kernels.formats import WeightFormat

# How the bytes of a float kind are seen in numpy; bfloat16 as its bits.
FLOAT_VIEWS: dict[str, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies: `nbytes` bytes at `offset` of file `path`.

    dtype   the container's own name of the storage type
    format  None if that type is known but cannot be read as a weight
    order   of the weight's columns, as in `WeightTensor`
    """

    name: str
    dtype: str
    format: WeightFormat | None
    shape: tuple[int, ...]
    path: Path
    offset: int
    nbytes: int
    order: npt.NDArray[np.int32] | None = field(default=None, compare=False)

    def readable_format(self, supported: str) -> WeightFormat:
        """The format; UnsupportedModel, which names the storage type and the `supported` ones, if there is none."""
        if self.format is None:
            raise UnsupportedModel(
                f"tensor `{self.name}` of `{self.path}` is stored as {self.dtype}", f"supported: {supported}"
            )
        return self.format


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """The whole file as read-only bytes, mapped; the mapping lives as long as a view of it."""
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                raise CheckpointError(f"`{path}` is empty", "fetch the file again")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"cannot read `{path}`: {error.strerror or error}") from error
    return np.frombuffer(mapped, np.uint8)


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape as people write it: [576, 1536]."""
    return "[" + ", ".join(str(size) for size in shape) + "]"
