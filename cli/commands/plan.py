"""`llmctl plan`: where the memory would go, from a checkpoint's headers, without loading it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import typer

from ...engine.config import EngineConfig, environment
from ..console import Console
from ..options import Json, MemoryOptions

if TYPE_CHECKING:
    from ...engine.budget import DraftShare, MemoryBudget, ModelSize
    from ...engine.kv_groups import KVGroup
    from ...engine.load.hub import Source
    from ...engine.load.progress import Progress
    from ...engine.load.vocabulary import Vocabulary
    from ...engine.models.arch import DecoderSpec
    from ...kernels.cuda.driver import DeviceInfo
    from ...quant.formats.stored import StoredTensor

LENGTHS = (512, 2048, 8192, 32768)  # worth knowing about, as far as the model goes


@dataclass(frozen=True, slots=True)
class PackedSize:
    """A model's weights in the kernels' layout: bytes, how many weights have which format, and what is not kept."""

    bytes: int
    formats: dict[str, int]
    roundings: tuple[str, ...] = ()


def plan(context: typer.Context, config: MemoryOptions, json: Json = False) -> None:
    """Show what memory a model would take here, and how many sequences would fit.

    Only headers are read; a model that is not on this machine is fetched first.
    """
    from ...engine.budget import memory_budget
    from ...engine.device import settle
    from ...engine.gpu_support import check_on_gpu
    from ...engine.gpu_types import gpu_weight_bytes
    from ...engine.load.disk import check_swap_room
    from ...engine.load.model import why_transformers
    from ...engine.load.vocabulary import check_same_vocabulary
    from ...kernels.cuda.devices import free_memory
    from ...kernels.cuda.jit import architecture
    from ...kernels.device import read_machine

    console: Console = context.obj
    with console.progress() as progress:
        source, draft = sources(config, progress)
    if draft is not None and draft != source:
        check_same_vocabulary(vocabulary(draft), vocabulary(source))
    why = why_transformers(source, config.model_impl, gpu=settle(config)[1] is not None)
    config, gpu = settle(config, "transformers" if why else "llmctl")
    spec, size = described(source, config)
    if gpu is not None:
        check_on_gpu(source.name, spec, architecture(*gpu.capability))
    beside = None if draft is None else model_size(draft, config)
    available, weights = read_machine().memory_available, size.bytes
    if gpu is not None:
        available, weights = free_memory(gpu)[0], gpu_weight_bytes(spec, weights, tuple(size.formats))
    budget = memory_budget(spec, weights, tuple(size.formats), config, available, beside)
    if budget.tier_blocks and gpu is None:
        check_swap_room(environment().cache / "swap", budget.tier_bytes)
    if json:
        console.json({"device": config.device, **as_json(source.name, size, budget)})
    else:
        show(console, source.name, size, budget, gpu)


def sources(config: EngineConfig, progress: Progress) -> tuple[Source, Source | None]:
    """Where the model is, and its draft model if it has one."""
    from ...engine.load.hub import resolve

    settings, speculation = environment(), config.speculative_config
    source = resolve(config.model, environment=settings, progress=progress)
    if speculation.method != "draft_model":
        return source, None
    return source, resolve(speculation.model, environment=settings, progress=progress)


def vocabulary(source: Source) -> Vocabulary:
    """What the model's files say of its tokens."""
    from ...engine.load.checkpoint import source_text
    from ...engine.load.vocabulary import Vocabulary

    return Vocabulary(source.name, source_text(source).tokenizer_json.encode())


def described(source: Source, config: EngineConfig) -> tuple[DecoderSpec, PackedSize]:
    """What the engine would make of the model."""
    from ...engine.load.model import why_transformers

    why = why_transformers(source, config.model_impl, gpu=config.on_gpu)
    return outline_of_modules(source, why, config) if why else outline(source, config)


def model_size(draft: Source, config: EngineConfig) -> ModelSize:
    """What the engine would make of the draft model; `config` is settled."""
    from ...engine.budget import ModelSize
    from ...engine.gpu_types import gpu_weight_bytes

    spec, size = described(draft, msgspec.structs.replace(config, rope_scaling=None))
    formats = tuple(size.formats)
    return ModelSize(spec, gpu_weight_bytes(spec, size.bytes, formats) if config.on_gpu else size.bytes, formats)


def outline(source: Source, config: EngineConfig) -> tuple[DecoderSpec, PackedSize]:
    """What our decoder would be made of."""
    from ...engine.load.checkpoint import open_checkpoint
    from ...engine.load.convert import roundings, settled_dtype
    from ...engine.models.rope_config import overridden

    checkpoint = open_checkpoint(source)
    tensors = checkpoint.tensors.values()
    dtype = settled_dtype(config.dtype, on_gpu=config.on_gpu)
    size = packed_size(tensors, dtype)
    spec = checkpoint.spec if config.rope_scaling is None else overridden(checkpoint.spec, config.rope_scaling)
    return spec, dataclasses.replace(size, roundings=roundings(tensors, dtype))


def outline_of_modules(source: Source, why: str, config: EngineConfig) -> tuple[DecoderSpec, PackedSize]:
    """What transformers' modules would be made of."""
    from ...engine.load.model import check_rope_scaling
    from ...engine.load.transformers_model import describe_transformers

    check_rope_scaling(source, why, config.rope_scaling)
    found = describe_transformers(source, why, config.dtype)
    return found.spec, PackedSize(found.weight_bytes, {found.weight_format: found.num_packed})


def packed_size(tensors: Iterable[StoredTensor], dtype: str) -> PackedSize:
    """What these tensors take once packed. Vectors are few and not counted."""
    from ...engine.load.convert import packed_form

    total, formats = 0, Counter[str]()
    for stored in tensors:
        if len(stored.shape) == 2:
            format, size = packed_form(stored, dtype)
            total += size
            formats[format.name] += 1
    return PackedSize(total, dict(sorted(formats.items())))


def as_json(model: str, size: PackedSize, budget: MemoryBudget) -> dict[str, object]:
    """The plan as plain values; sizes in bytes."""
    return {
        "model": model,
        "weight_formats": size.formats,
        "roundings": list(size.roundings),
        "available_bytes": budget.available,
        "weight_bytes": budget.weights,
        "kv_bytes": budget.kv_bytes,
        "workspace_bytes": budget.workspace,
        "reserve_bytes": budget.reserve,
        "total_bytes": budget.total,
        "kv_format": budget.kv_format,
        "kv_formats": list(budget.kv_formats),
        "kv_bytes_per_token": budget.kv_bytes_per_token,
        "block_size": budget.block_size,
        "bytes_per_block": budget.bytes_per_block,
        "num_blocks": budget.num_blocks,
        "kv_groups": [
            {
                "window": group.window,
                "layers": len(group.layers),
                "num_blocks": group.num_blocks,
                "swap_blocks": group.tier_blocks if group.window else budget.tier_blocks,
                "bytes_per_token": group.bytes_per_token,
            }
            for group in budget.groups
        ],
        "swap_blocks": budget.tier_blocks,
        "swap_bytes": budget.tier_bytes,
        "max_model_len": budget.max_model_len,
        "draft": None if budget.draft is None else draft_json(budget.draft),
        "sequences": {str(length): budget.sequences(length) for length in lengths(budget)},
        "sequence_bytes": {str(length): budget.sequence_bytes(length) for length in lengths(budget)},
    }


def draft_json(draft: DraftShare) -> dict[str, object]:
    """What of the plan's bytes is the draft model's."""
    return {
        "weight_bytes": draft.weights,
        "workspace_bytes": draft.workspace,
        "kv_format": draft.kv_format,
        "kv_bytes_per_token": draft.kv_bytes_per_token,
    }


def show(console: Console, model: str, size: PackedSize, budget: MemoryBudget, gpu: DeviceInfo | None = None) -> None:
    """Print the plan as tables."""
    from ...engine.sizes import format_bytes

    formats = ", ".join(f"{count} {name}" for name, count in size.formats.items())
    pools = [
        f"{group.num_blocks} blocks of {budget.block_size} tokens in {formats_of(group, budget)}, "
        f"{format_bytes(group.bytes_per_token)} per token{part_of(group, budget)}"
        for group in budget.groups
        if group.layers
    ]
    where = "on disk" if gpu is None else "pinned"
    swap = f"swap space: {budget.tier_blocks} more blocks, {budget.tier_blocks * budget.block_size} tokens"
    for group in budget.groups[1:]:
        swap += f", {group.tier_blocks} of the window of {group.window}"
    console.table(
        ["memory", ">size", ""],
        [
            ["weights", format_bytes(budget.weights), formats],
            *(["", "", rounding] for rounding in size.roundings),
            ["KV cache", format_bytes(budget.kv_bytes), pools[0]],
            *(["", "", pool] for pool in pools[1:]),
            ["workspace", format_bytes(budget.workspace), "activations, logits and tables"],
            *([] if budget.draft is None else [draft_row(budget.draft)]),
            ["together", format_bytes(budget.total), ""],
            *([[where, format_bytes(budget.tier_bytes), swap]] if budget.tier_blocks else []),
            ["available", format_bytes(budget.available), f"of which {format_bytes(budget.reserve)} stay in reserve"],
            *([] if gpu is None else [["device", "", f"{gpu.name}, cuda:{gpu.index}, {gpu.processors} SMs"]]),
        ],
        title=model,
    )
    console.table(
        [">tokens per sequence", ">its KV cache", ">sequences at once"],
        [
            [str(length), format_bytes(budget.sequence_bytes(length)), str(budget.sequences(length))]
            for length in lengths(budget)
        ],
    )


def formats_of(group: KVGroup, budget: MemoryBudget) -> str:
    """How the group's layers are stored, with how many are in another format than most."""
    others = [budget.kv_formats[layer] for layer in group.layers if budget.kv_formats[layer] != budget.kv_format]
    return budget.kv_format + (f" ({len(others)} layers in {others[0]})" if others else "")


def part_of(group: KVGroup, budget: MemoryBudget) -> str:
    """Which layers the group is of, where it is not of all."""
    if len(budget.groups) == 1:
        return ""
    kept = f"the last {group.window}" if group.window else "all"
    return f": {len(group.layers)} layers that keep {kept}"


def draft_row(draft: DraftShare) -> list[str]:
    """The draft model's part of the rows above, in one line."""
    from ...engine.sizes import format_bytes

    kv = f"{format_bytes(draft.kv_bytes_per_token)} per token of KV cache in {draft.kv_format}"
    return ["of which draft", format_bytes(draft.weights + draft.workspace), f"weights and workspace; besides, {kv}"]


def lengths(budget: MemoryBudget) -> list[int]:
    """The lengths that the plan tells about, the longest last."""
    return [*(length for length in LENGTHS if length < budget.max_model_len), budget.max_model_len]
