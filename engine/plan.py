"""`Plan`: what will run, resolved once from what was asked, the model and the machine.

Every choice that can change a bit of a result is in here, and `fingerprint` is the hash of those.
"""

from __future__ import annotations

import hashlib

import msgspec

from ..kernels import registry
from ..kernels.cuda.devices import free_memory
from ..kernels.cuda.driver import DeviceInfo
from ..kernels.cuda.jit import architecture
from ..kernels.device import default_threads, read_machine
from ..kernels.errors import UsageError
from .budget import MemoryBudget, ModelSize, memory_budget
from .config import ATTENTION_COMPUTE, NO_SPECULATION, EngineConfig, SpeculativeConfig, environment
from .device import settle
from .gpu_types import activation_type, gpu_weight_bytes
from .kv_groups import KVGroup
from .load.model import Model
from .models.arch import DecoderSpec, RopeSpec
from .models.rope import settled
from .schedule.pace import PaceConfig


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A resolved EngineConfig.

    `activations` is the type that a GPU computes in, f32 on a CPU.
    `max_logit_rows` bounds the rows that get logits in one step; `draft` is the plan of the draft model, which has the
    blocks, slots and positions of this one.
    """

    model: str
    digest: str
    isa: str
    bits: str
    model_impl: str
    kernels: str
    attention_compute: str
    device: str
    activations: str
    enforce_eager: bool
    deterministic: bool
    jit: bool
    threads: int
    weight_formats: tuple[str, ...]
    ropes: tuple[RopeSpec, ...]
    kv_format: str
    kv_formats: tuple[str, ...]
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
    draft: Plan | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU runs it; a draft model is where its target is."""
        return self.device != "cpu"

    @property
    def num_blocks(self) -> int:
        """Blocks of the group that keeps every position."""
        return self.groups[0].num_blocks

    @property
    def fingerprint(self) -> str:
        """Two engines with the same fingerprint give the same bits."""
        same_bits = (
            *(self.digest, self.model_impl, self.isa, self.bits, self.weight_formats, self.kv_formats),
            *(self.ropes, self.attention_compute, registry.build_id()),
        )
        return "llmctl-" + hashlib.sha256(msgspec.json.encode(same_bits)).hexdigest()[:16]


def resolve(
    config: EngineConfig, model: Model, draft: Model | None = None, *, split_windows: bool = True
) -> tuple[Plan, MemoryBudget]:
    """The plan for this model on this machine, and the memory budget that sized its KV pool; both count `draft` in.

    Who drives a runner without a scheduler, which would free what windows have passed, does without `split_windows`.
    Raises UsageError for options that contradict the model, CapacityError when it does not fit.
    """
    config.check()
    config, gpu = settle(config, model.implementation)
    if gpu is None and config.kernels != registry.CUDA and config.attention_compute not in ("auto", "float32"):
        raise UsageError(
            f"--attention-compute is `{config.attention_compute}`, and attention runs on the CPU, in float32",
            "leave it out, or run on a GPU",
        )
    threads = config.threads or default_threads()
    formats = model.weight_formats
    beside = None if draft is None else ModelSize(draft.spec, _weight_bytes(draft, gpu), draft.weight_formats)
    available = read_machine().memory_available if gpu is None else free_memory(gpu)[0]
    budget = memory_budget(
        model.spec, _weight_bytes(model, gpu), formats, config, available, beside, split_windows=split_windows
    )
    activations = "f32" if gpu is None else activation_type(formats)
    if model.spec.latent is not None and ATTENTION_COMPUTE[config.attention_compute] not in ("", activations):
        raise UsageError(
            f"--attention-compute is `{config.attention_compute}`, and attention on latents multiplies in the type of "
            f"its activations, here {activations}",
            "leave it out",
        )
    if gpu is None:
        isa, bits = registry.configure(config.kernels, threads)
    else:
        kind = "cuda" if config.deterministic else "cuda-fast"
        isa, bits = architecture(*gpu.capability), f"{kind} {activations} {gpu.processors}"
    plan = Plan(
        model=model.name,
        digest=model.digest,
        isa=isa,
        bits=bits,
        model_impl=model.implementation,
        kernels=registry.CUDA if gpu is not None else config.kernels,
        attention_compute=ATTENTION_COMPUTE[config.attention_compute],
        device=config.device,
        activations=activations,
        enforce_eager=config.enforce_eager,
        deterministic=config.deterministic,
        jit=config.jit,
        threads=threads,
        weight_formats=formats,
        ropes=_ropes(model.spec, budget.max_model_len),
        kv_format=budget.kv_format,
        kv_formats=budget.kv_formats,
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
        async_depth=config.depth,
        tier_blocks=budget.tier_blocks,
        tier_folder=str(environment().cache / "swap"),
        bytes_per_block=budget.swapped_bytes_per_block,
        preemption_mode=config.preemption_mode,
        speculation=config.speculative_config,
    )
    return (plan if draft is None else _with_draft(plan, draft, budget)), budget


def _weight_bytes(model: Model, gpu: DeviceInfo | None) -> int:
    if gpu is None:
        return model.weight_bytes
    return gpu_weight_bytes(model.spec, model.weight_bytes, model.weight_formats)


def _ropes(spec: DecoderSpec, max_positions: int) -> tuple[RopeSpec, ...]:
    """The model's ropes as sequences of at most so many positions are rotated."""
    ropes = (spec.rope,) if spec.rope_local is None else (spec.rope, spec.rope_local)
    return tuple(settled(rope, spec.rope_dim, max_positions) for rope in ropes)


def _with_draft(plan: Plan, draft: Model, budget: MemoryBudget) -> Plan:
    """The plan with that of the draft model in it. Steps of that one come one by one and sample once in a sequence."""
    assert budget.draft is not None
    own = msgspec.structs.replace(
        plan,
        model=draft.name,
        digest=draft.digest,
        model_impl=draft.implementation,
        activations=plan.activations if not plan.on_gpu else activation_type(draft.weight_formats),
        weight_formats=draft.weight_formats,
        ropes=_ropes(draft.spec, plan.max_model_len),
        kv_format=budget.draft.kv_format,
        kv_formats=(budget.draft.kv_format,) * draft.spec.num_layers,
        groups=(
            KVGroup(
                layers=tuple(range(draft.spec.num_layers)),
                bytes_per_token=budget.draft.kv_bytes_per_token,
                num_blocks=plan.num_blocks,
            ),
        ),
        max_logit_rows=min(plan.max_num_seqs, plan.max_num_batched_tokens),
        async_depth=1,
        tier_blocks=0,
        speculation=NO_SPECULATION,
    )
    return msgspec.structs.replace(plan, draft=own)
