"""A checkpoint in, a quantized checkpoint out: blocks are read, quantized and written one after the other."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import msgspec
import numpy as np
import torch

from ...engine.load.checkpoint import Checkpoint
from ...engine.load.progress import Progress
from ...engine.load.text import ModelText
from ...engine.models.block import DecoderBlock, dense_attend
from ...engine.models.decoder import scale_as_stored
from ...kernels.ops import I32Array
from ...quant.calibrate import Activations, LinearReport, embed, quantize_blocks
from ...quant.save import AwqWriter, text_files
from ...quant.scheme import Scheme, quantized_linears
from .preflight import ACTIVATION_LIMIT, Work

log = logging.getLogger(__name__)

_EMBEDDING = "model.embed_tokens.weight"
_OFFSET_KEY = "norm_offset_added"  # `engine/models/families.py`


def write_quantized(
    work: Work, scheme: Scheme, calibration: I32Array | None, folder: Path, progress: Progress
) -> tuple[LinearReport, ...]:
    """Fill `folder` with the quantized checkpoint; how every Linear fared, by its full name."""
    checkpoint = work.checkpoint
    ignored = [_place(module) for module in quantized_linears(work.shapes) if module not in work.linears]
    writer = AwqWriter(folder, work.shapes, work.linears, work.format, scales=work.scales)
    try:
        for name in work.shapes:
            if not name.startswith("model.layers."):
                writer.add(name, _tensor(checkpoint, name))
        activations = None if calibration is None else _embedded(checkpoint, calibration)
        blocks = quantize_blocks(
            lambda layer: _block(work, layer),
            checkpoint.spec.num_layers,
            scheme,
            work.format,
            activations,
            dense_attend,
            ignored=ignored,
            exact_inputs=True,  # as AutoAWQ does; a second pass gives no better model (KL 0.125 with it, 0.121 without)
            progress=lambda _, done, total: progress(f"quantizing {total} layers", done, total),
        )
        reports = []
        for layer, block in enumerate(blocks):
            prefix = f"model.layers.{layer}."
            writer.add_block(prefix, block)
            for report in block.reports:
                log.info("%s%s: %s, relative error %.5f", prefix, report.module, report.method, report.error)
                reports.append(LinearReport(prefix + report.module, report.method, report.error))
        writer.finish(_config(checkpoint), _files(checkpoint))
    finally:
        writer.close()
    return tuple(reports)


def _place(module: str) -> tuple[int, str]:
    """`model.layers.3.mlp.up_proj` as (3, `mlp.up_proj`)."""
    layer, _, name = module.removeprefix("model.layers.").partition(".")
    return int(layer), name


def _block(work: Work, layer: int) -> DecoderBlock:
    checkpoint, prefix = work.checkpoint, f"model.layers.{layer}."
    names = [name for name in work.shapes if name.startswith(prefix)]
    tensors = {name.removeprefix(prefix): _tensor(checkpoint, name) for name in names}
    offset = 1.0 if _holds_offset(checkpoint) else checkpoint.spec.norm_offset
    return DecoderBlock(msgspec.structs.replace(checkpoint.spec, norm_offset=offset), layer, tensors)


def _embedded(checkpoint: Checkpoint, tokens: I32Array) -> Activations:
    """What the first block reads of these tokens; only their own rows of the embedding are unpacked."""
    rows, places = np.unique(tokens, return_inverse=True)
    stored = checkpoint.files.read(_EMBEDDING)
    embedding = stored.select_rows(rows.astype(np.int64)).dequantize()
    embedding *= np.float32(scale_as_stored(checkpoint.spec.embedding_scale, stored.format))
    return embed(torch.from_numpy(places.reshape(tokens.shape)), torch.from_numpy(embedding), ACTIVATION_LIMIT)


def _tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """The tensor's values as a Hugging Face checkpoint has them; float16 is not widened."""
    weight = checkpoint.read(name)
    values = torch.from_numpy(weight.data.copy() if weight.format.kind == "f16" else weight.dequantize())
    return values - 1 if _holds_offset(checkpoint) and name.endswith("norm.weight") else values


def _holds_offset(checkpoint: Checkpoint) -> bool:
    """Whether norms hold the 1 that their model adds, as in GGUF files; it must not be written."""
    return checkpoint.config.get(_OFFSET_KEY) is True


def _config(checkpoint: Checkpoint) -> dict[str, object]:
    """config.json without what it says of the source's own quantization."""
    left_out = ("quantization_config", "compression_config", _OFFSET_KEY)
    config = {key: value for key, value in checkpoint.config.items() if key not in left_out}
    spec = checkpoint.spec
    if checkpoint.source.kind == "gguf":
        if spec.rope.kind == "factors":
            log.warning("the model's rope factors are written in a form that only llmctl reads")
        if spec.rope_local is None:
            config["rope_theta"] = spec.rope.theta  # where transformers 4 looks for it
    return config


def _files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The files beside the weights: those of the source's folder, or for a GGUF file ones that say the same."""
    if checkpoint.source.kind == "hf":
        return text_files(checkpoint.source.path)
    text: ModelText = checkpoint.load_text()
    chat = text.chat
    tokenizer_config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": checkpoint.spec.context_length,
        **chat.special_tokens,
    }
    if chat.template:
        tokenizer_config["chat_template"] = chat.template
    defaults = {k: v for k, v in msgspec.structs.asdict(chat.defaults).items() if v is not None}
    generation = {"eos_token_id": list(chat.eos_ids), **defaults} if chat.eos_ids else defaults
    return {
        "tokenizer.json": text.tokenizer_json.encode(),
        "tokenizer_config.json": _json(tokenizer_config),
        "generation_config.json": _json(generation),
    }


def _json(content: dict[str, object]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
