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

from ..kernels.device import default_threads
from ..kernels.errors import CapacityError, LlmctlError, UsageError
from ..kernels.formats import KVFormat
from .config import NO_SPECULATION, EngineConfig
from .kv_choice import check_latents, choose_kv_format, kv_bytes_per_token, kv_format_of_layers
from .kv_groups import KVGroup, kv_groups
from .models.arch import DecoderSpec
from .pools import Pools, blocks_for
from .shortage import Demand
from .sizes import format_bytes
from .workspace import steering_bytes, workspace_bytes

# The KV pool takes this share of what weights and workspace leave, unless all sequences need less or one needs more. A
# CPU's memory is everybody's: a pool of most of it, as on a GPU, would push other programs into swap.
POOL_SHARE = 4

# Python, the tokenizer and the mapped libraries, and what the rest of the machine may ask for meanwhile.
MIN_RESERVE = 256 << 20
RESERVE_SHARE = 20

MOST_PERCENT = 95  # of the memory that an engine should be told to take


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

    workspace   activations of one step, logits, rope tables, what is kept per sequence and the kernels' own memory
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
    config = msgspec.structs.replace(config, threads=config.threads or default_threads())
    asked = _Asked(spec, weight_bytes, tuple(weight_formats), available_bytes, draft, split_windows)
    sizes = asked.sized(config)
    if sizes.room <= 0:
        raise sizes.refused(
            f"needs {format_bytes(sizes.weights)} for weights, {format_bytes(sizes.workspace)} for activations and "
            f"{format_bytes(sizes.reserve)} in reserve, {format_bytes(available_bytes)} are available",
            [
                *asked.larger_share(config),
                asked.smaller_steps(config)
                or f"free at least {format_bytes(1 - sizes.room)} of memory, or choose a model with smaller weights",
            ],
        )
    groups = sizes.pools.sized(_pool_blocks(config, asked, sizes))
    tier_blocks, windows = _tier_blocks(config, groups, sizes.length)
    return MemoryBudget(
        available=available_bytes,
        weights=sizes.weights,
        workspace=sizes.workspace,
        reserve=sizes.reserve,
        kv_format=sizes.kv.kind,
        groups=tuple(
            msgspec.structs.replace(group, tier_blocks=count)
            for group, count in zip(groups, (0, *windows), strict=True)
        ),
        step_blocks=sizes.pools.step_blocks,
        block_size=config.block_size,
        max_model_len=sizes.length,
        kv_formats=tuple(form.kind for form in sizes.formats),
        tier_blocks=tier_blocks,
        draft=sizes.share,
    )


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What some options make of the memory, before the KV pool has its size; `room` is what is left for it."""

    length: int
    available: int
    weights: int
    workspace: int
    reserve: int
    kv: KVFormat
    formats: tuple[KVFormat, ...]
    pools: Pools
    share: DraftShare | None
    utilization: float

    @property
    def room(self) -> int:
        return self.available - self.weights - self.workspace - self.reserve

    def refused(self, message: str, hints: Sequence[str], kv: int = 0) -> CapacityError:
        """The error with these figures; `kv` are the bytes of a KV cache that does not fit."""
        demand = Demand(self.available, self.weights, self.workspace, self.reserve, self.utilization)
        return demand.refused(message, ", or ".join(filter(None, hints)), kv)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A model on a machine, to be sized under one set of options or another: hints name what was tried."""

    spec: DecoderSpec
    weight_bytes: int
    weight_formats: tuple[str, ...]
    available: int
    draft: ModelSize | None
    split_windows: bool

    def sized(self, config: EngineConfig) -> _Sizes:
        """The sizes under these options. CapacityError for a length that the model does not have."""
        spec = self.spec
        length = config.max_model_len or spec.context_length
        if length > spec.context_length:
            raise CapacityError(
                f"--max-model-len is {length}, the model's context is {spec.context_length} tokens",
                f"use at most `--max-model-len {spec.context_length}`, or stretch the context with `--rope-scaling`",
            )
        share = None if self.draft is None else _draft_share(self.draft, config, length)
        formats = kv_format_of_layers(spec, config, self.weight_formats)
        check_latents(spec, formats, config, "this model")
        groups = kv_groups(spec, formats, length, config.block_size, self.split_windows)
        workspace = workspace_bytes(spec, config, length, self.weight_formats) + steering_bytes(spec, formats)
        return _Sizes(
            length=length,
            available=self.available,
            weights=self.weight_bytes + (0 if share is None else share.weights),
            workspace=workspace + (0 if share is None else share.workspace),
            reserve=_reserve(config, self.available),
            kv=choose_kv_format(config, self.weight_formats, spec.latent is not None),
            formats=formats,
            pools=Pools(groups, length, config, 0 if share is None else share.kv_bytes_per_token),
            share=share,
            utilization=config.gpu_memory_utilization,
        )

    def fits(self, config: EngineConfig) -> bool:
        """Whether there is a budget under these options."""
        try:
            sizes = self.sized(config)
        except LlmctlError:
            return False
        pools, given = sizes.pools, _given_blocks(config, sizes.pools)
        blocks = pools.one if given is None else given
        return sizes.room > 0 and blocks >= pools.one and pools.bytes(blocks) <= sizes.room

    def longest(self, config: EngineConfig, *, with_pool: bool = False) -> int:
        """Blocks of the longest `max_model_len` below what is asked that fits; `with_pool` in as many blocks."""
        size = config.block_size

        def shorter(blocks: int) -> EngineConfig:
            found = msgspec.structs.replace(config, max_model_len=blocks * size)
            if with_pool:
                found = msgspec.structs.replace(found, num_gpu_blocks_override=blocks, kv_cache_memory_bytes=0)
            return found

        low, high = 0, blocks_for(config.max_model_len or self.spec.context_length, size)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(shorter(middle)) else (low, middle)
        return low

    def shorter(self, config: EngineConfig, sizes: _Sizes) -> list[str]:
        """The smallest changes after each of which one sequence fits."""
        longest = self.longest(config)
        hints = [f"use `--max-model-len {longest * config.block_size}`"] if longest else []
        for name in ("float16", "fp8"):
            smaller = msgspec.structs.replace(config, kv_cache_dtype=name)
            narrower = choose_kv_format(smaller, ()).bytes_per_value < sizes.kv.bytes_per_value
            if narrower and self.fits(smaller):
                needed = self.sized(smaller).pools.bytes(sizes.pools.one)
                hints.append(f"use `--kv-cache-dtype {name}`, which needs {format_bytes(needed)}")
                break
        return hints or ["free memory, or choose a smaller model"]

    def smaller_pool(self, config: EngineConfig) -> list[str]:
        """The largest pool that one sequence fills and that fits, where the one asked for does not."""
        blocks = self.longest(config, with_pool=True)
        length = blocks * config.block_size
        said = f"use `--num-gpu-blocks-override {blocks}` and `--max-model-len {length}`"
        return [said if blocks else "free memory, or choose a smaller model"]

    def smaller_steps(self, config: EngineConfig) -> str:
        """The step size with which all fits, or one sequence of a length that is named; "" if there is none."""
        tokens, short = config.max_num_batched_tokens, ""
        while tokens > 1:
            tokens //= 2
            smaller = msgspec.structs.replace(config, max_num_batched_tokens=tokens)
            if self.fits(smaller):
                return f"use `--max-num-batched-tokens {tokens}`"
            if not short and (blocks := self.longest(smaller)):
                length = blocks * config.block_size
                short = f"use `--max-num-batched-tokens {tokens}` and `--max-model-len {length}`"
        return short

    def larger_share(self, config: EngineConfig) -> list[str]:
        """The share of the memory with which all fits, where the one that is given does not."""
        for percent in range(math.ceil(100 * config.gpu_memory_utilization + 1e-9), MOST_PERCENT + 1):
            if config.gpu_memory_utilization and self.fits(
                msgspec.structs.replace(config, gpu_memory_utilization=percent / 100)
            ):
                return [f"use `--gpu-memory-utilization {percent / 100:g}`"]
        return []


def _tier_blocks(config: EngineConfig, groups: Sequence[KVGroup], length: int) -> tuple[int, tuple[int, ...]]:
    """Blocks that the swap space takes: of the layers that keep everything, and of each group with a window.

    Of those as many as sequences of a typical length, a quarter of the longest, hold beside the first. UsageError if
    it takes none.
    """
    typical = -(-length // 4)
    own = [group.blocks_of(typical, config.block_size) / blocks_for(typical, config.block_size) for group in groups]
    block = sum(group.bytes_per_token * share for group, share in zip(groups, own)) * config.block_size
    blocks = int(config.swap_space * (1 << 30) / max(block, 1))
    if config.swap_space and not blocks:
        raise UsageError(
            f"--swap-space is {format_bytes(int(config.swap_space * (1 << 30)))}, one KV block of {config.block_size} "
            f"tokens has {format_bytes(math.ceil(block))}",
            "give it at least some hundred blocks, or use `--swap-space 0`",
        )
    return blocks, tuple(int(blocks * share) for share in own[1:])


def _draft_share(draft: ModelSize, config: EngineConfig, length: int) -> DraftShare:
    kv = choose_kv_format(config, draft.weight_formats, draft.spec.latent is not None)
    check_latents(draft.spec, (kv,), config, "the draft model")
    own = msgspec.structs.replace(config, speculative_config=NO_SPECULATION)  # one row of logits for each sequence
    steering = steering_bytes(draft.spec, (kv,) * draft.spec.num_layers)
    workspace = workspace_bytes(draft.spec, own, length, draft.weight_formats) + steering
    return DraftShare(draft.weight_bytes, workspace, kv.kind, kv_bytes_per_token(draft.spec, kv))


def _reserve(config: EngineConfig, available_bytes: int) -> int:
    if config.gpu_memory_utilization:
        return max(MIN_RESERVE, available_bytes - int(available_bytes * config.gpu_memory_utilization))
    return max(MIN_RESERVE, available_bytes // RESERVE_SHARE)


def _given_blocks(config: EngineConfig, pools: Pools) -> int | None:
    """The blocks of the first group that the user asked for, in blocks or bytes; None: chosen here."""
    if config.num_gpu_blocks_override:
        return config.num_gpu_blocks_override
    return pools.fitting(config.kv_cache_memory_bytes) if config.kv_cache_memory_bytes else None


def _pool_blocks(config: EngineConfig, asked: _Asked, sizes: _Sizes) -> int:
    """KV blocks of the first group, checked against the room for all pools and the length of one sequence."""
    pools, room = sizes.pools, sizes.room
    one, most = pools.one, pools.fitting(room)
    named = {
        "--num-gpu-blocks-override": config.num_gpu_blocks_override,
        "--kv-cache-memory-bytes": config.kv_cache_memory_bytes,
        "--gpu-memory-utilization": config.gpu_memory_utilization,
    }
    both = [f"{name} {size:g}" if isinstance(size, float) else f"{name} {size}" for name, size in named.items() if size]
    if len(both) > 1:
        raise UsageError(f"{' and '.join(both)} both size the KV cache", "give one of them")
    given = _given_blocks(config, pools)
    if given is None:
        if one > most:
            raise sizes.refused(
                f"one sequence of {sizes.length} tokens needs {format_bytes(pools.bytes(one))} of KV cache, "
                f"{format_bytes(room)} are free",
                [*asked.larger_share(config), *asked.shorter(config, sizes)],
                pools.bytes(one),
            )
        return max(one, min(pools.most, most if config.gpu_memory_utilization else pools.fitting(room // POOL_SHARE)))
    if given < one:
        needed, longest = pools.bytes(one), asked.longest(config)
        hints = [
            f"use at least {one} blocks, which is {format_bytes(needed)} ({needed} bytes)" if needed <= room else "",
            f"`--max-model-len {longest * config.block_size}`" if longest else "",
        ]
        raise CapacityError(
            f"a KV cache of {given} blocks holds {given * config.block_size} tokens, "
            f"one sequence may have {sizes.length}",
            ", or ".join(filter(None, hints)) or asked.smaller_pool(config)[0],
        )
    if pools.bytes(given) > room:
        raise sizes.refused(
            f"a KV cache of {given} blocks needs {format_bytes(pools.bytes(given))}, {format_bytes(room)} are free",
            [f"{most} blocks fit"] if most >= one else asked.smaller_pool(config),
            pools.bytes(given),
        )
    return given
