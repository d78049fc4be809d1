"""The packed cache: a model's weights in the kernels' layout, mapped from one file.

The first start builds an entry, later ones read its manifest and map the file: nothing is converted or copied, and
processes share the pages. An entry's key is made of the headers, sizes and times of the source files and of what was
asked, never of their whole content, so finding it takes milliseconds. A full content hash is kept for `verify`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...kernels.cpu.pack import LAYOUT_VERSION
from ...kernels.cpu.pages import ask_for_large_pages, settle_on_large_pages
from ...kernels.errors import CheckpointError, UsageError
from ...kernels.formats import parse_weight_format
from ...kernels.ops import Batch, F32Array, I32Array, KVLayer, PackedWeight, U8Array
from ...quant.formats.safetensors import INDEX_NAME, weight_files
from ...quant.formats.stored import map_file
from ..models.arch import DecoderSpec
from ..models.decoder import Decoder, Limits, Wide, build_decoder
from .convert import NATIVE, TARGETS
from .entry import (
    ENTRY_VERSION,
    MANIFEST,
    ORDER,
    VECTOR,
    WEIGHTS,
    BadEntry,
    Manifest,
    content_digest,
    read_chat,
    read_manifest,
)
from .golden import Golden, read_golden
from .hub import Source
from .progress import Progress, silent
from .text import TEXT_FILES, ChatInfo

log = logging.getLogger(__name__)

_HEAD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class PackedModel:
    """A model ready to run: `weights` and `vectors` are views of `mapped`, a read-only file, by Hugging Face name.

    Without `lm_head.weight` the head is the embedding. `roundings` tell what of the checkpoint is not kept. `digest` is
    the hash of everything the model is made of. `golden` are logits that it should give. `wide` are the inputs
    that have 12 bits where others have 8.
    """

    name: str
    spec: DecoderSpec
    weights: Mapping[str, PackedWeight]
    vectors: Mapping[str, F32Array]
    mapped: U8Array
    folder: Path
    chat: ChatInfo
    digest: str
    roundings: tuple[str, ...] = ()
    implementation: str = "llmctl"
    golden: Golden | None = None
    wide: Wide = field(default_factory=dict)

    @property
    def weight_bytes(self) -> int:
        """What the packed weights take; vectors are few and not counted."""
        return sum(weight.data.nbytes for weight in self.weights.values())

    @property
    def weight_formats(self) -> tuple[str, ...]:
        return tuple(sorted({weight.format.name for weight in self.weights.values()}))

    def build(self, batch: Batch, kv: Mapping[int, KVLayer], limits: Limits, kernels: str) -> Decoder:
        """Our decoder over these weights; `kv` is each layer's part of the cache."""
        log.info("%s: weights on %s", self.name, settle_on_large_pages(self.mapped).value)
        return build_decoder(self.spec, self.weights, self.vectors, self.wide, batch, kv, limits, kernels)


@dataclass(frozen=True, slots=True)
class Entry:
    """One folder of the cache. `problem` says why it cannot be used, and then the rest is unknown."""

    key: str
    folder: Path
    bytes: int
    name: str = ""
    source: str = ""
    dtype: str = ""
    formats: tuple[str, ...] = ()
    problem: str = ""
    implementation: str = "llmctl"
    roundings: tuple[str, ...] = ()


def open_packed(source: Source, *, dtype: str = "auto", cache: Path, progress: Progress | None = None) -> PackedModel:
    """The model, its weights mapped from the cache, where they are built first if need be.

    `dtype` float32, float16 or bfloat16 converts every weight, "auto" keeps what is stored and a CPU can multiply with,
    "native" what a GPU can. On a CPU floats of 16 bits become integers, which it multiplies faster.
    """
    if dtype not in (*TARGETS, NATIVE):
        raise UsageError(f"--dtype is `{dtype}`", f"choose one of: {', '.join(TARGETS)}")
    packed = cache / "packed"
    key = entry_key(source, dtype)
    folder = packed / key
    for _ in range(2):  # a second time if another process removes the entry just when it is ready
        if folder.exists():
            try:
                return _map(source, folder, read_manifest(folder))
            except BadEntry as error:
                log.warning("packed weights in %s are rebuilt: %s", folder, error)
        from .build import build_from_source  # brings the readers of all formats, which a warm start does without

        build_from_source(source, key, dtype, packed, progress or silent)
    try:
        return _map(source, folder, read_manifest(folder))
    except BadEntry as error:
        raise CheckpointError(f"the packed weights in `{folder}` do not stay whole: {error}") from error


def entry_key(source: Source, dtype: str, implementation: str = "llmctl") -> str:
    """The name of the source's entry: a hash over the head of every file, its size and time, and what was asked."""
    if source.kind == "gguf":
        files: tuple[Path, ...] = (source.path,)
    else:
        from ...quant.formats.detect import CONFIG_FILES  # brings the readers of all formats

        names = (*TEXT_FILES, *CONFIG_FILES, INDEX_NAME)
        files = tuple(path for name in names if (path := source.path / name).is_file()) + weight_files(source.path)
    parts: list[object] = [ENTRY_VERSION, LAYOUT_VERSION, dtype, implementation]
    if source.kind != "gguf":
        parts.append("with scales of the KV cache")
    for path in files:
        try:
            with path.open("rb") as file:
                head = hashlib.sha256(file.read(_HEAD_BYTES)).hexdigest()
            status = path.stat()
        except OSError as error:
            raise CheckpointError(f"cannot read `{path}`: {error.strerror or error}") from error
        parts.append((path.name, status.st_size, status.st_mtime_ns, head))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def list_entries(cache: Path) -> tuple[Entry, ...]:
    """Every entry of the cache, whole or not."""
    packed = cache / "packed"
    folders = sorted(path for path in packed.iterdir() if path.name[0] != ".") if packed.is_dir() else []
    entries = []
    for folder in folders:
        size = sum(path.lstat().st_size for path in folder.iterdir()) if folder.is_dir() else folder.lstat().st_size
        try:
            manifest = read_manifest(folder)
        except BadEntry as error:
            entries.append(Entry(folder.name, folder, size, problem=str(error)))
            continue
        formats = tuple(dict.fromkeys(t.format for t in manifest.tensors if t.format not in (VECTOR, ORDER)))
        made_of = manifest.name, manifest.source, manifest.dtype
        entries.append(
            Entry(
                folder.name, folder, size, *made_of, formats,
                implementation=manifest.implementation, roundings=manifest.roundings,
            )
        )  # fmt: skip
    return tuple(entries)


def verify(entry: Entry) -> bool:
    """Whether the entry holds, bit for bit, what was built. Reads all of it."""
    try:
        manifest = read_manifest(entry.folder)
        return content_digest(entry.folder, manifest) == manifest.digest
    except (BadEntry, OSError) as error:
        log.info("entry %s: %s", entry.key, error)
        return False


def prune(cache: Path, keep: Collection[str] = ()) -> tuple[Entry, ...]:
    """Remove every entry whose key is not in `keep`, and what crashed builds left; the entries removed.

    A model that is running keeps its mapping of a removed file.
    """
    from .build import remove_abandoned

    removed = tuple(entry for entry in list_entries(cache) if entry.key not in keep)
    for entry in removed:
        if entry.folder.is_dir() and not entry.folder.is_symlink():
            (entry.folder / MANIFEST).unlink(missing_ok=True)  # first, so that nobody opens the rest
            shutil.rmtree(entry.folder, ignore_errors=True)
        else:
            entry.folder.unlink(missing_ok=True)
    remove_abandoned(cache / "packed")
    return removed


def _map(source: Source, folder: Path, manifest: Manifest) -> PackedModel:
    name = source.name
    data = map_file(folder / WEIGHTS)
    ask_for_large_pages(data)
    if data.size != manifest.bytes:
        raise BadEntry(f"weights.bin has {data.size} bytes, expected {manifest.bytes}")
    weights: dict[str, PackedWeight] = {}
    vectors: dict[str, F32Array] = {}
    orders: dict[str, I32Array] = {}
    for tensor in manifest.tensors:
        view = data[tensor.offset : tensor.offset + tensor.bytes]
        if tensor.format == VECTOR:
            vectors[tensor.name] = view.view(np.float32)
        elif tensor.format == ORDER:
            orders[tensor.name] = view.view(np.int32)
        else:
            order = orders.get(tensor.name)  # stands before its weight
            weights[tensor.name] = PackedWeight(parse_weight_format(tensor.format), tensor.n, tensor.k, view, order)
    for rounding in manifest.roundings:
        log.info("%s: %s", name, rounding)
    return PackedModel(
        name, manifest.spec, weights, vectors, data, folder, read_chat(folder), manifest.digest, manifest.roundings,
        golden=read_golden(source),
    )  # fmt: skip
