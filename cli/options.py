"""The options that several commands share, and the records that they become.

`EngineOptions` stands on every command that runs the engine, `SamplingOptions` on every command that generates, and
`MemoryOptions`, a part of the engine's, on those that only say what it would take. Names are those of vLLM; aliases are
what users of other engines type.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import typer

from ..engine.config import POLICIES, SPECULATIVE_METHODS, EngineConfig, SpeculativeConfig
from ..engine.request import SamplingParams
from ..engine.rope_scaling import EXAMPLE as ROPE_EXAMPLE
from ..engine.rope_scaling import RopeScaling
from ..kernels.errors import UsageError
from .expand import Built, expand

_DTYPE_NAMES = {
    "half": "float16",
    "fp16": "float16",
    "f16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    "f32": "float32",
}
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")


def parse_count(value: str | int) -> int:
    """A whole number, with vLLM's suffixes: 32k is 32000 and 1.5k is 1500, 32K is 32768.

    Typer hands a parser the option's default as well as what was typed.
    """
    text = str(value).strip()
    match = _COUNT.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"`{text}` is not a count such as 4096, 32k (32000) or 32K (32768)")
    digits, suffix = match.groups()
    if not suffix or suffix.isupper():
        if "." in digits:
            raise typer.BadParameter(f"`{text}` is not a whole number; decimals need a small suffix such as 1.5k")
        return int(digits) << 10 * " KMGT".index(suffix or " ")
    whole, _, fraction = digits.partition(".")
    zeros = 3 * " kmgt".index(suffix)
    if len(fraction) > zeros:
        raise typer.BadParameter(f"`{text}` is not a whole number")
    return int(whole + fraction.ljust(zeros, "0"))


def parse_share(value: str | float) -> float:
    """A share such as 0.9; whether it is one that can be had is checked later."""
    try:
        return float(value)
    except ValueError:
        raise typer.BadParameter(f"`{value}` is not a share such as 0.9") from None


def parse_gib(value: str | float) -> float:
    """GiB, as a number or as a size with a suffix: 4, 0.5, 512M."""
    text = str(value).strip()
    try:
        return float(text)
    except ValueError:
        return parse_count(text) / (1 << 30)


def parse_length(value: str | int) -> int:
    """A context length; `auto` and -1 are 0, which means the model's own."""
    return 0 if str(value).strip() in ("auto", "-1") else parse_count(value)


def parse_weights(text: str) -> dict[str, float]:
    """The weights that `a=3,b=0.5` gives; a name may hold `=` signs, its weight comes after the last."""
    weights: dict[str, float] = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        name, _, weight = (part.strip() for part in pair.rpartition("="))
        if name in weights:
            raise UsageError(f"--tenant-weights gives tenant `{name}` two weights", "give one of them")
        try:
            weights[name] = float(weight)
        except ValueError:
            name = ""
        if not name:
            raise UsageError(f"`{pair}` in --tenant-weights is no name with a weight", "write it as alice=3,bob=1")
    return weights


def parse_speculation(value: str | SpeculativeConfig) -> SpeculativeConfig:
    """The config that a method's name gives, or a JSON object such as vLLM takes."""
    if isinstance(value, SpeculativeConfig):
        return value
    text = value.strip()
    if text in SPECULATIVE_METHODS:
        return SpeculativeConfig.read({"method": text})
    try:
        return SpeculativeConfig.read(msgspec.json.decode(text))
    except msgspec.DecodeError as error:
        raise UsageError(
            f"--speculative-config is neither ngram nor none nor JSON: {error}",
            """write it as '{"method": "ngram", "num_speculative_tokens": 3}'""",
        ) from error


def parse_rope_scaling(value: str | RopeScaling) -> RopeScaling:
    """The scaling that a JSON object such as a config's `rope_scaling` asks for."""
    if isinstance(value, RopeScaling):
        return value
    try:
        return RopeScaling.read(msgspec.json.decode(value.strip()))
    except msgspec.DecodeError as error:
        raise UsageError(f"--rope-scaling is no JSON: {error}", f"write it as '{ROPE_EXAMPLE}'") from error


def parse_dtype(text: str) -> str:
    """The canonical name of an element type (`EngineConfig.check` refuses the unknown ones)."""
    return _DTYPE_NAMES.get(text, text)


ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="A name, a Hugging Face id, a folder or a GGUF file.")
]
ModelOption = Annotated[str | None, typer.Option("--model", "-m", metavar="MODEL", help="The same as MODEL.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Makes sampling repeatable.")]


def _count(*names: str, text: str, parser: Callable[[str | int], int] = parse_count) -> Any:
    return typer.Option(*names, parser=parser, metavar="N", help=text)


def _name(*names: str, text: str, metavar: str = "NAME", parser: Callable[[str], str] = str) -> Any:
    return typer.Option(*names, parser=parser, metavar=metavar, help=text)


def choose_model(argument: str | None, option: str | None) -> str:
    """The model that was named, "" if none was: then LLMCTL_MODEL or the default model is found at load."""
    if argument and option and argument != option:
        raise UsageError(f"two models were named: `{argument}` and `{option}`", "give one of them")
    return argument or option or ""


_DEFAULT = EngineConfig()

Dtype = Annotated[
    str,
    _name(
        "--dtype",
        metavar="TYPE",
        parser=parse_dtype,
        text="auto keeps weights as stored, but on a CPU makes integers of 16 bits of float16 and bfloat16, which are "
        "faster; float32, float16 and bfloat16 convert them.",
    ),
]


def memory_config(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    dtype: Dtype = _DEFAULT.dtype,
    kv_cache_dtype: Annotated[
        str,
        _name(
            "--kv-cache-dtype",
            metavar="TYPE",
            parser=parse_dtype,
            text="How K and V are stored: auto (int16, or float32 if weights are), float32, float16, bfloat16, int16 "
            "(with a scale per token and head), or in half the memory fp8 (the same as fp8_e4m3), fp8_e5m2, int8 (with "
            "scales too).",
        ),
    ] = _DEFAULT.kv_cache_dtype,
    kv_cache_dtype_skip_layers: Annotated[
        list[str] | None,
        typer.Option(
            "--kv-cache-dtype-skip-layers",
            metavar="LAYER",
            help="A layer whose K and V stay as auto would store them: its number from 0, or sliding_window for all "
            "with a window. Repeatable.",
        ),
    ] = None,
    max_model_len: Annotated[
        int,
        _count(
            "--max-model-len",
            "--context-length",
            "--ctx-size",
            "-c",
            parser=parse_length,
            text="Longest prompt and answer together; 0 or auto: the model's. 32k is 32000, 32K is 32768.",
        ),
    ] = _DEFAULT.max_model_len,
    rope_scaling: Annotated[
        RopeScaling | None,
        typer.Option(
            "--rope-scaling",
            "--hf-overrides",
            parser=parse_rope_scaling,
            metavar="JSON",
            help="Another rotary embedding than the model's, for longer contexts, with the names of config.json: "
            "rope_type (yarn, linear, dynamic, llama3, longrope or default), factor, original_max_position_embeddings "
            "and what else the type has. The model's context becomes factor times the original one.",
        ),
    ] = None,
    max_num_seqs: Annotated[
        int, _count("--max-num-seqs", "--parallel", text="Sequences that run at the same time.")
    ] = _DEFAULT.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int, _count("--max-num-batched-tokens", text="Tokens computed in one step.")
    ] = _DEFAULT.max_num_batched_tokens,
    block_size: Annotated[
        int, _count("--block-size", text="Tokens in one block of the KV cache: a power of two.")
    ] = _DEFAULT.block_size,
    num_gpu_blocks_override: Annotated[
        int,
        _count("--num-gpu-blocks-override", text="Blocks in the KV cache, on any device; 0: from the memory budget."),
    ] = _DEFAULT.num_gpu_blocks_override,
    kv_cache_memory_bytes: Annotated[
        int,
        _count("--kv-cache-memory-bytes", text="Size of the KV cache, such as 2G; 0: from the memory budget."),
    ] = _DEFAULT.kv_cache_memory_bytes,
    gpu_memory_utilization: Annotated[
        float,
        typer.Option(
            "--gpu-memory-utilization",
            metavar="SHARE",
            parser=parse_share,
            help="Share of the available memory that the engine may take in all, on any device, such as 0.5; 0: the KV "
            "cache takes a quarter of what weights leave.",
        ),
    ] = _DEFAULT.gpu_memory_utilization,
    swap_space: Annotated[
        float,
        typer.Option(
            "--swap-space",
            "--kv-offloading-size",
            "--hicache-size",
            metavar="GIB",
            parser=parse_gib,
            help="Disk for KV blocks that memory has no room for, in GiB such as 4, or 512M; 0: none. It is taken as "
            "it is needed, beside the models (LLMCTL_CACHE), and given back at the end.",
        ),
    ] = _DEFAULT.swap_space,
    device: Annotated[
        str,
        _name(
            "--device",
            metavar="DEVICE",
            text="cpu, cuda (the first of NVIDIA's GPUs), cuda:1 and so on, or auto: a GPU that can be used, else the "
            "CPU.",
        ),
    ] = _DEFAULT.device,
    model_impl: Annotated[
        str,
        _name(
            "--model-impl",
            text="llmctl (our own decoder), transformers (its modules on our cache and kernels, for any decoder), or "
            "auto: transformers for what our decoder does not know.",
        ),
    ] = _DEFAULT.model_impl,
    speculative_config: Annotated[
        SpeculativeConfig,
        typer.Option(
            "--speculative-config",
            parser=parse_speculation,
            metavar="JSON",
            help="Guess tokens ahead from what the sequence repeats or with a smaller model: ngram, none, or JSON with "
            "method (ngram, draft_model, none), model, num_speculative_tokens, disable_by_batch_size, "
            "prompt_lookup_max and prompt_lookup_min. The tokens are the same.",
        ),
    ] = _DEFAULT.speculative_config,
) -> EngineConfig:
    """The checked EngineConfig that these options ask for: those that say how much memory a model takes."""
    config = EngineConfig(
        model=choose_model(model, model_option),
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_dtype_skip_layers=tuple(kv_cache_dtype_skip_layers or ()),
        max_model_len=max_model_len,
        rope_scaling=rope_scaling,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_gpu_blocks_override=num_gpu_blocks_override,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        gpu_memory_utilization=gpu_memory_utilization,
        swap_space=swap_space,
        device=device,
        model_impl=model_impl,
        speculative_config=speculative_config,
    )
    config.check()
    return config


MemoryOptions = Annotated[EngineConfig, Built(memory_config)]


@expand
def engine_config(
    memory: MemoryOptions,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Reuse the KV of prompts that begin alike.",
        ),
    ] = _DEFAULT.enable_prefix_caching,
    cache_eviction: Annotated[
        str,
        _name(
            "--cache-eviction",
            text="What the prefix cache forgets first: lru-k (what was used fewer than K times, then what was used K "
            "times longest ago) or lru.",
        ),
    ] = _DEFAULT.cache_eviction,
    cache_eviction_k: Annotated[int, _count("--cache-eviction-k", text="K of lru-k.")] = _DEFAULT.cache_eviction_k,
    cache_audit: Annotated[
        float,
        typer.Option(
            "--cache-audit",
            metavar="SHARE",
            help="Share of prefix hits (0 to 1) that are computed again and compared bit for bit.",
        ),
    ] = _DEFAULT.cache_audit,
    preemption_mode: Annotated[
        str,
        _name(
            "--preemption-mode",
            text="What a sequence that had to make room comes back by: swap, recompute, or auto: the cheaper as "
            "measured. The tokens are the same.",
        ),
    ] = _DEFAULT.preemption_mode,
    scheduling_policy: Annotated[
        str, _name("--scheduling-policy", text=f"Who goes first: {', '.join(POLICIES[:-1])} or {POLICIES[-1]}.")
    ] = _DEFAULT.scheduling_policy,
    tenant_weights: Annotated[
        str,
        typer.Option(
            "--tenant-weights",
            metavar="NAME=W,...",
            help="Shares of tenants, as the request log names them, in the fair queue; 1 for others.",
        ),
    ] = "",
    itl_target_ms: Annotated[
        float,
        typer.Option(
            "--itl-target-ms",
            metavar="MS",
            help="How long prompts may let others wait for a token; 0: three times as long as without prompts.",
        ),
    ] = _DEFAULT.itl_target_ms,
    max_prefill_tokens_beside_decode: Annotated[
        int,
        _count("--max-prefill-tokens-beside-decode", text="The same as a count of prompt tokens in one step."),
    ] = _DEFAULT.max_prefill_tokens_beside_decode,
    threads: Annotated[
        int, _count("--threads", "-t", text="CPU threads of this engine; 0: one per physical core it may use.")
    ] = _DEFAULT.threads,
    seed: Seed = None,
    async_depth: Annotated[
        int,
        _count("--async-depth", text="Steps in flight, 1 or 2; the tokens are the same. 0: 2 on a GPU, 1 on a CPU."),
    ] = _DEFAULT.async_depth,
    enforce_eager: Annotated[
        bool,
        typer.Option(
            "--enforce-eager",
            help="On a GPU, launch every kernel by itself instead of replaying captured graphs.",
        ),
    ] = _DEFAULT.enforce_eager,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="On a GPU, give a request the same bits in any company; on a CPU it always has them.",
        ),
    ] = _DEFAULT.deterministic,
    jit: Annotated[
        bool,
        typer.Option(
            "--jit/--no-jit", help="Compile kernels of a GPU when they are needed, or take only those that are there."
        ),
    ] = _DEFAULT.jit,
    kernels: Annotated[
        str,
        _name("--kernels", text="auto, amx, avx512, avx2, generic (no vector instructions), reference (plain torch)."),
    ] = _DEFAULT.kernels,
    attention_compute: Annotated[
        str,
        _name(
            "--attention-compute",
            metavar="TYPE",
            parser=parse_dtype,
            text="What attention multiplies in on a GPU: float32, tf32, bfloat16, float16, or auto for what loses "
            "nothing of the activations' type. A CPU computes in float32.",
        ),
    ] = _DEFAULT.attention_compute,
) -> EngineConfig:
    """The checked EngineConfig that these options ask for."""
    config = msgspec.structs.replace(
        memory,
        enable_prefix_caching=enable_prefix_caching,
        cache_eviction=cache_eviction,
        cache_eviction_k=cache_eviction_k,
        cache_audit=cache_audit,
        preemption_mode=preemption_mode,
        scheduling_policy=scheduling_policy,
        tenant_weights=parse_weights(tenant_weights),
        itl_target_ms=itl_target_ms,
        max_prefill_tokens_beside_decode=max_prefill_tokens_beside_decode,
        threads=threads,
        seed=seed or 0,
        async_depth=async_depth,
        enforce_eager=enforce_eager,
        deterministic=deterministic,
        jit=jit,
        kernels=kernels,
        attention_compute=attention_compute,
    )
    config.check()
    return config


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """Sampling options as given; None (for `stop`: nothing) leaves a field to the model's or the command's default."""

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    max_tokens: int | None
    stop: tuple[str, ...]
    seed: int | None

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """`defaults` with every option that was given put in its place."""
        given = {name: value for name, value in dataclasses.asdict(self).items() if value not in (None, ())}
        return msgspec.structs.replace(defaults, **given)


def _sampling(*names: str, text: str, parser: Callable[[str], int | float]) -> Any:
    return typer.Option(*names, parser=parser, metavar="N", help=text)


def sampling_choice(
    temperature: Annotated[
        float | None, _sampling("--temperature", parser=float, text="0 is greedy; higher is more varied.")
    ] = None,
    top_p: Annotated[
        float | None, _sampling("--top-p", parser=float, text="Keep the most likely tokens up to this probability.")
    ] = None,
    top_k: Annotated[int | None, _sampling("--top-k", parser=int, text="Keep this many most likely tokens.")] = None,
    min_p: Annotated[
        float | None, _sampling("--min-p", parser=float, text="Drop tokens below this share of the most likely one.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, _sampling("--repetition-penalty", parser=float, text="Above 1 discourages repetition.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        _sampling("--max-tokens", parser=parse_count, text="Longest answer; by default what the context leaves."),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", metavar="TEXT", help="End at this text; repeatable."),
    ] = None,
    seed: Seed = None,
) -> SamplingChoice:
    """The sampling options that were given."""
    return SamplingChoice(temperature, top_p, top_k, min_p, repetition_penalty, max_tokens, tuple(stop or ()), seed)


EngineOptions = Annotated[EngineConfig, Built(engine_config)]
SamplingOptions = Annotated[SamplingChoice, Built(sampling_choice)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
