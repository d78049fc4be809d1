"""The transformers backend: any decoder that is in no table of ours, computed by transformers' own modules.

The module tree is transformers'; its attention is replaced by ours over the paged cache, every plain Linear and the
embedding by our kernels on packed weights, in the type that they are stored in. What is left of torch (norms,
rotations, activations, routers) runs in float32 on the rows of a step as one sequence, which is all the same to it:
only attention knows which rows belong together. So such a model runs under the same scheduler, cache and sampler as
any other. Code that comes with a checkpoint is never run.

Importing this imports torch and transformers.
"""

from __future__ import annotations

import logging
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from ...kernels import registry
from ...kernels.cpu.pack import pack, packed_bytes
from ...kernels.errors import CheckpointError, UnsupportedModel
from ...kernels.formats import BF16, F16, F32, WeightFormat
from ...kernels.ops import LOGIT_ROWS, ROWS, Batch, F32Array, KVLayer, PackedWeight, make_rows
from ...quant.formats.safetensors import open_files
from .arch import MAX_CONTEXT, DecoderSpec, RopeSpec
from .decoder import Decoder, Limits
from .hf_modules import Buffers, PackedEmbedding, PackedLinear, PagedAttention
from .hf_trace import trace

log = logging.getLogger(__name__)

PAGED = "llmctl_paged"

_FORMATS = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_DTYPE_OF = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_BATCH_DEPENDENT_ROPES = ("dynamic", "longrope")  # their frequencies follow the longest sequence of the step


@dataclass(frozen=True, slots=True)
class Description:
    """A model as the engine plans with it, known without its weights.

    spec          sizes and windows; how it rotates, norms and joins is the modules' business and not in here
    weight_bytes  of packed weights, `num_packed` of them, and of everything else as float32
    """

    spec: DecoderSpec
    weight_bytes: int
    weight_format: str
    num_packed: int


def describe(folder: Path, dtype: str) -> Description:
    """What is in `folder`, from its config and headers; UnsupportedModel with the reason if it cannot run here."""
    config = _read_config(folder)
    format = _FORMATS[_torch_dtype(folder, config, dtype)]
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    except Exception as error:  # whatever the constructors of hundreds of families raise
        raise _refused(config, f"transformers cannot build it: {type(error).__name__}: {error}") from error
    traced = trace(model)
    call, text = traced.calls[0], config.get_text_config(decoder=True)
    ours = [module for _, module in _replaceable(model)]
    outside = (model.get_input_embeddings(), model.get_output_embeddings())
    context = getattr(text, "max_position_embeddings", None)
    if not isinstance(context, int) or not 1 <= context <= MAX_CONTEXT:
        raise _refused(config, f"`max_position_embeddings` is {context!r}, expected an integer from 1 to {MAX_CONTEXT}")
    spec = DecoderSpec(
        family=config.model_type,
        num_layers=len(traced.calls),
        hidden_size=model.get_input_embeddings().weight.shape[1],
        num_heads=call.num_heads,
        num_kv_heads=call.num_kv_heads,
        head_dim=call.head_dim,
        ffn_size=max((_matrix(module).shape[0] for module in ours if module not in outside), default=1),
        vocab_size=traced.vocab_size,
        context_length=context,
        norm_eps=0.0,
        rope=RopeSpec(),
        windows=tuple(call.window for call in traced.calls),
    )
    return Description(spec, _weight_bytes(model, format), format.name, len({id(module.weight) for module in ours}))


def build(folder: Path, dtype: str, batch: Batch, kv: Mapping[int, KVLayer], limits: Limits, kernels: str) -> Decoder:
    """The model loaded and bound to its buffers, with the face of our own decoder.

    Raises CheckpointError if its weights do not fit its config or are not finite.
    """
    config = _read_config(folder)
    if kernels == registry.CUDA:
        raise UnsupportedModel(
            f"a `{config.model_type}` model is computed by transformers' modules, which run on the CPU alone",
            "run it with `--device cpu`",
        )
    stored = _torch_dtype(folder, config, dtype)
    AttentionInterface.register(PAGED, _paged)
    model = _load(folder, config, stored)
    buffers = Buffers(limits.max_rows, limits.threads, kernels)
    _replace(model, _FORMATS[stored], buffers)
    model.to(torch.float32)
    traced = trace(model)
    for layer, call in enumerate(traced.calls):
        call.module.llmctl_attention = PagedAttention(  # type: ignore[assignment]
            *(batch, kv[layer], call.num_heads, call.scale, call.window, limits.max_positions, buffers),
            limits.attention_compute,
        )
    model.set_attn_implementation(PAGED)
    logits = make_rows(traced.vocab_size, limits.max_logit_rows)
    threads = 1 if _only_small_parts_left(model) else limits.threads
    program = _Program(model, batch, logits, traced.vocab_size, threads)
    return Decoder(program=program, ops=(), kinds=(), logits=logits, hidden=make_rows(1, 1))


@dataclass(frozen=True, slots=True, eq=False)
class _Program:
    """`replay` runs the modules on the batch's rows and fills `logits` for the rows that want them."""

    model: Any
    batch: Batch
    logits: F32Array
    vocab_size: int
    threads: int

    def replay(self) -> None:
        batch, rows, wanted = self.batch, int(self.batch.counts[ROWS]), int(self.batch.counts[LOGIT_ROWS])
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        with torch.inference_mode():
            out = self.model(
                input_ids=torch.from_numpy(batch.token[:rows]).long()[None],
                position_ids=torch.from_numpy(batch.position[:rows]).long()[None],
                use_cache=False,
                logits_to_keep=torch.from_numpy(batch.logit_rows[:wanted]).long(),
            )
            torch.from_numpy(self.logits)[:wanted, : self.vocab_size] = out.logits[0]


def _paged(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, **_: object
) -> tuple[torch.Tensor, None]:
    """What transformers calls for attention; the trace has seen what else it gives."""
    attention = cast(PagedAttention, module.llmctl_attention)
    return attention(query, key, value), None


def _read_config(folder: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # ValueError for unknown and remote models, anything for broken ones
        reason = textwrap.shorten(str(error), 200)
        raise UnsupportedModel(
            f"transformers {transformers.__version__} cannot read the config in `{folder}`: {reason}",
            "a newer transformers may know the model; code that comes with a checkpoint is never run",
        ) from error
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise _refused(config, "it has an encoder")
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _refused(config, "transformers has no causal language model for it")
    if getattr(config, "quantization_config", None) is not None:
        raise _refused(config, "its weights are quantized")
    ropes = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    for rope in (ropes, *(item for item in ropes.values() if isinstance(item, dict))):
        if rope.get("rope_type") in _BATCH_DEPENDENT_ROPES:
            raise _refused(config, f"its rope of type `{rope['rope_type']}` depends on the company in a batch")
    return config


def _torch_dtype(folder: Path, config: Any, asked: str) -> torch.dtype:
    """The type that weights are kept in: as asked, else as the config says, else that of the first tensor."""
    if asked != "auto":
        return _DTYPES[asked]
    dtype = config.dtype
    if dtype is None:
        formats = [tensor.format for tensor in open_files(folder).tensors.values() if tensor.format is not None]
        dtype = _DTYPE_OF[formats[0].kind] if formats else None
    if dtype not in _FORMATS:
        raise _refused(config, f"its weights are stored as {dtype}")
    return cast(torch.dtype, dtype)


def _load(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    """transformers' model with its weights as `dtype`, every tensor used, none missing, all finite."""
    try:
        with _quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                str(folder),
                config=config,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:
        raise CheckpointError(f"transformers cannot load `{folder}`: {type(error).__name__}: {error}") from error
    for kind, names in info.items():
        if names:
            shown = ", ".join(f"`{name}`" for name in sorted(map(str, names))[:4])
            raise CheckpointError(
                f"the tensors in `{folder}` do not fit its config: {kind.replace('_', ' ')}: {shown}",
                "fetch the model again, or the config belongs to another checkpoint",
            )
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise CheckpointError(f"tensor `{name}` of `{folder}` holds NaN or infinity")
    return model.eval().requires_grad_(False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and reports: what it finds is raised here as an error."""
    bars, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _replaceable(model: Any) -> Iterator[tuple[str, Any]]:
    """Modules that ours can stand for, by name: plain Linears (GPT-2's too) and a plain embedding of the tokens."""
    embedding = model.get_input_embeddings()
    for name, module in model.named_modules():
        if type(module) in (nn.Linear, Conv1D) or (module is embedding and type(module) is nn.Embedding):
            yield name, module


def _matrix(module: Any) -> torch.Tensor:
    """The module's weight as [outputs, inputs]."""
    weight: torch.Tensor = module.weight.detach()
    return weight.T if isinstance(module, Conv1D) else weight


def _replace(model: Any, format: WeightFormat, buffers: Buffers) -> None:
    """Put our modules in place of transformers', one by one; a weight is freed when its last user has it packed."""
    modules = list(_replaceable(model))
    users = Counter(id(module.weight) for _, module in modules)
    packed: dict[int, PackedWeight] = {}
    for name, module in modules:
        key = id(module.weight)
        if key not in packed:
            packed[key] = _pack(_matrix(module), format)
        weight = packed[key]
        users[key] -= 1
        if not users[key]:
            del packed[key]  # the id may be another weight's later
        ours: nn.Module
        if isinstance(module, nn.Embedding):
            ours = PackedEmbedding(weight, buffers)
        else:
            bias = None if module.bias is None else module.bias.float().numpy()
            ours = PackedLinear(weight, bias, buffers)
        del module.weight
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, ours)


def _pack(weight: torch.Tensor, format: WeightFormat) -> PackedWeight:
    n, k = weight.shape
    values = weight.contiguous()
    data = values.view(torch.uint16).numpy() if format == BF16 else values.numpy()
    return PackedWeight(format, n, k, pack(format, data))


def _weight_bytes(model: Any, format: WeightFormat) -> int:
    """Bytes of all weights once the model is built: packed where ours stand for modules, float32 elsewhere."""
    ours = {id(module.weight): packed_bytes(format, *_matrix(module).shape) for _, module in _replaceable(model)}
    return sum(ours.get(id(parameter), 4 * parameter.numel()) for parameter in model.parameters())


def _only_small_parts_left(model: Any) -> bool:
    """Whether torch has no matrix left to multiply with: then its threads would cost more than they bring."""
    return all(
        parameter.ndim < 2 or isinstance(module, nn.Embedding)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    )


def _refused(config: Any, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"transformers backend: a `{config.model_type}` model cannot run here: {why}")
