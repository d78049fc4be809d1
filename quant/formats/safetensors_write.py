"""Writing safetensors files whose content is planned before it is computed.

Every tensor's size is known before the first one is. So files are laid out and their space is taken up first: a full
disk is noticed at once instead of after hours, and tensors can be written in any order, none of them kept.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..staging import disk_errors, write_json
from ..tensor import Array
from .safetensors import INDEX_NAME, SINGLE_NAME

SHARD_BYTES = 4 << 30

_DTYPES: dict[str, np.dtype[np.generic]] = {
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "I32": np.dtype(np.int32),
}


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to come: `dtype` as safetensors names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


class SafetensorsWriter:
    """The planned tensors in one file or in shards of at most `shard_bytes`, each with room taken up from the start.

    CapacityError if the disk cannot hold them.
    """

    def __init__(self, folder: Path, plan: Iterable[PlannedTensor], shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        shards = _split(plan, shard_bytes)
        names = [SINGLE_NAME]
        if len(shards) > 1:
            names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        self._files: dict[str, int] = {}
        self._places: dict[str, tuple[PlannedTensor, str, int]] = {}
        self._missing: set[str] = set()
        try:
            for name, shard in zip(names, shards, strict=True):
                self._open(name, shard)
        except BaseException:
            self.close()
            raise

    def write(self, name: str, array: Array) -> None:
        """Put a planned tensor into its place."""
        tensor, file, offset = self._places[name]
        assert name in self._missing, f"{name} is written twice"
        assert array.shape == tensor.shape and array.dtype == _DTYPES[tensor.dtype], (name, array.shape, array.dtype)
        data = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        with disk_errors(self._folder):
            while data:
                written = os.pwrite(self._files[file], data, offset)
                data, offset = data[written:], offset + written
        self._missing.remove(name)

    def finish(self) -> None:
        """Check that every planned tensor was written, write the index if there are shards, flush all to the disk."""
        assert not self._missing, f"never written: {sorted(self._missing)[:4]}"
        with disk_errors(self._folder):
            for file in self._files.values():
                os.fsync(file)
        if len(self._files) > 1:
            total = sum(tensor.nbytes for tensor, _, _ in self._places.values())
            places = {name: file for name, (_, file, _) in self._places.items()}
            write_json(self._folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": places})
        self.close()

    def close(self) -> None:
        """Close the files; what was written so far stays."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _open(self, name: str, shard: list[PlannedTensor]) -> None:
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        position = 0
        for tensor in shard:
            offsets = [position, position + tensor.nbytes]
            entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
            position += tensor.nbytes
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        with disk_errors(self._folder):
            file = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            self._files[name] = file
            os.posix_fallocate(file, 0, 8 + len(header) + position)
            os.pwrite(file, struct.pack("<Q", len(header)) + header, 0)
        start = 8 + len(header)
        for tensor in shard:
            self._places[tensor.name] = tensor, name, start
            self._missing.add(tensor.name)
            start += tensor.nbytes


def _split(plan: Iterable[PlannedTensor], shard_bytes: int) -> list[list[PlannedTensor]]:
    """The plan cut where the next tensor would exceed `shard_bytes`."""
    shards: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in plan:
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards
