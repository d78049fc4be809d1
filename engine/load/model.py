"""What the engine runs, and which implementation computes it: our own decoder, or transformers' modules.

Ours is chosen wherever it knows the family. What it refuses goes to transformers, and the log says so: such a model is
slower, and the same bits are promised for it only after a trial at load.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from ...kernels.errors import LlmctlError, UnsupportedModel
from ...kernels.ops import Batch, KVLayer
from ..models.arch import DecoderSpec
from ..models.decoder import Decoder, Limits
from ..models.families import decoder_spec, language_part
from ..models.rope_config import overridden
from ..rope_scaling import RopeScaling
from .convert import NATIVE
from .golden import Golden
from .hub import Source
from .packed import PackedModel, open_packed
from .progress import Progress
from .text import read_json

log = logging.getLogger(__name__)


class Model(Protocol):
    """A model that can be planned with and built.

    spec            a transformers model's has the sizes and windows only
    implementation  "llmctl" or "transformers"
    weight_bytes    what its weights take in memory; `weight_formats` are the names of their formats
    folder          holds its tokenizer and chat template
    digest          the hash of everything that it is made of
    golden          logits that it gave when it was measured, if it was
    """

    @property
    def name(self) -> str: ...
    @property
    def spec(self) -> DecoderSpec: ...
    @property
    def folder(self) -> Path: ...
    @property
    def digest(self) -> str: ...
    @property
    def golden(self) -> Golden | None: ...
    @property
    def implementation(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def weight_formats(self) -> tuple[str, ...]: ...

    def build(self, batch: Batch, kv: Mapping[int, KVLayer], limits: Limits, kernels: str) -> Decoder:
        """The model bound to these buffers; `kv` is each layer's part of the cache."""
        ...


def open_model(
    source: Source,
    *,
    implementation: str,
    dtype: str,
    cache: Path,
    progress: Progress | None,
    rope_scaling: RopeScaling | None = None,
    gpu: str = "",
) -> Model:
    """The model in `source`, with another rope if one is asked for.

    `gpu` is the architecture of the GPU that shall run it, "" for the CPU.

    UnsupportedModel if neither implementation, or not the one asked for, can run it.
    """
    why = why_transformers(source, implementation, gpu=bool(gpu))
    if not why:
        open_ours = functools.partial(open_packed, source, dtype=dtype, cache=cache, progress=progress)
        model = _open_for_gpu(source, open_ours, gpu) if gpu else open_ours()
        if rope_scaling is None:
            return model
        return dataclasses.replace(model, spec=overridden(model.spec, rope_scaling))
    check_rope_scaling(source, why, rope_scaling)
    from .transformers_model import open_transformers  # imports torch

    log.info("%s: transformers' modules compute it: %s", source.name, why)
    return open_transformers(source, why, dtype="auto" if dtype == NATIVE else dtype, cache=cache, progress=progress)


def _open_for_gpu(source: Source, open_ours: Callable[[], PackedModel], gpu: str) -> PackedModel:
    """The model, if a GPU can run it; what shows in its sizes is refused before it is packed."""
    from ..gpu_support import check_on_gpu, check_weights_on_gpu  # nothing of it is needed on a CPU

    if source.kind == "hf":
        check_on_gpu(source.name, _spec_of(source), gpu)
    model = open_ours()
    check_on_gpu(source.name, model.spec, gpu)
    check_weights_on_gpu(source.name, model.spec, model.weights)
    return model


def check_rope_scaling(source: Source, why: str, rope_scaling: RopeScaling | None) -> None:
    """Raise UnsupportedModel for a scaling of a model that transformers' modules compute, for the reason `why`."""
    if rope_scaling is not None:
        raise UnsupportedModel(
            f"--rope-scaling is for our own decoder, but transformers' modules compute `{source.name}`: {why}",
            "put the scaling into the model's config.json",
        )


def why_transformers(source: Source, implementation: str, *, gpu: bool = False) -> str:
    """Why transformers' modules compute this model, "" if our decoder does.

    That computes mixtures of experts on a GPU only: UnsupportedModel if it is asked to compute one on the CPU.
    """
    if implementation == "transformers":
        return "as `--model-impl transformers` asks"
    if source.kind != "hf":
        return ""
    try:
        spec = _spec_of(source)
    except UnsupportedModel as error:
        if implementation == "llmctl":
            return ""  # its loader says it
        return f"our decoder does not know it: {error.message}" + (f"; {error.hint}" if error.hint else "")
    except LlmctlError:
        return ""  # a broken config of a known family: our own loader says what is wrong
    if spec.experts is None or gpu:
        return ""
    if implementation == "llmctl":
        raise UnsupportedModel(
            f"`{source.name}` is a mixture of experts, which `--model-impl llmctl` computes on a GPU only",
            "use `--model-impl auto`, or `--device cuda`",
        )
    return "it is a mixture of experts, which our decoder computes on a GPU only"


def _spec_of(source: Source) -> DecoderSpec:
    """What the config of a folder describes."""
    config = read_json(source.path / "config.json")
    part = language_part(config)
    return decoder_spec(config if part is None else part.config)
