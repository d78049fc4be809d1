"""Building an entry of the packed cache: stream, pack, hash, sync, rename.

Tensors go through one by one and are converted and packed a few rows at a time, so that memory holds about one of them
as it is stored. Everything is written into a temporary folder
beside the entry, which gets the entry's name only when it is whole and on disk: readers see an entry or none. The
builder holds a lock on that folder, so that one which a crash left behind can be told from one being filled, and is
removed. Of two processes that build the same entry, the slower one takes the other's.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from ...kernels.cpu.pack import LAYOUT_VERSION, pack
from ...kernels.cpu.pages import LARGE_PAGE
from ...kernels.errors import CheckpointError
from ...kernels.ops import PANEL
from ...quant.formats.stored import StoredTensor
from ...quant.staging import sync
from .checkpoint import Checkpoint, open_checkpoint
from .convert import convert, packed_form, roundings, target_format
from .disk import NO_SPACE, disk_full
from .ending import cleared_by_signals, undisturbed
from .entry import (
    CHAT,
    ENTRY_VERSION,
    HEADER_BYTES,
    MANIFEST,
    ORDER,
    TOKENIZER,
    VECTOR,
    WEIGHTS,
    BadEntry,
    Manifest,
    PackedTensor,
    aligned,
    encode_manifest,
    finish_digest,
    header_bytes,
    read_manifest,
    text_digest,
)
from .hub import Source
from .merges import with_short_merges
from .progress import Progress

log = logging.getLogger(__name__)

TEMPORARY = ".building-"
_NOT_EMPTY = (errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST)
_CHUNK_ELEMENTS = 1 << 21
_WRITE = 4 * LARGE_PAGE
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def build_from_source(source: Source, key: str, dtype: str, packed: Path, progress: Progress) -> Path:
    """The folder `packed`/`key`, built from the source; a warning says what of its values is not kept."""
    checkpoint = open_checkpoint(source)
    for rounding in roundings(checkpoint.tensors.values(), dtype):
        log.warning("%s: %s (--dtype float32 keeps every value)", source.name, rounding)
    return build_entry(checkpoint, key, dtype, packed, progress)


def build_entry(checkpoint: Checkpoint, key: str, dtype: str, packed: Path, progress: Progress) -> Path:
    """The folder `packed`/`key`, now holding the checkpoint's entry; CapacityError if the disk is full.

    Whatever goes wrong, an interrupt, SIGTERM or SIGHUP included, nothing is left behind.
    """
    tensors = _layout(checkpoint, dtype)
    size = max((tensor.offset + tensor.bytes for tensor in tensors), default=HEADER_BYTES)
    try:
        packed.mkdir(parents=True, exist_ok=True)
        remove_abandoned(packed)
        with cleared_by_signals(), _temporary_folder(packed) as folder:
            _write_entry(checkpoint, key, dtype, tensors, size, folder, progress)
            _publish(folder, packed / key)
            sync(packed)
    except OSError as error:
        if error.errno in NO_SPACE:
            raise disk_full(packed, size, f"the packed weights of `{checkpoint.source.name}`") from error
        raise CheckpointError(
            f"cannot write to `{packed}`: {error.strerror or error}", "LLMCTL_CACHE names another folder"
        ) from error
    return packed / key


def remove_abandoned(packed: Path) -> int:
    """Remove what builders that were killed left in `packed`; how many folders that were."""
    removed = 0
    for folder in packed.glob(f"{TEMPORARY}*"):
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:  # renamed or removed meanwhile
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # being filled, or on a file system that cannot tell
            continue
        finally:
            os.close(handle)
        shutil.rmtree(folder, ignore_errors=True)
        removed += 1
    return removed


@contextlib.contextmanager
def _temporary_folder(packed: Path) -> Iterator[Path]:
    """A new locked folder, removed at the end unless it was renamed.

    It gets a name that `remove_abandoned` looks for only when it is locked.
    """
    unique = f"{os.getpid()}-{secrets.token_hex(4)}"
    unlocked, folder = packed / f".new-{unique}", packed / f"{TEMPORARY}{unique}"
    try:
        unlocked.mkdir()
        handle = os.open(unlocked, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # no locks on this file system: then nobody removes such folders
                fcntl.flock(handle, fcntl.LOCK_EX)
            unlocked.rename(folder)
            yield folder
        finally:
            with undisturbed():
                shutil.rmtree(folder, ignore_errors=True)
                os.close(handle)
    finally:
        with undisturbed():
            shutil.rmtree(unlocked, ignore_errors=True)


def _write_entry(
    checkpoint: Checkpoint,
    key: str,
    dtype: str,
    tensors: tuple[PackedTensor, ...],
    size: int,
    folder: Path,
    progress: Progress,
) -> None:
    text = checkpoint.load_text()
    tokenizer_json, chat_json = with_short_merges(text.tokenizer_json).encode(), msgspec.json.encode(text.chat)
    manifest = Manifest(
        version=ENTRY_VERSION,
        layout=LAYOUT_VERSION,
        key=key,
        name=checkpoint.source.name,
        source=str(checkpoint.source.path.resolve()),
        dtype=dtype,
        implementation=checkpoint.implementation,
        spec=checkpoint.spec,
        tensors=tensors,
        bytes=size,
        roundings=roundings(checkpoint.tensors.values(), dtype),
        text_bytes=(len(tokenizer_json), len(chat_json)),
        text_digest=text_digest(tokenizer_json, chat_json),
    )
    (folder / TOKENIZER).write_bytes(tokenizer_json)
    (folder / CHAT).write_bytes(chat_json)
    with (folder / WEIGHTS).open("wb", buffering=_WRITE) as file:
        _reserve(file, manifest.bytes)
        digest = hashlib.sha256()
        _write_tensors(checkpoint, manifest, file, digest, progress)
        finish_digest(digest, tokenizer_json, chat_json, manifest)
        manifest_json = encode_manifest(msgspec.structs.replace(manifest, digest=digest.hexdigest()))
        (folder / MANIFEST).write_bytes(manifest_json)
        file.seek(0)
        file.write(header_bytes(manifest_json))
        file.flush()
        os.fsync(file.fileno())
    for name in (TOKENIZER, CHAT, MANIFEST, "."):
        sync(folder / name)


def _layout(checkpoint: Checkpoint, dtype: str) -> tuple[PackedTensor, ...]:
    """Where each tensor will lie, known from the headers alone."""
    placed, position = [], HEADER_BYTES
    for name, stored in checkpoint.tensors.items():
        for format, n, k, size in _parts(stored, dtype):
            offset = aligned(position)
            placed.append(PackedTensor(name, format, n, k, offset, size))
            position = offset + size
    return tuple(placed)


def _parts(stored: StoredTensor, dtype: str) -> list[tuple[str, int, int, int]]:
    """(format, n, k, bytes) of everything that is stored of a tensor."""
    if len(stored.shape) <= 1:
        length = stored.shape[0] if stored.shape else 1
        return [(VECTOR, length, 1, 4 * length)]
    n, k = stored.shape
    format, size = packed_form(stored, dtype)
    parts = [(format.name, n, k, size)]
    return parts if format.is_float or stored.order is None else [(ORDER, k, 1, 4 * k), *parts]


def _write_tensors(
    checkpoint: Checkpoint, manifest: Manifest, file: BinaryIO, digest: hashlib._Hash, progress: Progress
) -> None:
    """Everything behind the header, in order, with zeros between; all of it goes into the digest."""
    file.write(bytes(HEADER_BYTES))
    position = HEADER_BYTES
    for tensor in manifest.tensors:
        progress(f"packing {manifest.name}", position, manifest.bytes)
        for part in itertools.chain(
            (memoryview(bytes(tensor.offset - position)),), _packed(checkpoint, tensor, manifest.dtype)
        ):
            _write_cut(file, part.cast("B"), position)
            digest.update(part)
            position += part.nbytes
        assert position == tensor.offset + tensor.bytes, (tensor, position)
    progress(f"packing {manifest.name}", position, manifest.bytes)


def _write_cut(file: BinaryIO, part: memoryview, position: int) -> None:
    """Write at `position`, the file's own, without ever crossing a multiple of its buffer: it goes out in whole ones.

    What is written in large pieces at their multiples is kept in memory on large pages by file systems that can.
    """
    done = 0
    while done < part.nbytes:
        room = _WRITE - (position + done) % _WRITE
        done += file.write(part[done : done + room])


def _packed(checkpoint: Checkpoint, tensor: PackedTensor, dtype: str) -> Iterator[memoryview]:
    """The tensor's bytes in parts, made one by one: panels follow one another, so rows can be packed by themselves."""
    if tensor.format == ORDER:
        order = checkpoint.tensors[tensor.name].order
        assert order is not None, tensor
        yield order.data
        return
    if tensor.format == VECTOR:
        yield checkpoint.read_vector(tensor.name).data
        return
    weight = checkpoint.read(tensor.name)
    target = target_format(weight.format, dtype, tensor.k)
    step = max(1, _CHUNK_ELEMENTS // (PANEL * tensor.k)) * PANEL
    for start in range(0, tensor.n, step):
        rows = convert(tensor.name, weight.select_rows(slice(start, start + step)), target)
        yield pack(target, rows.data, rows.scales, rows.zeros).data


def _publish(folder: Path, target: Path) -> None:
    """Give the folder its name. A whole entry that is there already stays, a broken one is replaced."""
    for _ in range(3):
        try:
            os.rename(folder, target)
            return
        except OSError as error:
            if error.errno not in _NOT_EMPTY:
                raise
        try:
            read_manifest(target)
            return
        except BadEntry:
            aside = folder.with_name(f"{folder.name}-replaced")
            os.rename(target, aside)
            if aside.is_dir() and not aside.is_symlink():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                aside.unlink()
    raise CheckpointError(f"`{target}` keeps being replaced by another process", "end that process and try again")


def _reserve(file: BinaryIO, size: int) -> None:
    """Claim the space, so that a full disk shows before the work and not in the middle of it."""
    try:
        os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        if error.errno not in _CANNOT_RESERVE:
            raise
