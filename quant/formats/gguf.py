"""Reading GGUF files (versions 2 and 3, little-endian): metadata and tensors, without the gguf library.

What the blocks of quantized tensors hold is in `gguf_blocks.py`, what the metadata and the names mean in
`gguf_model.py` and `gguf_tokenizer.py`.

Files come from strangers. Every count and length is checked against the bytes that are left before anything of that
size is made, so a lying header costs an error and not gigabytes.
Source of the layout: the GGUF specification in the ggml project.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...kernels.errors import CheckpointError, UnsupportedModel
from ..tensor import WeightTensor
from .gguf_blocks import SUPPORTED, TYPES, read_blocks
from .stored import FLOAT_VIEWS, StoredTensor, map_file, shape_text

Value = bool | int | float | str | list["Value"]

MAX_DEPTH = 4  # arrays in arrays
MAX_DIMS = 4
_BY_NAME = {kind.name: kind for kind in TYPES.values()}
_REFETCH = "the file is broken or cut short: fetch it again"


_BOOL, _STRING, _ARRAY = 7, 8, 9
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}
_SCALARS = {kind: struct.Struct(f"<{code}") for kind, code in _CODES.items()}
_MIN_SIZE = {kind: item.size for kind, item in _SCALARS.items()} | {_STRING: 8, _ARRAY: 12}


@dataclass(frozen=True, slots=True, eq=False)
class GGUFFile:
    """A parsed file: `metadata` by key, `tensors` by the file's own names with shapes as [outputs, inputs]."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, StoredTensor]
    data: npt.NDArray[np.uint8]

    def check_readable(self, name: str) -> None:
        """Raise UnsupportedModel, naming the tensor's type, if it is none that can be read."""
        self.tensors[name].readable_format(SUPPORTED)

    def read(self, name: str) -> WeightTensor:
        """The tensor as stored; UnsupportedModel if its type cannot be read."""
        tensor = self.tensors[name]
        format = tensor.readable_format(SUPPORTED)
        raw = self.data[tensor.offset : tensor.offset + tensor.nbytes]
        if format.is_float:
            return WeightTensor(format, raw.view(FLOAT_VIEWS[format.kind]).reshape(tensor.shape))
        return read_blocks(_BY_NAME[tensor.dtype], raw, tensor.shape)


def open_gguf(path: Path) -> GGUFFile:
    """The file with its header parsed and checked, its tensor data mapped."""
    data = map_file(path)
    cursor = _Cursor(path, data)
    if data[:4].tobytes() != b"GGUF":
        raise CheckpointError(f"`{path}` is no GGUF file: it begins with {data[:4].tobytes()!r}")
    cursor.take(4, "the file's magic")
    version = cursor.scalar(4, "the version")
    if version not in (2, 3):
        if version in (2 << 24, 3 << 24):
            raise UnsupportedModel(f"`{path}` is a big-endian GGUF file", "use the little-endian file of this model")
        raise UnsupportedModel(f"`{path}` is GGUF version {version}", "supported: 2 and 3")
    tensor_count = cursor.count(10, 8 + 4 + 8 + 4 + 8, "the number of tensors")
    key_count = cursor.count(10, 8 + 4 + 1, "the number of metadata keys")
    metadata: dict[str, Value] = {}
    for _ in range(key_count):
        key = cursor.text("a metadata key")
        if key in metadata:
            raise CheckpointError(f"metadata key `{key}` occurs twice in `{path}`", _REFETCH)
        metadata[key] = cursor.value(int(cursor.scalar(4, f"the type of `{key}`")), f"`{key}`", 0)
    entries = [_parse_tensor(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"`{path}` asks for an alignment of {alignment!r}, which is no power of two", _REFETCH)
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    for entry in entries:
        if entry.name in tensors:
            raise CheckpointError(f"tensor `{entry.name}` occurs twice in `{path}`", _REFETCH)
        tensors[entry.name] = _place(path, entry, start, alignment, data.size)
    _check_overlaps(path, tensors)
    return GGUFFile(path, metadata, tensors, data)


class _Entry(NamedTuple):
    name: str
    type: int
    shape: tuple[int, ...]
    offset: int


def _parse_tensor(cursor: _Cursor) -> _Entry:
    name = cursor.text("a tensor's name")
    dims = int(cursor.scalar(4, f"the dimensions of tensor `{name}`"))
    if not 1 <= dims <= MAX_DIMS:
        raise CheckpointError(f"tensor `{name}` of `{cursor.path}` has {dims} dimensions, limit {MAX_DIMS}", _REFETCH)
    sizes = [int(cursor.scalar(10, f"the shape of tensor `{name}`")) for _ in range(dims)]
    kind = int(cursor.scalar(4, f"the type of tensor `{name}`"))
    offset = int(cursor.scalar(10, f"the offset of tensor `{name}`"))
    return _Entry(name, kind, tuple(reversed(sizes)), offset)


def _place(path: Path, entry: _Entry, start: int, alignment: int, file_size: int) -> StoredTensor:
    where = f"tensor `{entry.name}` of `{path}`"
    kind = TYPES.get(entry.type)
    if kind is None:
        raise UnsupportedModel(f"{where} has unknown type {entry.type}", f"supported types: {SUPPORTED}")
    if 0 in entry.shape or entry.shape[-1] % kind.block:
        raise CheckpointError(
            f"{where} has shape {shape_text(entry.shape)}, but {kind.name} needs rows of whole {kind.block}s", _REFETCH
        )
    nbytes = math.prod(entry.shape) // kind.block * kind.size
    if entry.offset % alignment or start + entry.offset + nbytes > file_size:
        raise CheckpointError(
            f"{where} ({kind.name} {shape_text(entry.shape)}) takes {nbytes} bytes at offset {start + entry.offset}, "
            f"the file has {file_size} bytes (alignment {alignment})",
            _REFETCH,
        )
    return StoredTensor(entry.name, kind.name, kind.format, entry.shape, path, start + entry.offset, nbytes)


def _check_overlaps(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    ordered = sorted(tensors.values(), key=lambda tensor: tensor.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise CheckpointError(f"tensors `{before.name}` and `{after.name}` of `{path}` overlap", _REFETCH)


class _Cursor:
    """Reads forward through the header; CheckpointError, saying what was being read, wherever the file ends early."""

    __slots__ = ("_data", "path", "position")

    def __init__(self, path: Path, data: npt.NDArray[np.uint8]) -> None:
        self.path = path
        self.position = 0
        self._data = data.data

    def take(self, size: int, what: str) -> memoryview:
        end = self.position + size
        if end > len(self._data):
            raise CheckpointError(
                f"`{self.path}` ends in the middle of {what}: {size} bytes expected at byte {self.position}, "
                f"{len(self._data) - self.position} left",
                _REFETCH,
            )
        taken = self._data[self.position : end]
        self.position = end
        return taken

    def scalar(self, kind: int, what: str) -> bool | int | float:
        item = _SCALARS[kind]
        value: bool | int | float = item.unpack(self.take(item.size, what))[0]
        return value

    def count(self, kind: int, least: int, what: str) -> int:
        """A count of things of at least `least` bytes each, all of which must still fit into the file."""
        number = int(self.scalar(kind, what))
        left = len(self._data) - self.position
        if number * least > left:
            raise CheckpointError(
                f"`{self.path}` claims {number} as {what}, at least {number * least} bytes, but only {left} are left",
                _REFETCH,
            )
        return number

    def text(self, what: str) -> str:
        size = self.count(10, 1, f"the length of {what}")
        try:
            return str(self.take(size, what), "utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{what} in `{self.path}` is not UTF-8: {error}", _REFETCH) from error

    def value(self, kind: int, what: str, depth: int) -> Value:
        if kind in _SCALARS:
            return self.scalar(kind, what)
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY:
            raise CheckpointError(f"{what} in `{self.path}` has unknown value type {kind}", _REFETCH)
        if depth == MAX_DEPTH:
            raise CheckpointError(f"{what} in `{self.path}` nests arrays deeper than {MAX_DEPTH}", _REFETCH)
        item = int(self.scalar(4, what))
        if item not in _MIN_SIZE:
            raise CheckpointError(f"{what} in `{self.path}` is an array of unknown value type {item}", _REFETCH)
        length = self.count(10, _MIN_SIZE[item], f"the length of array {what}")
        if item in _SCALARS:
            scalars: list[Value] = np.frombuffer(
                self.take(length * _SCALARS[item].size, what), np.dtype(_SCALARS[item].format)
            ).tolist()
            return scalars
        return [self.value(item, what, depth + 1) for _ in range(length)]
