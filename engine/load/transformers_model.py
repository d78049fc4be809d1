"""A model that transformers' modules compute: planned from headers, loaded when the engine is built.

Its packed cache entry holds no weights, only its text side, so that the frontend finds a tokenizer where it always
does. Importing this imports torch and transformers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import transformers

from ...kernels.errors import UnsupportedModel
from ...kernels.ops import Batch, KVLayer
from ...quant.formats.safetensors import open_files
from ..models.arch import DecoderSpec
from ..models.decoder import Decoder, Limits
from ..models.fields import window_field
from ..models.hf import Description, build, describe
from .build import build_entry
from .checkpoint import Checkpoint
from .entry import BadEntry, read_manifest
from .golden import Golden
from .hub import Source
from .origin import values_of
from .packed import entry_key
from .progress import Progress, silent
from .text import check_tokenizer_files, folder_text, read_json, stop_ids

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class TransformersModel:
    """A folder and what is known of it without its weights; `digest` stands for its files and for transformers."""

    name: str
    source: Path
    dtype: str
    description: Description
    folder: Path
    digest: str
    implementation: str = "transformers"
    golden: Golden | None = None  # nothing that it runs was quantized

    @property
    def spec(self) -> DecoderSpec:
        return self.description.spec

    @property
    def weight_bytes(self) -> int:
        return self.description.weight_bytes

    @property
    def weight_formats(self) -> tuple[str, ...]:
        return (self.description.weight_format,)

    def build(self, batch: Batch, kv: Mapping[int, KVLayer], limits: Limits, kernels: str) -> Decoder:
        """Load the weights and bind the modules."""
        return build(self.source, self.dtype, batch, kv, limits, kernels)


def open_transformers(
    source: Source, why: str, *, dtype: str, cache: Path, progress: Progress | None
) -> TransformersModel:
    """The model in a folder; UnsupportedModel with the reason if transformers' modules cannot run on our cache.

    `why` they and not our decoder is part of that reason.
    """
    description = describe_transformers(source, why, dtype)
    key = entry_key(source, dtype, implementation())
    folder = cache / "packed" / key
    try:
        read_manifest(folder)
    except BadEntry:
        build_entry(_checkpoint(source, description), key, dtype, cache / "packed", progress or silent)
    return TransformersModel(source.name, source.path, dtype, description, folder, digest=key)


def describe_transformers(source: Source, why: str, dtype: str) -> Description:
    """What the model would be, from its headers; errors as those of `open_transformers`."""
    try:
        with values_of(source.path / "config.json"):
            return _describe(source, dtype)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{error.message} ({why})", error.hint) from error


def _describe(source: Source, dtype: str) -> Description:
    if source.kind != "hf":
        raise UnsupportedModel(
            f"`{source.path}` is no folder of safetensors, which is what the transformers backend reads",
            "leave out `--model-impl transformers`",
        )
    config = read_json(source.path / "config.json")
    if "quantization_config" in config:
        raise UnsupportedModel(
            f"`{source.path}` is quantized, and transformers would compute it", "use an unquantized model"
        )
    window_field(config)
    found = describe(source.path, dtype)
    stop_ids(source.path, config, found.spec.vocab_size)
    return found


def implementation() -> str:
    """The implementation and its version, on which bits depend."""
    return f"transformers {transformers.__version__}"


def _checkpoint(source: Source, description: Description) -> Checkpoint:
    """The text side of the folder as a checkpoint without tensors."""
    config = read_json(source.path / "config.json")
    check_tokenizer_files(source.path)
    files = open_files(source.path)
    load_text = partial(folder_text, source.path, config, description.spec.vocab_size)
    return Checkpoint(source, config, description.spec, {}, files, load_text, implementation())
