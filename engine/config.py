"""What was asked (`EngineConfig`), and the few environment variables that the product reads."""

from __future__ import annotations

import difflib
import os
import typing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ..kernels.errors import UsageError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"  # what runs if nobody names a model; `load/hub.py` knows where it is
POLICIES = ("hybrid", "fcfs")
DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_DTYPES = ("auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int16")
EVICTIONS = ("lru-k", "lru")
SPECULATIVE_METHODS = ("ngram", "none")
IMPLEMENTATIONS = ("auto", "llmctl", "transformers")
KERNELS = ("auto", "avx512", "avx2", "generic", "reference")


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are guessed ahead, to be verified together. It changes how fast tokens come, never which.

    method                  ngram: what followed the same n-gram earlier in the prompt or the answer; none: not at all
    num_speculative_tokens  guesses for one sequence at most, fewer as they fail; where 1 + this many sequences or more
                            run, none are made
    prompt_lookup_max       longest n-gram that is looked up, and `prompt_lookup_min` the shortest
    """

    method: str = "ngram"
    num_speculative_tokens: int = 3
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2

    @classmethod
    def read(cls, given: object) -> SpeculativeConfig:
        """The checked config that a mapping of these names gives, as JSON has it. UsageError for what it cannot be."""
        known = cls.__struct_fields__
        if isinstance(given, dict):
            for name in given:
                if name not in known:
                    near = difflib.get_close_matches(str(name), known, n=1)
                    hint = f"did you mean `{near[0]}`?" if near else f"it has: {', '.join(known)}"
                    raise UsageError(f"--speculative-config has no key `{name}`", hint)
        try:
            config = msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise UsageError(
                f"--speculative-config cannot be {given!r}: {error}", f"its keys are: {', '.join(known)}"
            ) from error
        config.check()
        return config

    def __str__(self) -> str:
        """As it is written on the command line."""
        return msgspec.json.encode(self).decode()

    def check(self) -> None:
        """Raise UsageError for the first value that cannot work."""
        _refuse_booleans(self)
        if self.method not in SPECULATIVE_METHODS:
            raise UsageError(
                f"the method of --speculative-config is `{self.method}`",
                f"choose one of: {', '.join(SPECULATIVE_METHODS)}",
            )
        for name, value, low, high in (
            ("num_speculative_tokens", self.num_speculative_tokens, 1, 64),
            ("prompt_lookup_min", self.prompt_lookup_min, 1, 64),
            ("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min, 64),
        ):
            if not low <= value <= high:
                raise UsageError(f"{name} of --speculative-config is {value}, it must be from {low} to {high}")


NO_SPECULATION = SpeculativeConfig(method="none")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Engine options as the user gives them. 0 or "auto" means: choose. Flags have the same names with dashes.

    dtype                   auto keeps weights as stored; a float type converts all of them at load
    kv_cache_dtype          auto: float32 for float32 weights, else int16; fp8 is fp8_e4m3
    cache_eviction          lru-k forgets the block whose K-th last use (`cache_eviction_k`) is oldest, so that content
                            used once does not push out what is used again and again; lru looks at the last use alone
    num_gpu_blocks_override KV blocks in the pool instead of what the memory budget gives (the flag's name is vLLM's)
    gpu_memory_utilization  share of the available memory, on any device, that weights, workspace and KV pool may take
                            together; 0: a quarter of what the first two leave goes to the pool
    seed                    not 0: requests that name no seed get the next of a series made from this one
    model_impl              llmctl is our own decoder, transformers its modules on our cache and kernels; auto takes
                            transformers for what our decoder does not know
    cache_audit             share of the requests with a prefix hit whose prompt is computed again, to compare the bits
    async_depth             steps in flight; 2 overlaps scheduling with computing and gives the tokens of 1
    """

    model: str = ""
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int = 0
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
    scheduling_policy: str = "hybrid"
    threads: int = 0
    seed: int = 0
    async_depth: int = 1
    kernels: str = "auto"
    model_impl: str = "auto"
    speculative_config: SpeculativeConfig = SpeculativeConfig()

    @property
    def eviction_k(self) -> int:
        """K of the eviction that is asked for; LRU is LRU-1."""
        return 1 if self.cache_eviction == "lru" else self.cache_eviction_k

    @property
    def max_logit_rows(self) -> int:
        """Rows that get logits in one step at most: one for each sequence, or the drafts of a few."""
        speculation = self.speculative_config
        drafted = 0 if speculation.method == "none" else 1 + speculation.num_speculative_tokens
        return min(max(self.max_num_seqs, drafted), self.max_num_batched_tokens)

    def check(self) -> None:
        """Raise UsageError for the first option whose value cannot work on any machine or model."""
        _refuse_booleans(self)
        for name, value, choices in (
            ("--dtype", self.dtype, DTYPES),
            ("--kv-cache-dtype", self.kv_cache_dtype, KV_DTYPES),
            ("--cache-eviction", self.cache_eviction, EVICTIONS),
            ("--scheduling-policy", self.scheduling_policy, POLICIES),
            ("--kernels", self.kernels, KERNELS),
            ("--model-impl", self.model_impl, IMPLEMENTATIONS),
        ):
            if value not in choices:
                raise UsageError(f"{name} is `{value}`", f"choose one of: {', '.join(choices)}")
        if not 8 <= self.block_size <= 512 or self.block_size & (self.block_size - 1):
            raise UsageError(f"--block-size is {self.block_size}", "use a power of two from 8 to 512")
        for name, number, low, high in (
            ("--max-num-seqs", self.max_num_seqs, 1, 4096),
            ("--max-num-batched-tokens", self.max_num_batched_tokens, 1, 1 << 20),
            ("--num-gpu-blocks-override", self.num_gpu_blocks_override, 0, 1 << 30),
            ("--max-model-len", self.max_model_len, 0, 1 << 24),
            ("--cache-eviction-k", self.cache_eviction_k, 1, 16),
            ("--threads", self.threads, 0, 1024),
            ("--async-depth", self.async_depth, 1, 2),
        ):
            if not low <= number <= high:
                raise UsageError(f"{name} is {number}, it must be from {low} to {high}")
        if not 0 <= self.gpu_memory_utilization <= 1:
            raise UsageError(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization:g}, it must be from 0 to 1",
                "0.9 lets the engine have nine tenths of the available memory",
            )
        if not 0 <= self.cache_audit <= 1:
            raise UsageError(f"--cache-audit is {self.cache_audit}, it must be from 0 to 1")
        self.speculative_config.check()


def _refuse_booleans(config: SpeculativeConfig | EngineConfig) -> None:
    """Raise UsageError for a number given as True or False, which Python takes for 1 and 0."""
    for name, kind in typing.get_type_hints(type(config)).items():
        if kind in (int, float) and isinstance(getattr(config, name), bool):
            raise UsageError(f"{name} is {getattr(config, name)}, it must be a number")


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
