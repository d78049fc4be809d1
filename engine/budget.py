"""Where the memory goes, worked out before anything is loaded.

`plan` prints a MemoryBudget from a checkpoint's headers; the engine sizes its real KV cache with the same function, so
the two cannot disagree. Lengths are never cut to make things fit: what does not fit is a CapacityError that names the
figures and the smallest change that would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ..kernels.errors import CapacityError, UsageError
from ..kernels.formats import KVFormat
from ..kernels.ops import PANEL
from .config import NO_SPECULATION, EngineConfig
from .models.arch import DecoderSpec
from .shortage import Demand
from .sizes import format_bytes

# The KV pool takes this share of what weights and workspace leave, unless all sequences need less or one needs more. A
# CPU's memory is everybody's: a pool of most of it, as on a GPU, would push other programs into swap.
POOL_SHARE = 4

# Python, the tokenizer and the mapped libraries, and what the rest of the machine may ask for meanwhile.
MIN_RESERVE = 256 << 20
RESERVE_SHARE = 20

SLIDING_WINDOW = "sliding_window"  # what vLLM calls the layers with a window

# `kv_cache_dtype` to the kind of KVFormat, where the two differ.
_KINDS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "fp8": "fp8_e4m3"}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model beside the one that is asked, with its weights as packed."""

    spec: DecoderSpec
    weight_bytes: int
    weight_formats: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DraftShare:
    """What of a MemoryBudget is the draft model's."""

    weights: int
    workspace: int
    kv_format: str
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """How `available` bytes are shared out.

    workspace   activations of one step, logits, rope tables and what is kept per sequence
    reserve     left alone
    kv_format   the kind of KVFormat
    kv_formats  the kind of each layer; `kv_format` where --kv-cache-dtype-skip-layers does not keep one as it is
    num_blocks  KV blocks of `block_size` tokens; together they are one arena
    tier_blocks blocks that the swap space takes; it is on disk and no part of `total`
    draft       the draft model's part of weights, workspace and KV bytes
    """

    available: int
    weights: int
    workspace: int
    reserve: int
    kv_format: str
    kv_bytes_per_token: int
    block_size: int
    num_blocks: int
    max_model_len: int
    kv_formats: tuple[str, ...]
    tier_blocks: int = 0
    draft: DraftShare | None = None

    @property
    def bytes_per_block(self) -> int:
        return self.kv_bytes_per_token * self.block_size

    @property
    def swapped_bytes_per_block(self) -> int:
        """Bytes of a block that the swap space keeps: what the draft model has of it is computed again."""
        return self.bytes_per_block - (0 if self.draft is None else self.draft.kv_bytes_per_token * self.block_size)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool."""
        return self.bytes_per_block * self.num_blocks

    @property
    def tier_bytes(self) -> int:
        """Bytes of the swap space, at most."""
        return self.swapped_bytes_per_block * self.tier_blocks

    @property
    def num_tokens(self) -> int:
        """Tokens that the KV pool holds."""
        return self.block_size * self.num_blocks

    @property
    def total(self) -> int:
        """What the engine will use: everything but the reserve."""
        return self.weights + self.workspace + self.kv_bytes

    def sequences(self, length: int) -> int:
        """How many sequences of `length` tokens fit at once, without a shared prefix."""
        return self.num_blocks // blocks_for(length, self.block_size)


def blocks_for(length: int, block_size: int) -> int:
    """Blocks that hold `length` tokens."""
    return -(-length // block_size)


def choose_kv_format(config: EngineConfig, weight_formats: Sequence[str]) -> KVFormat:
    """How K and V are stored: as asked, else float32 if all weights are, else int16.

    int16 is about as exact as float16, takes 2 bytes more per token and head, and attention over a long prompt is
    nearly twice as fast with it. `weight_formats` are names of WeightFormats as loaded, with `config.dtype` already
    applied.
    """
    if config.kv_cache_dtype != "auto":
        return KVFormat(_KINDS.get(config.kv_cache_dtype, config.kv_cache_dtype))
    return KVFormat("f32" if set(weight_formats) == {"f32"} else "int16")


def kv_format_of_layers(spec: DecoderSpec, config: EngineConfig, weight_formats: Sequence[str]) -> tuple[KVFormat, ...]:
    """How each layer's K and V are stored; UsageError for skipped layers that the model does not have."""
    asked = choose_kv_format(config, weight_formats)
    skipped: set[int] = set()
    for name in config.kv_cache_dtype_skip_layers:
        windows = [layer for layer in range(spec.num_layers) if spec.window(layer)]
        if name == SLIDING_WINDOW and windows:
            skipped.update(windows)
        elif name.isdecimal() and int(name) < spec.num_layers:
            skipped.add(int(name))
        else:
            raise UsageError(
                f"--kv-cache-dtype-skip-layers names `{name}`",
                f"this model's layers are 0 to {spec.num_layers - 1}"
                + (f", and `{SLIDING_WINDOW}` stands for {len(windows)} of them" if windows else ", none has a window"),
            )
    whole = choose_kv_format(msgspec.structs.replace(config, kv_cache_dtype="auto"), weight_formats)
    return tuple(whole if layer in skipped else asked for layer in range(spec.num_layers))


def kv_bytes_per_token(spec: DecoderSpec, *formats: KVFormat) -> int:
    """Bytes of K and V of one token in all layers, scales included: of one format, or one for each layer.

    Every layer keeps every position, also one with a window.
    """
    each = formats * spec.num_layers if len(formats) == 1 else formats
    return sum(2 * spec.num_kv_heads * kv.head_bytes(spec.head_dim) for kv in each)


def memory_budget(
    spec: DecoderSpec,
    weight_bytes: int,
    weight_formats: Sequence[str],
    config: EngineConfig,
    available_bytes: int,
    draft: ModelSize | None = None,
) -> MemoryBudget:
    """The budget of this model under these options; bytes and formats of the weights are those of the packed ones.

    A draft model has weights, workspace and an own part of each KV block beside it.

    The KV pool is as large as asked, else what `max_num_seqs` sequences of full length need, at least one sequence of
    full length. In between it takes at most a quarter of the memory left after weights, workspace and reserve; with
    `gpu_memory_utilization` all that this share of the available memory leaves. Raises CapacityError if that does not
    fit, UsageError if the size of the pool is given twice.
    """
    length = config.max_model_len or spec.context_length
    if length > spec.context_length:
        raise CapacityError(
            f"--max-model-len is {length}, the model's context is {spec.context_length} tokens",
            f"use at most `--max-model-len {spec.context_length}`",
        )
    share = None if draft is None else _draft_share(draft, config, length)
    weight_bytes += 0 if share is None else share.weights
    beside = 0 if share is None else share.workspace
    workspace = workspace_bytes(spec, config, length) + beside
    reserve = _reserve(config, available_bytes)
    room = available_bytes - weight_bytes - workspace - reserve
    demand = Demand(available_bytes, weight_bytes, workspace, reserve, config.gpu_memory_utilization)
    if room <= 0:
        raise demand.refused(
            f"needs {format_bytes(weight_bytes)} for weights, {format_bytes(workspace)} for activations and "
            f"{format_bytes(reserve)} in reserve, {format_bytes(available_bytes)} are available",
            _less_workspace(spec, config, length, available_bytes - weight_bytes - beside - reserve)
            or f"free at least {format_bytes(1 - room)} of memory, or choose a model with smaller weights",
        )
    kv = choose_kv_format(config, weight_formats)
    formats = kv_format_of_layers(spec, config, weight_formats)
    own_per_token = kv_bytes_per_token(spec, *formats)
    per_token = own_per_token + (0 if share is None else share.kv_bytes_per_token)
    return MemoryBudget(
        available=available_bytes,
        weights=weight_bytes,
        workspace=workspace,
        reserve=reserve,
        kv_format=kv.kind,
        kv_bytes_per_token=per_token,
        block_size=config.block_size,
        num_blocks=_pool_blocks(spec, config, length, room, per_token, kv, demand),
        max_model_len=length,
        kv_formats=tuple(form.kind for form in formats),
        tier_blocks=_tier_blocks(config, own_per_token),
        draft=share,
    )


def _tier_blocks(config: EngineConfig, per_token: int) -> int:
    """Blocks that the swap space takes. UsageError if it takes none."""
    block = per_token * config.block_size
    blocks = int(config.swap_space * (1 << 30)) // block
    if config.swap_space and not blocks:
        raise UsageError(
            f"--swap-space is {format_bytes(int(config.swap_space * (1 << 30)))}, one KV block of {config.block_size} "
            f"tokens has {format_bytes(block)}",
            "give it at least some hundred blocks, or use `--swap-space 0`",
        )
    return blocks


def _draft_share(draft: ModelSize, config: EngineConfig, length: int) -> DraftShare:
    kv = choose_kv_format(config, draft.weight_formats)
    own = msgspec.structs.replace(config, speculative_config=NO_SPECULATION)  # one row of logits for each sequence
    workspace = workspace_bytes(draft.spec, own, length)
    return DraftShare(draft.weight_bytes, workspace, kv.kind, kv_bytes_per_token(draft.spec, kv))


def _reserve(config: EngineConfig, available_bytes: int) -> int:
    if config.gpu_memory_utilization:
        return max(MIN_RESERVE, available_bytes - int(available_bytes * config.gpu_memory_utilization))
    return max(MIN_RESERVE, available_bytes // RESERVE_SHARE)


def workspace_bytes(spec: DecoderSpec, config: EngineConfig, length: int) -> int:
    """Bytes of the buffers that a step computes in, and of what is kept for each of `max_num_seqs` sequences.

    Per row: float32 values, and for what a linear reads also a quantized form (at most 16 bits a value, and a scale and
    a sum for every 32). Per sequence: a row of logits, its tokens and its block table.
    """
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    read = 2 * spec.hidden_size + query + spec.ffn_size
    written = (2 if spec.sandwich_norms else 1) * spec.hidden_size + query + 2 * key + 2 * spec.ffn_size
    row = read * (4 + 2) + read // 32 * (4 + 4) + written * 4
    logits = -(-spec.vocab_size // PANEL) * PANEL
    sequence = 4 * (length + blocks_for(length, config.block_size))
    rope = (1 if spec.rope_local is None else 2) * length * spec.head_dim * 4
    per_sequence = config.max_num_seqs * sequence + config.max_logit_rows * 4 * logits
    return config.max_num_batched_tokens * row + per_sequence + rope


def _pool_blocks(
    spec: DecoderSpec, config: EngineConfig, length: int, room: int, per_token: int, kv: KVFormat, demand: Demand
) -> int:
    """KV blocks of the pool, checked against the room for them and the length of one sequence."""
    block = per_token * config.block_size
    one = blocks_for(length, config.block_size)
    most = room // block
    sizes = {
        "--num-gpu-blocks-override": config.num_gpu_blocks_override,
        "--kv-cache-memory-bytes": config.kv_cache_memory_bytes,
        "--gpu-memory-utilization": config.gpu_memory_utilization,
    }
    given = [
        f"{name} {size:g}" if isinstance(size, float) else f"{name} {size}" for name, size in sizes.items() if size
    ]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} both size the KV cache", "give one of them")
    asked = config.num_gpu_blocks_override or config.kv_cache_memory_bytes // block
    if config.num_gpu_blocks_override or config.kv_cache_memory_bytes:
        if asked < one:
            hint = f"use at least {one} blocks, which is {format_bytes(one * block)} ({one * block} bytes)"
            raise CapacityError(
                f"a KV cache of {asked} blocks holds {asked * config.block_size} tokens, "
                f"one sequence may have {length}",
                hint + (f", or `--max-model-len {asked * config.block_size}`" if asked else ""),
            )
        if asked > most:
            raise demand.refused(
                f"a KV cache of {asked} blocks needs {format_bytes(asked * block)}, {format_bytes(room)} are free",
                f"{most} blocks fit" if most >= one else _shorter(spec, config, length, room, per_token, kv),
                asked * block,
            )
        return asked
    if one > most:
        raise demand.refused(
            f"one sequence of {length} tokens needs {format_bytes(one * block)} of KV cache, "
            f"{format_bytes(room)} are free",
            _shorter(spec, config, length, room, per_token, kv),
            one * block,
        )
    return max(one, min(config.max_num_seqs * one, most if config.gpu_memory_utilization else most // POOL_SHARE))


def _shorter(spec: DecoderSpec, config: EngineConfig, length: int, room: int, per_token: int, kv: KVFormat) -> str:
    """The smallest change after which one sequence fits."""
    fits = room // (per_token * config.block_size) * config.block_size
    hints = [f"use `--max-model-len {fits}`"] if fits else []
    tokens = blocks_for(length, config.block_size) * config.block_size
    for name, smaller in (("float16", KVFormat("f16")), ("fp8", KVFormat("fp8_e4m3"))):
        needed = tokens * kv_bytes_per_token(spec, smaller)
        if smaller.bytes_per_value < kv.bytes_per_value and needed <= room:
            hints.append(f"use `--kv-cache-dtype {name}`, which needs {format_bytes(needed)}")
            break
    return ", or ".join(hints) or "free memory, or choose a smaller model"


def _less_workspace(spec: DecoderSpec, config: EngineConfig, length: int, room: int) -> str:
    """The step size at which the workspace leaves some room; "" if none does or weights alone are too large."""
    tokens = config.max_num_batched_tokens
    while tokens > 1:
        tokens //= 2
        smaller = msgspec.structs.replace(config, max_num_batched_tokens=tokens)
        if workspace_bytes(spec, smaller, length) < room:
            return f"use `--max-num-batched-tokens {tokens}`"
    return ""
