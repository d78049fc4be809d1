"""What a run will make and need, worked out from headers before anything is computed.

Memory is estimated generously: a run that is refused costs a minute, one that is killed after an hour costs the hour.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...engine.load.checkpoint import Checkpoint
from ...engine.load.convert import target_format
from ...engine.load.kv_scales import scale_names, scale_tensors
from ...engine.models.arch import DecoderSpec
from ...engine.score import ROWS
from ...engine.sizes import format_bytes
from ...kernels.errors import CapacityError, UnsupportedModel, UsageError
from ...kernels.formats import BF16, F16, WeightFormat
from ...quant.card import CARD_NAME
from ...quant.formats.safetensors_write import PlannedTensor
from ...quant.save import plan_awq
from ...quant.scheme import quantized_linears
from .asked import SAMPLES, SEQLEN, Asked
from .text import check_name

_BASE = 700 << 20  # Python, torch and what they map
_BATCH_TOKENS = 4096  # that pass through a block at once (`quant/calibrate.py`)
_DTYPE_BYTES = {"auto": 0, "float16": 2, "bfloat16": 2, "float32": 4}  # of another copy, which "auto" does not need
ACTIVATION_LIMIT = 1 << 30  # bytes of activations in memory; beyond it they are in a file


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One run on one model.

    shapes          of the model's tensors by name
    linears         the modules to quantize, with their numbers of inputs
    format          they are stored in, group -1 for one group per output
    tensors         what will be written
    output          the folder to make
    memory          bytes that the run needs at its peak, estimated
    scratch         bytes on the output's disk besides the output, for measuring it
    reference       the dtype of the original that the output is measured against; "auto": as it runs by default
    scales          names of the scales of the KV cache that are measured and stored: K and V of each layer in turn
    stale           those of the source, which are not for the weights that are made here
    """

    checkpoint: Checkpoint
    shapes: Mapping[str, tuple[int, ...]]
    linears: Mapping[str, int]
    format: WeightFormat
    tensors: tuple[PlannedTensor, ...]
    output: Path
    memory: int
    scratch: int
    reference: str
    scales: tuple[str, ...]
    stale: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.checkpoint.source.name

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def source_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.checkpoint.tensors.values())

    @property
    def output_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def source_formats(self) -> tuple[str, ...]:
        """Names of the formats of the source's matrices."""
        stored = self.checkpoint.tensors.values()
        return tuple(sorted({t.format.name for t in stored if t.format is not None and len(t.shape) == 2}))

    @property
    def is_dequantized(self) -> bool:
        """Whether the source is quantized already, so that its values are what is quantized here."""
        return any(t.format is not None and not t.format.is_float for t in self.checkpoint.tensors.values())


def prepare(checkpoint: Checkpoint, asked: Asked) -> Work:
    """The run that `asked` is on this checkpoint; UsageError or UnsupportedModel if it cannot be."""
    spec = checkpoint.spec
    if spec.experts is not None:
        raise UnsupportedModel(
            f"`{checkpoint.source.name}` is a mixture of experts, which cannot be quantized here", "use a dense model"
        )
    stale = scale_tensors(spec.num_layers)  # of a cache of the source's own weights
    shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items() if name not in stale}
    scales = kv_scales(asked, spec)
    linears = asked.scheme.linears(shapes)
    format = asked.scheme.format(linears.values())
    tensors = plan_awq(shapes, linears, format, scales)
    output = asked.output or Path(f"{checkpoint.source.name}-{asked.scheme.method}-{group_name(format)}")
    output_bytes = sum(tensor.nbytes for tensor in tensors)
    reference = reference_dtype(checkpoint)
    reference_bytes = _DTYPE_BYTES[reference] * sum(math.prod(shape) for shape in shapes.values())
    return Work(
        checkpoint,
        shapes,
        linears,
        format,
        tensors,
        output,
        memory_needed(shapes, asked),
        output_bytes + output_bytes // 16 + reference_bytes + (output_bytes if scales else 0),
        reference,
        scales,
        tuple(sorted(stale & checkpoint.tensors.keys())),
    )


def reference_dtype(checkpoint: Checkpoint) -> str:
    """The narrowest dtype under which every weight is a float of the value that is stored; "auto" if they are anyway.

    The arithmetic is float32 with any of them, but what runs on a CPU by default are integers for floats of 16 bits.
    """
    stored = [(t.format, t.shape[1]) for t in checkpoint.tensors.values() if t.format is not None and len(t.shape) == 2]
    formats = {format for format, _ in stored}
    if all(format.is_float and target_format(format, "auto", k).is_float for format, k in stored):
        return "auto"
    return {frozenset([F16]): "float16", frozenset([BF16]): "bfloat16"}.get(frozenset(formats), "float32")


def kv_scales(asked: Asked, spec: DecoderSpec) -> tuple[str, ...]:
    """The scales of the KV cache to be stored, K's and V's of each layer; UsageError if there can be none."""
    if asked.kv_cache_scheme == "none":
        return ()
    if spec.latent is not None:
        raise UsageError(
            f"--kv-cache-scheme is {asked.kv_cache_scheme}, this model's cache holds latents, which have no scales",
            "leave it out",
        )
    return tuple(scale_names(layer, part)[0] for layer in range(spec.num_layers) for part in "kv")


def check_room(work: Work, memory_available: int) -> None:
    """Raise CapacityError if memory or the output's disk will not do."""
    if work.memory > memory_available:
        raise CapacityError(
            f"quantizing `{work.name}` needs about {format_bytes(work.memory)} of memory, "
            f"{format_bytes(memory_available)} are available",
            "free some, or use fewer --calib-samples",
        )
    free, needed = free_bytes(work.output), work.output_bytes + work.scratch
    if needed > free:
        raise CapacityError(
            f"writing and measuring `{work.output}` needs {format_bytes(needed)} on its disk, "
            f"{format_bytes(free)} are free",
            "make room, or choose an --output on another disk",
        )


def check_text(work: Work, asked: Asked) -> None:
    """Raise what `choose_samples` would, as far as that can be said without reading any text."""
    context = work.checkpoint.spec.context_length
    if asked.calib_seqlen is not None and asked.calib_seqlen > context:
        raise CapacityError(
            f"--calib-seqlen is {asked.calib_seqlen}, the model's context is {context} tokens", f"use {context}"
        )
    for name in (asked.calib_dataset, asked.eval_text):
        if name:
            check_name(name)


def check_output(work: Work, overwrite: bool) -> None:
    """Raise UsageError if the output folder may not be written: something is there, or it is the model itself."""
    output = work.output
    if output.name in ("", ".."):
        raise UsageError(f"--output is `{output}`", "name the folder to make")
    source = work.checkpoint.source.path.resolve()
    if output.resolve() == source or output.resolve() in source.parents:
        raise UsageError(f"the output `{output}` would replace the model itself", "choose another --output")
    if source.is_dir() and source in output.resolve().parents:
        raise UsageError(f"the output `{output}` is inside the model's own folder", "choose an --output outside of it")
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not overwrite:
        raise UsageError(f"`{output}` already exists", "use --overwrite to replace it, or choose another --output")
    if not (output / CARD_NAME).is_file():
        raise UsageError(
            f"`{output}` is not what --overwrite may replace: it holds no {CARD_NAME}", "remove it yourself first"
        )


def free_bytes(path: Path) -> int:
    """Bytes free for us on the disk where `path` is or will be."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    status = os.statvfs(existing)
    return status.f_bavail * status.f_frsize


def memory_needed(shapes: Mapping[str, tuple[int, ...]], asked: Asked) -> int:
    """Bytes at the peak, which is in the walk or in measuring.

    The walk has a block and copies of it (as it was, as it will be stored, what a search tries), the moments of its
    inputs, activations, and now and then a tensor that is kept. Measuring has the logits of a window from both models,
    some of them in float64; weights that are mapped files can be dropped by the system, and are not counted.
    """
    linears = quantized_linears(shapes)
    blocks: dict[str, int] = {}
    for module in linears:
        block = ".".join(module.split(".")[:3])
        blocks[block] = blocks.get(block, 0) + math.prod(shapes[f"{module}.weight"])
    widths = set(linears.values())
    moments = 3 * sum(width * width for width in widths) if asked.scheme.method == "awq" else 0
    hidden = shapes["model.embed_tokens.weight"][1]
    tokens = (asked.calib_samples or SAMPLES) * (asked.calib_seqlen or SEQLEN) if asked.scheme.method == "awq" else 0
    activations = min(4 * tokens * hidden, ACTIVATION_LIMIT)
    batch = 4 * min(tokens, _BATCH_TOKENS) * (6 * hidden + 4 * max(widths))
    kept = 8 * max(math.prod(shape) for shape in shapes.values())
    walk = 4 * (3 * max(blocks.values()) + moments) + activations + batch + kept
    vocabulary = shapes["model.embed_tokens.weight"][0]
    return _BASE + max(walk, (2 * 4 * SEQLEN + 6 * 8 * ROWS) * vocabulary)


def group_name(format: WeightFormat) -> str:
    """g64, or `channel` for one group per output."""
    return "channel" if format.group == -1 else f"g{format.group}"


def linear_bits(work: Work) -> float:
    """Bits per weight of the quantized Linears alone, scales and zero points included."""
    parts = ((tensor, *tensor.name.rpartition(".")[::2]) for tensor in work.tensors)
    stored = sum(tensor.nbytes for tensor, module, part in parts if module in work.linears and part != "bias")
    return 8 * stored / sum(math.prod(work.shapes[f"{module}.weight"]) for module in work.linears)
