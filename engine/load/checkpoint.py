"""A checkpoint opened and checked: its spec, and every tensor the decoder needs, before anything is built.

Opening reads headers only, and the zero points and group indices of quantized Linears. A config that disagrees with
the tensors, a tensor that is missing or one that no part of the decoder would use is an error here: each of them would
otherwise become a model that runs and writes nonsense.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ...kernels.errors import CheckpointError, UnsupportedModel
from ...quant.formats import detect, gguf, gguf_model, gguf_tokenizer, quantized, safetensors
from ...quant.formats.stored import StoredTensor, shape_text
from ...quant.tensor import Array, WeightTensor
from ..models.arch import DecoderSpec
from ..models.families import LanguagePart, decoder_spec, decoder_tensors, language_part
from .hub import Source
from .kv_scales import scale_names
from .origin import values_of
from .text import ChatInfo, ModelText, check_tokenizer_files, folder_text, read_json, stop_ids

log = logging.getLogger(__name__)

_CHUNK = 1 << 22
_UNUSED = (".rotary_emb.inv_freq",)  # rope buffers of old writers, which are recomputed


class TensorFiles(Protocol):
    """What both containers offer. `read` gives the tensor as stored; `check_readable` raises what `read` would."""

    @property
    def tensors(self) -> Mapping[str, StoredTensor]: ...
    def check_readable(self, name: str) -> None: ...
    def read(self, name: str) -> WeightTensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """`tensors` are those the decoder uses, in its order; `load_text` may be slow (it converts old tokenizers).

    implementation  what computes the model: our decoder, or another that reads the weights itself, and then there are
                    no tensors here
    """

    source: Source
    config: Mapping[str, object]
    spec: DecoderSpec
    tensors: Mapping[str, StoredTensor]
    files: TensorFiles
    load_text: Callable[[], ModelText]
    implementation: str = "llmctl"

    def read(self, name: str) -> WeightTensor:
        """The tensor, all of it finite; CheckpointError names the first NaN or infinity."""
        weight = self.files.read(name)
        for part, values in (("", weight.data), ("scale ", weight.scales), ("minimum ", weight.zeros)):
            index = None if values is None else _first_not_finite(values, bf16=weight.format.kind == "bf16")
            if index is not None:
                raise CheckpointError(
                    f"tensor `{name}` of `{self.tensors[name].path}` holds NaN or infinity, first at "
                    f"{part}{shape_text(index)}",
                    "the file is broken, or the model was trained or converted into this",
                )
        return weight

    def read_vector(self, name: str) -> npt.NDArray[np.float32]:
        """The norm or bias as float32, norms with the spec's offset added.

        It is added here, once: transformers adds it to the same float32 value at every use.
        """
        values = np.ascontiguousarray(self.read(name).dequantize())
        return values + np.float32(self.spec.norm_offset) if name.endswith("norm.weight") else values


@dataclass(frozen=True, slots=True, eq=False)
class LanguageFiles:
    """The tensors of the decoder inside a model of several parts, named as if it were alone."""

    tensors: Mapping[str, StoredTensor]
    files: TensorFiles

    def check_readable(self, name: str) -> None:
        """Raise what `read` would."""
        self.files.check_readable(self.tensors[name].name)

    def read(self, name: str) -> WeightTensor:
        """The tensor as stored."""
        return self.files.read(self.tensors[name].name)


def open_checkpoint(source: Source) -> Checkpoint:
    """The checkpoint with its config and headers read and checked against each other."""
    files: TensorFiles
    if source.kind == "gguf":
        named = source.path
        file = gguf.open_gguf(source.path)
        model = gguf_model.open_model(file)
        config: Mapping[str, object] = model.config
        files = model
        load_text = partial(_gguf_text, file)
    else:
        folder, named = source.path, source.path / "config.json"
        config = whole = read_json(named)
        check_tokenizer_files(folder)
        files = _folder_files(folder, config)
        with values_of(named):
            part = language_part(config)
        if part is not None:
            files, config = _language_files(source, files, part), part.config
    with values_of(named):
        spec = decoder_spec(config)
    tensors = _check_tensors(source, spec, files)
    if source.kind == "hf":
        stop_ids(folder, whole, spec.vocab_size)
        load_text = partial(folder_text, folder, whole, spec.vocab_size)
    return Checkpoint(source, config, spec, tensors, files, load_text)


def source_text(source: Source) -> ModelText:
    """The text side of a model alone."""
    if source.kind == "gguf":
        return _gguf_text(gguf.open_gguf(source.path))
    return folder_text(source.path, read_json(source.path / "config.json"))


def _check_tensors(source: Source, spec: DecoderSpec, files: TensorFiles) -> dict[str, StoredTensor]:
    """The decoder's tensors in its order, each present, readable and of the shape the config says."""
    rules = decoder_tensors(spec)
    scales = {
        name: files.tensors[name]
        for layer in range(spec.num_layers)
        for part in "kv"
        for name in scale_names(layer, part)
        if name in files.tensors
    }
    unknown = [name for name in files.tensors if name not in rules | scales and not name.endswith(_UNUSED)]
    if unknown:
        raise UnsupportedModel(
            f"`{source.path}` has {len(unknown)} tensors that a {spec.family} decoder of {spec.num_layers} layers does "
            f"not use: {_some(unknown)}",
            "the model is of another family, or its config is for another checkpoint",
        )
    missing = [name for name, rule in rules.items() if rule.required and name not in files.tensors]
    if missing:
        raise CheckpointError(
            f"`{source.path}` lacks {len(missing)} of the tensors that its config asks for: {_some(missing)}",
            "fetch the model again, or set tie_word_embeddings if the head is the embedding"
            if missing == ["lm_head.weight"]
            else "fetch the model again; num_hidden_layers may be wrong",
        )
    tensors = {}
    for name, rule in rules.items():
        tensor = files.tensors.get(name)
        if tensor is None:
            continue
        if tensor.shape != rule.shape:
            raise CheckpointError(
                f"tensor `{name}` of `{tensor.path}` has shape {shape_text(tensor.shape)}, the config says "
                f"{shape_text(rule.shape)} ({', '.join(rule.keys)})",
                "the config belongs to another checkpoint, or the file is broken",
            )
        files.check_readable(name)
        if len(tensor.shape) == 1 and tensor.format is not None and not tensor.format.is_float:
            raise UnsupportedModel(f"tensor `{name}` of `{tensor.path}` is a vector stored as {tensor.dtype}")
        tensors[name] = tensor
    for name, tensor in scales.items():
        if tensor.shape not in ((), (1,), (spec.num_kv_heads,)):
            raise CheckpointError(
                f"tensor `{name}` of `{tensor.path}` has shape {shape_text(tensor.shape)}",
                f"a scale of the KV cache is one number, or one for each of {spec.num_kv_heads} KV heads",
            )
        files.check_readable(name)
        tensors[name] = tensor
    return tensors


def _folder_files(folder: Path, config: Mapping[str, object]) -> TensorFiles:
    """The tensors of a folder; quantized Linears as one weight each, whatever their format stores them as."""

    def read_other(name: str) -> Mapping[str, object] | None:
        return read_json(folder / name) if (folder / name).is_file() else None

    with values_of(folder / "config.json"):
        quantization = detect.find_config(config, read_other)
    if quantization is None:
        return safetensors.open_files(folder)
    with values_of(folder / quantization.file):
        format = detect.detect_format(quantization.config)
    return quantized.open_linears(safetensors.open_files(folder), format, folder)


def _language_files(source: Source, files: TensorFiles, part: LanguagePart) -> LanguageFiles:
    named = {name: part.name(name) for name in files.tensors}
    left_out = sum(own is None for own in named.values())
    log.info("%s: text only, %d tensors of its other parts are left out", source.name, left_out)
    return LanguageFiles({own: files.tensors[name] for name, own in named.items() if own is not None}, files)


def _gguf_text(file: gguf.GGUFFile) -> ModelText:
    built = gguf_tokenizer.build_tokenizer(file)
    return ModelText(
        built.json,
        ChatInfo(template=built.chat_template, special_tokens=built.special_tokens, eos_ids=built.eos_ids),
    )


def _some(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:4])
    return shown + (", ..." if len(names) > 4 else "")


def _first_not_finite(values: Array, bf16: bool) -> tuple[int, ...] | None:
    """The index of the first NaN or infinity, a bounded number of elements at a time."""
    if values.dtype.kind != "f" and not bf16:
        return None
    flat = values.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK]
        good = _bf16_finite(chunk.view(np.uint16)) if bf16 else np.isfinite(chunk)
        if not good.all():
            return tuple(int(i) for i in np.unravel_index(start + int(good.argmin()), values.shape))
    return None


def _bf16_finite(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.bool_]:
    """All ones in bfloat16's exponent are NaN or infinity."""
    exponents: npt.NDArray[np.uint16] = bits & np.uint16(0x7F80)
    return exponents < np.uint16(0x7F80)
