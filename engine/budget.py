"""Where the memory goes, worked out before anything is loaded.

`plan` prints a MemoryBudget from a checkpoint's headers; the engine sizes its real KV cache with the same function, so
the two cannot disagree. Lengths are never cut to make things fit: what does not fit is a CapacityError that names the
figures and the smallest change that would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ..kernels.errors import CapacityError, UsageError
from ..kernels.formats import KVFormat
from ..kernels.ops import PANEL, latent_row_bytes
from .config import NO_SPECULATION, EngineConfig
from .kv_groups import KVGroup, kv_groups, kv_layer_bytes
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
    groups      the KV groups with their pools; the first keeps every position
    step_blocks blocks that the positions of the steps in flight may take in a group with a window, all together
    tier_blocks blocks that the swap space takes, besides those of groups with a window; it is on disk and no part of
                `total`
    draft       the draft model's part of weights, workspace and KV bytes
    """

    available: int
    weights: int
    workspace: int
    reserve: int
    kv_format: str
    groups: tuple[KVGroup, ...]
    step_blocks: int
    block_size: int
    max_model_len: int
    kv_formats: tuple[str, ...]
    tier_blocks: int = 0
    draft: DraftShare | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of the group that keeps every position."""
        return self.groups[0].num_blocks

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of a token in all groups; for how long is a matter of the group."""
        return sum(group.bytes_per_token for group in self.groups) + self._beside

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of every group."""
        return self.kv_bytes_per_token * self.block_size

    @property
    def swapped_bytes_per_block(self) -> int:
        """Bytes of a block that the swap space keeps of the layers that keep everything; not the draft model's."""
        return self.groups[0].bytes_per_token * self.block_size

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pools."""
        own = sum(group.num_blocks * group.bytes_per_token for group in self.groups)
        return (own + self.num_blocks * self._beside) * self.block_size

    @property
    def _beside(self) -> int:
        return 0 if self.draft is None else self.draft.kv_bytes_per_token

    @property
    def tier_bytes(self) -> int:
        """Bytes of the swap space, at most."""
        windows = sum(group.tier_blocks * group.bytes_per_token for group in self.groups) * self.block_size
        return self.swapped_bytes_per_block * self.tier_blocks + windows

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
        most = self.num_blocks // blocks_for(length, self.block_size)
        for group in self.groups[1:]:
            most = min(most, max(1, (group.num_blocks - self.step_blocks) // group.blocks_of(length, self.block_size)))
        return most

    def sequence_bytes(self, length: int) -> int:
        """Bytes of KV of a sequence of `length` tokens that decodes."""
        blocks = ((group, group.blocks_of(length, self.block_size)) for group in self.groups)
        own = sum(count * self.block_size * group.bytes_per_token for group, count in blocks)
        return own + blocks_for(length, self.block_size) * self.block_size * self._beside


def blocks_for(length: int, block_size: int) -> int:
    """Blocks that hold `length` tokens."""
    return -(-length // block_size)


def choose_kv_format(config: EngineConfig, weight_formats: Sequence[str], latent: bool = False) -> KVFormat:
    """How K and V are stored: as asked, else float32 if all weights are, else int16.

    Latents, which are no heads, are by default float32 or bfloat16 if all weights are, else float16.

    int16 is about as exact as float16, takes 2 bytes more per token and head, and attention over a long prompt is
    nearly twice as fast with it. `weight_formats` are names of WeightFormats as loaded, with `config.dtype` already
    applied.
    """
    if config.kv_cache_dtype != "auto":
        return KVFormat(_KINDS.get(config.kv_cache_dtype, config.kv_cache_dtype))
    only = set(weight_formats)
    if latent:
        return KVFormat(only.pop() if only in ({"f32"}, {"bf16"}) else "f16")
    return KVFormat("f32" if only == {"f32"} else "int16")


def kv_format_of_layers(spec: DecoderSpec, config: EngineConfig, weight_formats: Sequence[str]) -> tuple[KVFormat, ...]:
    """How each layer's K and V are stored; UsageError for skipped layers that the model does not have."""
    latent = spec.latent is not None
    asked = choose_kv_format(config, weight_formats, latent)
    skipped, numbers = set[int](), {str(layer) for layer in range(spec.num_layers)}
    for name in config.kv_cache_dtype_skip_layers:
        windows = [layer for layer in range(spec.num_layers) if spec.window(layer)]
        if name == SLIDING_WINDOW and windows:
            skipped.update(windows)
        elif name in numbers:
            skipped.add(int(name))
        else:
            raise UsageError(
                f"--kv-cache-dtype-skip-layers names `{name if len(name) <= 40 else name[:40] + '...'}`",
                f"this model's layers are 0 to {spec.num_layers - 1}"
                + (f", and `{SLIDING_WINDOW}` stands for {len(windows)} of them" if windows else ", none has a window"),
            )
    whole = choose_kv_format(msgspec.structs.replace(config, kv_cache_dtype="auto"), weight_formats, latent)
    if skipped and whole == asked:
        raise UsageError(
            f"--kv-cache-dtype-skip-layers has no effect: all layers are stored in {whole.kind} in any case",
            "leave it out, or ask for another format with `--kv-cache-dtype`",
        )
    return tuple(whole if layer in skipped else asked for layer in range(spec.num_layers))


def kv_bytes_per_token(spec: DecoderSpec, *formats: KVFormat) -> int:
    """Bytes of K and V of one token in all layers, scales included: of one format, or one for each layer."""
    each = formats * spec.num_layers if len(formats) == 1 else formats
    return sum(kv_layer_bytes(spec, kv) for kv in each)


def memory_budget(
    spec: DecoderSpec,
    weight_bytes: int,
    weight_formats: Sequence[str],
    config: EngineConfig,
    available_bytes: int,
    draft: ModelSize | None = None,
    *,
    split_windows: bool = True,
) -> MemoryBudget:
    """The budget of this model under these options; bytes and formats of the weights are those of the packed ones.

    A draft model has weights, workspace and an own part of each KV block beside it.

    The KV pool is as large as asked, else what `max_num_seqs` sequences of full length need, at least one sequence of
    full length. In between it takes at most a quarter of the memory left after weights, workspace and reserve; with
    `gpu_memory_utilization` all that this share of the available memory leaves. Layers with a window share pools of
    their own if `split_windows`. Raises CapacityError if that does not fit, UsageError if the size of the pool is given
    twice.
    """
    length = config.max_model_len or spec.context_length
    if length > spec.context_length:
        raise CapacityError(
            f"--max-model-len is {length}, the model's context is {spec.context_length} tokens",
            f"use at most `--max-model-len {spec.context_length}`, or stretch the context with `--rope-scaling`",
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
    kv = choose_kv_format(config, weight_formats, spec.latent is not None)
    formats = kv_format_of_layers(spec, config, weight_formats)
    _check_latents(spec, formats, config, "this model")
    groups = kv_groups(spec, formats, length, config.block_size, split_windows)
    pools = Pools(groups, length, config, 0 if share is None else share.kv_bytes_per_token)
    num_blocks = _pool_blocks(config, length, room, pools, kv, demand)
    tier_blocks, windows = _tier_blocks(config, groups, length)
    return MemoryBudget(
        available=available_bytes,
        weights=weight_bytes,
        workspace=workspace,
        reserve=reserve,
        kv_format=kv.kind,
        groups=tuple(
            msgspec.structs.replace(group, tier_blocks=count)
            for group, count in zip(pools.sized(num_blocks), (0, *windows), strict=True)
        ),
        step_blocks=pools.step_blocks,
        block_size=config.block_size,
        max_model_len=length,
        kv_formats=tuple(form.kind for form in formats),
        tier_blocks=tier_blocks,
        draft=share,
    )


def _tier_blocks(config: EngineConfig, groups: Sequence[KVGroup], length: int) -> tuple[int, tuple[int, ...]]:
    """Blocks that the swap space takes: of the layers that keep everything, and of each group with a window.

    Of those as many as sequences of a typical length, a quarter of the longest, hold beside the first. UsageError if
    it takes none.
    """
    typical = blocks_for(-(-length // 4), config.block_size)
    shares = [group.blocks_of(-(-length // 4), config.block_size) / typical for group in groups[1:]]
    per_token = [group.bytes_per_token for group in groups]
    block = sum(size * share for size, share in zip(per_token, (1.0, *shares))) * config.block_size
    blocks = int(config.swap_space * (1 << 30) / max(block, 1))
    if config.swap_space and not blocks:
        raise UsageError(
            f"--swap-space is {format_bytes(int(config.swap_space * (1 << 30)))}, one KV block of {config.block_size} "
            f"tokens has {format_bytes(math.ceil(block))}",
            "give it at least some hundred blocks, or use `--swap-space 0`",
        )
    return blocks, tuple(int(blocks * share) for share in shares)


def _draft_share(draft: ModelSize, config: EngineConfig, length: int) -> DraftShare:
    kv = choose_kv_format(config, draft.weight_formats, draft.spec.latent is not None)
    _check_latents(draft.spec, (kv,), config, "the draft model")
    own = msgspec.structs.replace(config, speculative_config=NO_SPECULATION)  # one row of logits for each sequence
    workspace = workspace_bytes(draft.spec, own, length)
    return DraftShare(draft.weight_bytes, workspace, kv.kind, kv_bytes_per_token(draft.spec, kv))


def _check_latents(spec: DecoderSpec, formats: Sequence[KVFormat], config: EngineConfig, whose: str) -> None:
    if spec.latent is not None and any(each.bytes_per_value == 1 or each.scale_bytes for each in formats):
        raise UsageError(
            f"--kv-cache-dtype is {config.kv_cache_dtype}, the latents of {whose} are floats of 16 bits or more",
            "use `--kv-cache-dtype float16`",
        )


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
    if spec.latent is not None:
        row += latent_row_bytes(spec.num_heads, spec.latent.kv_rank + spec.latent.rope_dim)
    logits = -(-spec.vocab_size // PANEL) * PANEL
    sequence = 4 * (length + blocks_for(length, config.block_size))
    rope = (1 if spec.rope_local is None else 2) * length * spec.head_dim * 4
    per_sequence = config.max_num_seqs * sequence + config.max_logit_rows * 4 * logits
    return config.max_num_batched_tokens * row + per_sequence + rope


class Pools:
    """How the pools of all groups grow together, by the blocks of the first.

    Where there is one sequence's worth of it, the others have what that sequence needs while it is prefilled. From
    twice that on they have what sequences of a typical length, a quarter of the longest, hold beside it, so that all
    groups run out at once; and never more than all sequences need.
    """

    def __init__(self, groups: tuple[KVGroup, ...], length: int, config: EngineConfig, beside: int = 0) -> None:
        """`beside` are the bytes of a token that another model keeps in blocks of the first group's numbers."""
        self._groups = groups
        self._beside = beside
        self._block_size = config.block_size
        self.one = blocks_for(length, config.block_size)
        self.most = config.max_num_seqs * self.one
        self.step_blocks = blocks_for(config.max_num_batched_tokens * config.async_depth, config.block_size)
        self._typical = blocks_for(-(-length // 4), config.block_size)
        self._limits = tuple(
            (
                group.blocks_of(length // 4, config.block_size),
                min(self.one, group.blocks_of(length, config.block_size) + self.step_blocks),
                config.max_num_seqs * group.blocks_of(length, config.block_size) + self.step_blocks,
            )
            for group in groups[1:]
        )

    def sized(self, num_blocks: int) -> tuple[KVGroup, ...]:
        """All groups, the first with so many blocks."""
        beyond = max(0, num_blocks - self.one)
        rest = [
            min(
                max(least, -(-num_blocks * share // self._typical)),
                least + -(-2 * beyond * share // self._typical),
                max(least, num_blocks),
                most,
            )
            for share, least, most in self._limits
        ]
        return tuple(
            msgspec.structs.replace(group, num_blocks=count)
            for group, count in zip(self._groups, (num_blocks, *rest), strict=True)
        )

    def bytes(self, num_blocks: int) -> int:
        """What they take then."""
        own = sum(each.num_blocks * each.bytes_per_token for each in self.sized(num_blocks))
        return (own + num_blocks * self._beside) * self._block_size

    def fitting(self, room: int) -> int:
        """The most blocks of the first group with which all fit into so many bytes; 0 if none do."""
        if not self._groups[0].bytes_per_token + self._beside and self.bytes(self.most) <= room:
            return self.most
        low, high = 0, 1 << 40
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bytes(middle) <= room else (low, middle)
        return low


def _pool_blocks(config: EngineConfig, length: int, room: int, pools: Pools, kv: KVFormat, demand: Demand) -> int:
    """KV blocks of the first group, checked against the room for all pools and the length of one sequence."""
    one = pools.one
    most = pools.fitting(room)
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
    asked = config.num_gpu_blocks_override or pools.fitting(config.kv_cache_memory_bytes)
    if config.num_gpu_blocks_override or config.kv_cache_memory_bytes:
        if asked < one:
            needed = pools.bytes(one)
            hint = f"use at least {one} blocks, which is {format_bytes(needed)} ({needed} bytes)"
            raise CapacityError(
                f"a KV cache of {asked} blocks holds {asked * config.block_size} tokens, "
                f"one sequence may have {length}",
                hint + (f", or `--max-model-len {asked * config.block_size}`" if asked else ""),
            )
        if pools.bytes(asked) > room:
            raise demand.refused(
                f"a KV cache of {asked} blocks needs {format_bytes(pools.bytes(asked))}, {format_bytes(room)} are free",
                f"{most} blocks fit" if most >= one else _shorter(config, most, room, pools.bytes(one), kv),
                pools.bytes(asked),
            )
        return asked
    if one > most:
        raise demand.refused(
            f"one sequence of {length} tokens needs {format_bytes(pools.bytes(one))} of KV cache, "
            f"{format_bytes(room)} are free",
            _shorter(config, most, room, pools.bytes(one), kv),
            pools.bytes(one),
        )
    return max(one, min(pools.most, most if config.gpu_memory_utilization else pools.fitting(room // POOL_SHARE)))


def _shorter(config: EngineConfig, most: int, room: int, needed: int, kv: KVFormat) -> str:
    """The smallest change after which one sequence, which needs so many bytes, fits."""
    hints = [f"use `--max-model-len {most * config.block_size}`"] if most else []
    for name, smaller in (("float16", KVFormat("f16")), ("fp8", KVFormat("fp8_e4m3"))):
        times = kv.bytes_per_value // smaller.bytes_per_value
        if times > 1 and needed // times <= room:
            hints.append(f"use `--kv-cache-dtype {name}`, which needs {format_bytes(needed // times)}")
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
