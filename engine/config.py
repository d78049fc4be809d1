"""What was asked (`EngineConfig`), and the few environment variables that the product reads."""

from __future__ import annotations

import difflib
import os
import re
import typing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ..kernels.errors import UsageError
from .rope_scaling import RopeScaling

DEFAULT_MODEL = "SmolLM2-135M-Instruct"  # what runs if nobody names a model; `load/hub.py` knows where it is
POLICIES = ("hybrid", "fcfs", "sjf", "fair", "priority")
FAIR_POLICIES = ("hybrid", "fair")  # those that share the engine between tenants
MAX_WEIGHT = 1e6  # of a tenant, and its reciprocal the least: sums of tokens served stay exact enough
DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_DTYPES = ("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int16")
EVICTIONS = ("lru-k", "lru")
PREEMPTION_MODES = ("auto", "swap", "recompute")
SPECULATIVE_METHODS = ("ngram", "draft_model", "none")
IMPLEMENTATIONS = ("auto", "llmctl", "transformers")
ATTENTION_COMPUTE = {"auto": "", "float32": "f32", "tf32": "tf32", "bfloat16": "bf16", "float16": "f16"}
KERNELS = ("auto", "amx", "avx512", "avx2", "generic", "reference")


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are guessed ahead, to be verified together. It changes how fast tokens come, never which.

    method                  ngram: what followed the same n-gram earlier in the prompt or the answer; draft_model: what
                            `model`, a smaller one of the same vocabulary, would say; none: not at all
    model                   the draft model, named as any model is
    num_speculative_tokens  guesses for one sequence at most, fewer as they fail
    disable_by_batch_size   no guesses are made while more sequences than this run. 0 chooses: 4 with a draft model;
                            `num_speculative_tokens` with ngram, and those that run share as many guesses
    prompt_lookup_max       longest n-gram that is looked up, and `prompt_lookup_min` the shortest
    """

    method: str = "ngram"
    model: str = ""
    num_speculative_tokens: int = 3
    disable_by_batch_size: int = 0
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2

    @property
    def max_sequences(self) -> int:
        """Sequences that may run while guesses are made."""
        chosen = DRAFTED_SEQUENCES if self.method == "draft_model" else self.num_speculative_tokens
        return self.disable_by_batch_size or chosen

    @property
    def max_rows(self) -> int:
        """Rows with logits of a step that holds guesses: a row for each sequence, and one for each guess."""
        if self.method == "none":
            return 0
        shared = self.method == "ngram" and not self.disable_by_batch_size
        return 1 + self.num_speculative_tokens if shared else self.max_sequences * (1 + self.num_speculative_tokens)

    @classmethod
    def read(cls, given: object) -> SpeculativeConfig:
        """The checked config that a mapping of these names gives, as JSON has it. UsageError for what it cannot be.

        One that names a model and no method means a draft model.
        """
        known = cls.__struct_fields__
        if isinstance(given, dict):
            for name in given:
                if name not in known:
                    near = difflib.get_close_matches(str(name), known, n=1)
                    hint = f"did you mean `{near[0]}`?" if near else f"it has: {', '.join(known)}"
                    raise UsageError(f"--speculative-config has no key `{name}`", hint)
            if given.get("model") and "method" not in given:
                given = {**given, "method": "draft_model"}
        try:
            config = msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise UsageError(
                f"--speculative-config cannot be {given!r}: {error}", f"its keys are: {', '.join(known)}"
            ) from error
        config.check()
        return config

    def __str__(self) -> str:
        """As it is written on the command line: what decides most, and what is not the default."""
        values = zip(self.__struct_fields__, self.__struct_defaults__, msgspec.structs.astuple(self), strict=True)
        always = ("method", "num_speculative_tokens")
        said = {name: value for name, default, value in values if value != default or name in always}
        return msgspec.json.encode(said).decode()

    def check(self) -> None:
        """Raise UsageError for the first value that cannot work."""
        _check_kinds(self)
        if self.method not in SPECULATIVE_METHODS:
            raise UsageError(
                f"the method of --speculative-config is `{self.method}`",
                f"choose one of: {', '.join(SPECULATIVE_METHODS)}",
            )
        if self.method == "draft_model" and not self.model:
            raise UsageError(
                "the method of --speculative-config is `draft_model`, and it names no model",
                """write it as '{"method": "draft_model", "model": "NAME", "num_speculative_tokens": 3}'""",
            )
        if self.model and self.method != "draft_model":
            raise UsageError(
                f"--speculative-config names the model `{self.model}`, which its method `{self.method}` does not use",
                "use the method `draft_model`, or leave the model out",
            )
        self._check_meaning()
        for name, value, low, high in (
            ("num_speculative_tokens", self.num_speculative_tokens, 1, 64),
            ("disable_by_batch_size", self.disable_by_batch_size, 0, 4096),
            ("prompt_lookup_min", self.prompt_lookup_min, 1, 64),
            ("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min, 64),
        ):
            if not low <= value <= high:
                raise UsageError(f"{name} of --speculative-config is {value}, it must be from {low} to {high}")

    def _check_meaning(self) -> None:
        """Raise UsageError for the first key that says something and that the method does not use."""
        used = _USED[self.method]
        for name, default in zip(self.__struct_fields__, self.__struct_defaults__, strict=True):
            if name not in used and getattr(self, name) != default:
                raise UsageError(
                    f"`{name}` of --speculative-config has no meaning for the method `{self.method}`", "leave it out"
                )


_USED = {
    "none": ("method",),
    "draft_model": ("method", "model", "num_speculative_tokens", "disable_by_batch_size"),
    "ngram": SpeculativeConfig.__struct_fields__,
}
DRAFTED_SEQUENCES = 4  # that a draft model works for at once, if nothing else is asked: enough to fill two cores
NO_SPECULATION = SpeculativeConfig(method="none")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engine options as the user gives them. 0 or "auto" means: choose. Flags have the same names with dashes.

    dtype                   auto keeps weights as stored; a float type converts all of them at load
    kv_cache_dtype          auto: float32 for float32 weights, else int16; fp8 is fp8_e4m3
    kv_cache_dtype_skip_layers  layers whose K and V stay as `auto` would store them: numbers from 0, or sliding_window
                            for all that have one
    cache_eviction          lru-k forgets the block whose K-th last use (`cache_eviction_k`) is oldest, so that content
                            used once does not push out what is used again and again; lru looks at the last use alone
    rope_scaling            another rotary embedding than the model's, which may make its context longer
    num_gpu_blocks_override KV blocks in the pool instead of what the memory budget gives (the flag's name is vLLM's);
                            pools of layers with a window follow
    gpu_memory_utilization  share of the available memory, on any device, that weights, workspace and KV pool may take
                            together; 0: a quarter of what the first two leave goes to the pool
    tenant_weights          shares of tenants (API keys, or `user`) in the fair queue; 1 for who is not named
    itl_target_ms           pause between tokens that prompts beside decodes may cause; 0: three times a step of decodes
    max_prefill_tokens_beside_decode  prompt tokens of a step with decodes, whatever they cost; 0: as the target allows
    swap_space              GiB of disk for blocks that the KV pool has no room for (tier 2 of the prefix cache)
    preemption_mode         what a preempted sequence comes back by: swap (its blocks are in swap_space), recompute
                            (they are computed again), or auto: the cheaper, as measured
    seed                    not 0: requests that name no seed get the next of a series made from this one
    model_impl              llmctl is our own decoder, transformers its modules on our cache and kernels; auto takes
                            transformers for what our decoder does not know
    attention_compute       what attention multiplies in on a GPU, whatever the type of activations: float32, tf32,
                            bfloat16, float16, or auto for what loses nothing; a CPU always computes in float32
    device                  cpu, cuda (the first GPU), cuda:1 and so on, or auto: a GPU that can be used, else the CPU
    enforce_eager           on a GPU: launch every kernel of every step, instead of replaying captured graphs of decodes
    deterministic           on a GPU: a request has the same bits in any company, as it always has on a CPU
    jit                     compile kernels of a GPU that are not compiled yet; without it such a kernel is an error
    cache_audit             share of the requests with a prefix hit whose prompt is computed again, to compare the bits
    async_depth             steps in flight; 2 overlaps scheduling with computing and gives the tokens of 1. 0: 2 on a
                            GPU, where launching overlaps too, else 1
    """

    model: str = ""
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: tuple[str, ...] = ()
    max_model_len: int = 0
    rope_scaling: RopeScaling | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    block_size: int = 32
    num_gpu_blocks_override: int = 0
    kv_cache_memory_bytes: int = 0
    gpu_memory_utilization: float = 0.0
    enable_prefix_caching: bool = True
    cache_eviction: str = "lru-k"
    cache_eviction_k: int = 2
    cache_audit: float = 0.0
    swap_space: float = 0.0
    preemption_mode: str = "auto"
    scheduling_policy: str = "hybrid"
    tenant_weights: dict[str, float] = {}
    itl_target_ms: float = 0.0
    max_prefill_tokens_beside_decode: int = 0
    threads: int = 0
    seed: int = 0
    async_depth: int = 0
    device: str = "auto"
    enforce_eager: bool = False
    deterministic: bool = False
    jit: bool = True
    kernels: str = "auto"
    model_impl: str = "auto"
    attention_compute: str = "auto"
    speculative_config: SpeculativeConfig = SpeculativeConfig()

    @property
    def eviction_k(self) -> int:
        """K of the eviction that is asked for; LRU is LRU-1."""
        return 1 if self.cache_eviction == "lru" else self.cache_eviction_k

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU is asked for; see `device.settle` for what `auto` comes to."""
        return self.device.startswith("cuda")

    @property
    def depth(self) -> int:
        """Steps in flight."""
        return self.async_depth or (2 if self.on_gpu else 1)

    @property
    def max_logit_rows(self) -> int:
        """Rows that get logits in one step at most: one for each sequence, or the drafts of a few."""
        return min(max(self.max_num_seqs, self.speculative_config.max_rows), self.max_num_batched_tokens)

    def check(self) -> None:
        """Raise UsageError for the first option whose value cannot work on any machine or model."""
        _check_kinds(self)
        for name, value, choices in (
            ("--dtype", self.dtype, DTYPES),
            ("--kv-cache-dtype", self.kv_cache_dtype, KV_DTYPES),
            ("--cache-eviction", self.cache_eviction, EVICTIONS),
            ("--preemption-mode", self.preemption_mode, PREEMPTION_MODES),
            ("--scheduling-policy", self.scheduling_policy, POLICIES),
            ("--kernels", self.kernels, KERNELS),
            ("--model-impl", self.model_impl, IMPLEMENTATIONS),
            ("--attention-compute", self.attention_compute, ATTENTION_COMPUTE),
        ):
            if value not in choices:
                raise UsageError(f"{name} is `{value}`", f"choose one of: {', '.join(choices)}")
        if not 8 <= self.block_size <= 512 or self.block_size & (self.block_size - 1):
            raise UsageError(f"--block-size is {self.block_size}", "use a power of two from 8 to 512")
        for name, number, low, high in (
            ("--max-num-seqs", self.max_num_seqs, 1, 4096),
            ("--max-num-batched-tokens", self.max_num_batched_tokens, 1, 1 << 20),
            ("--num-gpu-blocks-override", self.num_gpu_blocks_override, 0, 1 << 30),
            ("--kv-cache-memory-bytes", self.kv_cache_memory_bytes, 0, 1 << 50),
            ("--max-model-len", self.max_model_len, 0, 1 << 24),
            ("--cache-eviction-k", self.cache_eviction_k, 1, 16),
            ("--threads", self.threads, 0, 1024),
            ("--async-depth", self.async_depth, 0, 2),
            ("--max-prefill-tokens-beside-decode", self.max_prefill_tokens_beside_decode, 0, 1 << 20),
        ):
            if not low <= number <= high:
                raise UsageError(f"{name} is {number}, it must be from {low} to {high}")
        if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise UsageError(f"--device is `{self.device}`", "choose auto, cpu, cuda, or one of several GPUs: cuda:1")
        if not 0 <= self.gpu_memory_utilization <= 1:
            raise UsageError(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization:g}, it must be from 0 to 1",
                "0.9 lets the engine have nine tenths of the available memory",
            )
        if not 0 <= self.itl_target_ms < 1e9:
            raise UsageError(f"--itl-target-ms is {self.itl_target_ms:g}, it must be 0 or more milliseconds")
        if self.itl_target_ms and self.max_prefill_tokens_beside_decode:
            raise UsageError(
                f"--itl-target-ms is {self.itl_target_ms:g} and --max-prefill-tokens-beside-decode "
                f"{self.max_prefill_tokens_beside_decode}",
                "give one of them: a time or a count",
            )
        for tenant, weight in self.tenant_weights.items():
            if not 1 / MAX_WEIGHT <= weight <= MAX_WEIGHT:
                raise UsageError(
                    f"the weight of tenant `{tenant}` is {weight:g}, "
                    f"it must be from {1 / MAX_WEIGHT:g} to {MAX_WEIGHT:g}",
                    "only the ratio of --tenant-weights matters: make them closer",
                )
        if self.tenant_weights and self.scheduling_policy not in FAIR_POLICIES:
            raise UsageError(
                f"--tenant-weights has no effect with --scheduling-policy {self.scheduling_policy}",
                f"use one of: {', '.join(FAIR_POLICIES)}",
            )
        if not 0 <= self.cache_audit <= 1:
            raise UsageError(f"--cache-audit is {self.cache_audit}, it must be from 0 to 1")
        self._check_swap()
        self.speculative_config.check()
        if self.rope_scaling is not None:
            self.rope_scaling.check()

    def _check_swap(self) -> None:
        """Raise UsageError for a swap space that cannot be, or that could not be used."""
        if not 0 <= self.swap_space <= 1 << 20:
            raise UsageError(
                f"--swap-space is {self.swap_space:g} GiB, it must be from 0 to {1 << 20}",
                "4 gives blocks that memory has no room for 4 GiB of disk",
            )
        if self.preemption_mode == "swap" and not self.swap_space:
            raise UsageError("--preemption-mode is `swap`, and there is no swap space", "add `--swap-space 4` (GiB)")
        if self.swap_space and not self.enable_prefix_caching:
            raise UsageError(
                f"--swap-space is {self.swap_space:g} GiB, and there is no prefix cache that would find what is there",
                "leave --no-enable-prefix-caching out, or use `--swap-space 0`",
            )


def _check_kinds(config: SpeculativeConfig | EngineConfig) -> None:
    """Raise UsageError for the first field that is of another type than it says, which Python would not notice."""
    for name, kind in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        try:
            msgspec.convert(value, kind, strict=True)
        except msgspec.ValidationError as error:
            if isinstance(value, bool) and kind in (int, float):
                raise UsageError(f"{name} is {value}, it must be a number") from error
            raise UsageError(f"{name} is {value!r}: {error}".replace(": E", ": e")) from error


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment variables that change what we do, read in one place."""

    model: str  # LLMCTL_MODEL: the model when none is named
    cache: Path  # LLMCTL_CACHE, else XDG_CACHE_HOME/llmctl, else ~/.cache/llmctl
    offline: bool  # HF_HUB_OFFLINE
    api_key: str = field(default="", repr=False)  # LLMCTL_API_KEY: what clients of a server must show


def environment() -> Environment:
    """The environment as it is now."""
    base = os.environ.get("LLMCTL_CACHE")
    if not base:
        base = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "llmctl")
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    return Environment(
        os.environ.get("LLMCTL_MODEL", ""), Path(base), offline, os.environ.get("LLMCTL_API_KEY", "").strip()
    )
