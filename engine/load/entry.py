"""An entry of the packed cache on disk: a folder with `weights.bin`, `manifest.json`, `tokenizer.json`, `chat.json`.

`weights.bin` begins with a 64-byte header: magic, layout, and the SHA-256 of `manifest.json`, written last. So a warm
start needs to read the manifest alone to know that the files belong together and are whole: an entry that was torn,
cut or put together from two others fails one of the checks here and is built again. What the header cannot tell, a
flipped bit inside the data, is what the content hash in the manifest and `verify` are for.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import msgspec

from ...kernels.cpu.pack import LAYOUT_VERSION, packed_bytes
from ...kernels.errors import LlmctlError
from ...kernels.formats import parse_weight_format
from ..models.arch import DecoderSpec
from .text import ChatInfo

ENTRY_VERSION = 5
ALIGNMENT = 64
VECTOR = "vector"  # the format of what is no matrix
ORDER = "order"  # in which the weight of the same name, which follows, reads its inputs
WEIGHTS, MANIFEST, TOKENIZER, CHAT = "weights.bin", "manifest.json", "tokenizer.json", "chat.json"

_HEADER = struct.Struct("<8sI32s20x")
_MAGIC = b"llmctlpk"
HEADER_BYTES = _HEADER.size
_CHUNK = 1 << 22


class PackedTensor(msgspec.Struct, frozen=True, array_like=True):
    """A weight [n, k] in a kernel's layout; with k = 1 a float32 vector ("vector") or int32 indices ("order")."""

    name: str
    format: str
    n: int
    k: int
    offset: int
    bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`bytes` is the size of weights.bin, `text_bytes` those of tokenizer.json and chat.json.

    `roundings` tell, in lines for people, what of the checkpoint's values is not kept.

    `implementation` computes the model. One that is not ours reads the weights itself, and there are no tensors here.

    `text_digest` is the SHA-256 of those two, small enough to be checked at every start.

    `digest` is the SHA-256 of the weights behind the header, tokenizer.json, chat.json, and of what this manifest says
    about the model, but not where it came from: the same model from two places has the same digest.
    """

    version: int
    layout: str
    key: str
    name: str
    source: str
    dtype: str
    implementation: str
    spec: DecoderSpec
    tensors: tuple[PackedTensor, ...]
    roundings: tuple[str, ...] = ()
    bytes: int
    text_bytes: tuple[int, int]
    text_digest: str = ""
    digest: str = ""


class BadEntry(Exception):
    """The folder is no whole entry; the message says why."""


def aligned(offset: int) -> int:
    """The next offset at which a tensor may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def header_bytes(manifest_json: bytes) -> bytes:
    """The first bytes of weights.bin."""
    return _HEADER.pack(_MAGIC, ENTRY_VERSION, hashlib.sha256(manifest_json).digest())


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of an entry all of whose files have their sizes and belong together; BadEntry otherwise."""
    try:
        manifest_json = (folder / MANIFEST).read_bytes()
        with (folder / WEIGHTS).open("rb") as file:
            header = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
        texts = (folder / TOKENIZER).read_bytes(), (folder / CHAT).read_bytes()
    except OSError as error:
        raise BadEntry(f"{error.strerror}: {error.filename}") from error
    if header != header_bytes(manifest_json):
        raise BadEntry("weights.bin has another header than its manifest calls for")
    try:
        manifest = msgspec.json.decode(manifest_json, type=Manifest)
    except msgspec.MsgspecError as error:
        raise BadEntry(f"manifest.json: {error}") from error
    if manifest.version != ENTRY_VERSION or manifest.layout != LAYOUT_VERSION:
        raise BadEntry(f"version {manifest.version}, layout {manifest.layout}")
    text_bytes = len(texts[0]), len(texts[1])
    if (size, text_bytes) != (manifest.bytes, manifest.text_bytes):
        raise BadEntry(f"sizes are {size} and {text_bytes}, expected {manifest.bytes} and {manifest.text_bytes}")
    if text_digest(*texts) != manifest.text_digest:
        raise BadEntry("tokenizer.json or chat.json is not what was written")
    for tensor in manifest.tensors:
        _check_place(tensor, manifest.bytes)
    return manifest


def text_digest(tokenizer_json: bytes, chat_json: bytes) -> str:
    """The hash of an entry's text files."""
    return hashlib.sha256(tokenizer_json + chat_json).hexdigest()


def read_chat(folder: Path) -> ChatInfo:
    """The entry's chat.json; BadEntry if it is none."""
    try:
        return msgspec.json.decode((folder / CHAT).read_bytes(), type=ChatInfo)
    except (OSError, msgspec.MsgspecError) as error:
        raise BadEntry(f"chat.json: {error}") from error


def content_digest(folder: Path, manifest: Manifest) -> str:
    """The digest of what the entry's files hold now. Reads all of them."""
    digest = hashlib.sha256()
    with (folder / WEIGHTS).open("rb") as file:
        file.seek(HEADER_BYTES)
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    finish_digest(digest, (folder / TOKENIZER).read_bytes(), (folder / CHAT).read_bytes(), manifest)
    return digest.hexdigest()


def finish_digest(digest: hashlib._Hash, tokenizer_json: bytes, chat_json: bytes, manifest: Manifest) -> None:
    """Add what follows the weights to their running digest."""
    digest.update(tokenizer_json)
    digest.update(chat_json)
    about = msgspec.structs.replace(manifest, key="", name="", source="", text_digest="", digest="")
    digest.update(msgspec.json.encode(about))


def _check_place(tensor: PackedTensor, size: int) -> None:
    try:
        expected = (
            4 * tensor.n
            if tensor.format in (VECTOR, ORDER)
            else packed_bytes(parse_weight_format(tensor.format), tensor.n, tensor.k)
        )
    except LlmctlError as error:
        raise BadEntry(f"`{tensor.name}`: {error.message}") from error
    inside = HEADER_BYTES <= tensor.offset <= size - tensor.bytes and tensor.offset % ALIGNMENT == 0
    if tensor.bytes != expected or not inside:
        raise BadEntry(f"`{tensor.name}` has {tensor.bytes} bytes at {tensor.offset}, expected {expected} of {size}")
