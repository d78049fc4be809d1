"""Reading safetensors files, one or many shards, without the safetensors library and without copies.

A file is a little-endian uint64 header length, a JSON header, then tensor data. Headers come from strangers: every
offset, size and name is checked before a view is made, so that a broken file is an error that names the tensor instead
of wrong weights. Pickle files are refused: loading one runs code from it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...kernels.errors import CheckpointError, UnsupportedModel
from ...kernels.formats import BF16, F16, F32, WeightFormat
from ..tensor import Array, WeightTensor
from .stored import FLOAT_VIEWS, StoredTensor, map_file, shape_text

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_HEADER = 100_000_000

_FORMATS: dict[str, WeightFormat] = {"F32": F32, "F16": F16, "BF16": BF16}
_VIEWS: dict[str, type[np.generic]] = {
    **{name: FLOAT_VIEWS[format.kind] for name, format in _FORMATS.items()},
    "I8": np.int8,
    "U8": np.uint8,
    "F8_E4M3": np.uint8,
    "F8_E8M0": np.uint8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
}
_BITS = {
    name: bits
    for bits, names in {
        4: "F4",
        6: "F6_E2M3 F6_E3M2",
        8: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
        16: "U16 I16 F16 BF16",
        32: "U32 I32 F32",
        64: "U64 I64 F64 C64",
    }.items()
    for name in names.split()
}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_REFETCH = "the file is broken or cut short: fetch it again"


@dataclass(frozen=True, slots=True, eq=False)
class SafetensorsFiles:
    """The tensors of a checkpoint folder: `tensors` by name, `read` gives views of the mapped shards."""

    tensors: Mapping[str, StoredTensor]
    files: Mapping[Path, npt.NDArray[np.uint8]]

    def check_readable(self, name: str) -> None:
        """Raise UnsupportedModel, naming the tensor's dtype, if it is none that can be read."""
        self.tensors[name].readable_format(", ".join(_FORMATS))

    def read(self, name: str) -> WeightTensor:
        """The tensor as a read-only view of its file; UnsupportedModel if its dtype cannot be read."""
        tensor = self.tensors[name]
        format = tensor.readable_format(", ".join(_FORMATS))
        return WeightTensor(format, self._view(tensor, FLOAT_VIEWS[format.kind]))

    def view(self, name: str) -> Array:
        """The tensor's elements as stored, bfloat16 and float8 as bits; UnsupportedModel for a type that cannot be."""
        tensor = self.tensors[name]
        if tensor.dtype not in _VIEWS:
            raise UnsupportedModel(f"tensor `{name}` of `{tensor.path}` is stored as {tensor.dtype}")
        return self._view(tensor, _VIEWS[tensor.dtype])

    def _view(self, tensor: StoredTensor, dtype: type[np.generic]) -> Array:
        raw = self.files[tensor.path][tensor.offset : tensor.offset + tensor.nbytes]
        view: Array = raw.view(dtype).reshape(tensor.shape)
        return view


def open_files(folder: Path) -> SafetensorsFiles:
    """Every tensor of the model in `folder`, headers read and checked, data mapped."""
    files: dict[Path, npt.NDArray[np.uint8]] = {}
    tensors: dict[str, StoredTensor] = {}
    for path in weight_files(folder):
        files[path] = map_file(path)
        for tensor in parse_header(path, files[path]):
            if tensor.name in tensors:
                raise CheckpointError(
                    f"tensor `{tensor.name}` is in both `{tensors[tensor.name].path.name}` and `{path.name}`"
                )
            tensors[tensor.name] = tensor
    index = folder / INDEX_NAME
    if index.is_file():
        for name, file in _weight_map(index).items():
            if name not in tensors or tensors[name].path.name != file:
                raise CheckpointError(f"`{index}` says that tensor `{name}` is in `{file}`, but it is not")
    return SafetensorsFiles(tensors, files)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that make up the model in `folder`, in order; CheckpointError if one is missing."""
    index = folder / INDEX_NAME
    if index.is_file():
        names = sorted(set(_weight_map(index).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"`{folder}` lacks {len(missing)} of {len(names)} weight files, the first is `{missing[0]}`",
                f"fetch the files that `{INDEX_NAME}` names",
            )
        return tuple(folder / name for name in names)
    single = folder / SINGLE_NAME
    if single.is_file():
        return (single,)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return (found[0],)
    if found:
        raise CheckpointError(
            f"`{folder}` has {len(found)} safetensors files and no `{INDEX_NAME}`", "fetch the index file as well"
        )
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"`{folder}` has only pickle weights (`{pickles[0]}`), which run code when they are loaded",
            "use a safetensors version of the model, or convert it: `model.save_pretrained(folder)` in transformers",
        )
    raise CheckpointError(f"`{folder}` has no weights", f"expected `{SINGLE_NAME}` or `{INDEX_NAME}`")


def parse_header(path: Path, data: npt.NDArray[np.uint8]) -> tuple[StoredTensor, ...]:
    """The tensors of one file in order of their data, every claim of the header checked against the file."""
    if data.size < 8:
        raise CheckpointError(f"`{path}` has {data.size} bytes, too few for a safetensors header", _REFETCH)
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    if length > MAX_HEADER or 8 + length > data.size:
        raise CheckpointError(
            f"`{path}` claims a header of {length} bytes (limit {MAX_HEADER}), the file has {data.size}", _REFETCH
        )
    try:
        header = json.loads(data[8 : 8 + length].tobytes().decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the header of `{path}` is not valid JSON: {error}", _REFETCH) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"the header of `{path}` is no JSON object", _REFETCH)
    start = 8 + length
    tensors = [_parse_tensor(path, name, entry, start) for name, entry in header.items() if name != "__metadata__"]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _check_cover(path, tensors, start, data.size)
    return tuple(tensors)


def _parse_tensor(path: Path, name: str, entry: object, start: int) -> StoredTensor:
    where = f"tensor `{name}` of `{path}`"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{where} has no dtype, shape and data_offsets", _REFETCH)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise CheckpointError(f"{where} has unknown dtype {dtype!r}", f"known: {', '.join(_BITS)}")
    if not _are_sizes(shape) or len(shape) > 8:
        raise CheckpointError(f"{where} has shape {shape!r}, expected at most 8 sizes", _REFETCH)
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where} has data_offsets {offsets!r}, expected a begin and an end", _REFETCH)
    begin, end = offsets
    bits = math.prod(shape) * _BITS[dtype]
    if bits % 8 or end - begin != bits // 8:
        raise CheckpointError(
            f"{where} is {dtype} {shape_text(tuple(shape))}, {-(-bits // 8)} bytes, but its offsets {begin}..{end} "
            f"hold {end - begin}",
            _REFETCH,
        )
    return StoredTensor(name, dtype, _FORMATS.get(dtype), tuple(shape), path, start + begin, end - begin)


def _check_cover(path: Path, tensors: Iterable[StoredTensor], start: int, size: int) -> None:
    """The format demands that tensors fill the data without overlap, hole or rest."""
    position, before = start, "the header"
    for tensor in tensors:
        if tensor.offset != position:
            word = "overlaps" if tensor.offset < position else "leaves a hole behind"
            raise CheckpointError(
                f"tensor `{tensor.name}` of `{path}` begins at byte {tensor.offset} and {word} {before}, "
                f"which ends at {position}",
                _REFETCH,
            )
        position, before = tensor.offset + tensor.nbytes, f"`{tensor.name}`"
        if position > size:
            raise CheckpointError(
                f"tensor `{tensor.name}` of `{path}` ends at byte {position}, the file has {size}", _REFETCH
            )
    if position != size:
        raise CheckpointError(f"`{path}` has {size - position} bytes behind its last tensor", _REFETCH)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read `{index}`: {error}") from error
    mapping = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointError(f"`{index}` has no weight_map")
    for name, file in mapping.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"`{index}` puts tensor `{name}` into {file!r}, which is no safetensors file name")
    return mapping


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name `{max(names, key=names.count)}` occurs twice")
    return result
