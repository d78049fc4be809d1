"""`Plan`: what will run, resolved once from what was asked, the model and the machine.

Every choice that can change a bit of a result is in here, and `fingerprint` is the hash of those.
"""

from __future__ import annotations

import hashlib

import msgspec

from ..kernels import registry
from ..kernels.device import default_threads, read_machine
from .budget import MemoryBudget, memory_budget
from .config import EngineConfig, SpeculativeConfig, environment
from .kv_groups import KVGroup
from .load.model import Model
from .models.arch import DecoderSpec, RopeSpec
from .models.rope import settled
from .schedule.pace import PaceConfig


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A resolved EngineConfig. `max_logit_rows` bounds the rows that get logits in one step."""

    model: str
    digest: str
    isa: str
    bits: str
    model_impl: str
    kernels: str
    threads: int
    weight_formats: tuple[str, ...]
    ropes: tuple[RopeSpec, ...]
    kv_format: str
    block_size: int
    groups: tuple[KVGroup, ...]
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_logit_rows: int
    enable_prefix_caching: bool
    eviction_k: int
    scheduling_policy: str
    tenant_weights: tuple[tuple[str, float], ...]
    pace: PaceConfig
    async_depth: int
    tier_blocks: int
    tier_folder: str
    bytes_per_block: int
    preemption_mode: str
    speculation: SpeculativeConfig

    @property
    def num_blocks(self) -> int:
        """Blocks of the group that keeps every position."""
        return self.groups[0].num_blocks

    @property
    def fingerprint(self) -> str:
        """Two engines with the same fingerprint give the same bits."""
        same_bits = (
            *(self.digest, self.model_impl, self.isa, self.bits, self.weight_formats, self.kv_format),
            *(self.ropes, registry.build_id()),
        )
        return "llmctl-" + hashlib.sha256(msgspec.json.encode(same_bits)).hexdigest()[:16]


def resolve(config: EngineConfig, model: Model, *, split_windows: bool = True) -> tuple[Plan, MemoryBudget]:
    """The plan for this model on this machine, and the memory budget that sized its KV pool.

    Who drives a runner without a scheduler, which would free what windows have passed, does without `split_windows`.
    Raises UsageError for options that contradict the model, CapacityError when it does not fit.
    """
    config.check()
    threads = config.threads or default_threads()
    formats = model.weight_formats
    available = read_machine().memory_available
    budget = memory_budget(model.spec, model.weight_bytes, formats, config, available, split_windows=split_windows)
    isa, bits = registry.configure(config.kernels, threads)
    plan = Plan(
        model=model.name,
        digest=model.digest,
        isa=isa,
        bits=bits,
        model_impl=model.implementation,
        kernels=config.kernels,
        threads=threads,
        weight_formats=formats,
        ropes=_ropes(model.spec, budget.max_model_len),
        kv_format=budget.kv_format,
        block_size=config.block_size,
        groups=budget.groups,
        max_model_len=budget.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_logit_rows=config.max_logit_rows,
        enable_prefix_caching=config.enable_prefix_caching,
        eviction_k=config.eviction_k,
        scheduling_policy=config.scheduling_policy,
        tenant_weights=tuple(config.tenant_weights.items()),
        pace=PaceConfig(config.max_prefill_tokens_beside_decode, config.itl_target_ms / 1000),
        async_depth=config.async_depth,
        tier_blocks=budget.tier_blocks,
        tier_folder=str(environment().cache / "swap"),
        bytes_per_block=budget.groups[0].bytes_per_token * budget.block_size,
        preemption_mode=config.preemption_mode,
        speculation=config.speculative_config,
    )
    return plan, budget


def _ropes(spec: DecoderSpec, max_positions: int) -> tuple[RopeSpec, ...]:
    """The model's ropes as sequences of at most so many positions are rotated."""
    ropes = (spec.rope,) if spec.rope_local is None else (spec.rope, spec.rope_local)
    return tuple(settled(rope, spec.rope_dim, max_positions) for rope in ropes)
