"""The engine on a real GPU, for gpu_check.py: a made model's tokens against the CPU's, and how fast a large one is.

Models are made here: nothing is fetched, and neither a tokenizer nor the extension for CPUs is needed. The large one
has the shape of an 8B model, random weights that are made in the kernels' layout, and a vocabulary of 32,768.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from llmctl.engine.assemble import scheduler_config
from llmctl.engine.config import NO_SPECULATION, EngineConfig
from llmctl.engine.engine import Engine
from llmctl.engine.load.golden import Golden
from llmctl.engine.models.arch import DecoderSpec, RopeSpec
from llmctl.engine.models.decoder import Decoder, Limits, build_decoder
from llmctl.engine.plan import resolve
from llmctl.engine.request import Request, SamplingParams
from llmctl.engine.runner.cuda_runner import CudaRunner
from llmctl.engine.runner.make import make_runner
from llmctl.engine.schedule.scheduler import Scheduler
from llmctl.engine.schedule.step import Step
from llmctl.kernels.cpu.pack import pack
from llmctl.kernels.cuda import devices, library, register, steps
from llmctl.kernels.cuda.host_driver import HostDriver
from llmctl.kernels.cuda.pack import parts
from llmctl.kernels.cuda.source import Kernel
from llmctl.kernels.formats import WeightFormat
from llmctl.kernels.ops import AnyArray, Batch, F32Array, KVLayer, PackedWeight, U8Array

TINY = DecoderSpec(
    family="made", num_layers=2, hidden_size=256, num_heads=8, num_kv_heads=4, head_dim=64, ffn_size=512,
    vocab_size=512, context_length=512, norm_eps=1e-5, rope=RopeSpec(),
)  # fmt: skip
LARGE = DecoderSpec(
    family="made", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336,
    vocab_size=32768, context_length=8192, norm_eps=1e-5, rope=RopeSpec(theta=500000.0),
)  # fmt: skip
VARIANTS = {
    "bf16": (WeightFormat("bf16"), "auto"),
    "int4": (WeightFormat("int4", 128, "int"), "auto"),
    "bf16, fp8 cache": (WeightFormat("bf16"), "fp8"),
}
MIXED = (("bf16", "auto"), ("f16", "fp8"), ("bf16", "int8"))
BATCHES = (1, 16, 64, 256)
PROMPT, WARM, MEASURED = 256, 12, 40


@dataclass(frozen=True, slots=True, eq=False)
class MadeModel:
    """A Model of random weights."""

    spec: DecoderSpec
    weights: Mapping[str, PackedWeight]
    vectors: Mapping[str, F32Array]
    weight_bytes: int
    weight_formats: tuple[str, ...]
    name: str = "made"
    folder: Path = Path()
    digest: str = "made"
    golden: Golden | None = None
    implementation: str = "llmctl"

    def build(self, batch: Batch, kv: Mapping[int, KVLayer], limits: Limits, kernels: str) -> Decoder:
        return build_decoder(self.spec, self.weights, self.vectors, {}, batch, kv, limits, kernels)


def shapes(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of every matrix."""
    wide, narrow, hidden = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.hidden_size
    found = {"model.embed_tokens": (spec.vocab_size, hidden), "lm_head": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        found |= {f"{attention}.{part}_proj": (n, hidden) for part, n in (("q", wide), ("k", narrow), ("v", narrow))}
        found |= {f"{attention}.o_proj": (hidden, wide), f"{mlp}.down_proj": (hidden, spec.ffn_size)}
        found |= {f"{mlp}.{part}_proj": (spec.ffn_size, hidden) for part in ("gate", "up")}
    return found


def norms(spec: DecoderSpec) -> dict[str, F32Array]:
    names = [f"model.layers.{i}.{part}_layernorm" for i in range(spec.num_layers) for part in NORMS]
    return {f"{name}.weight": np.ones(spec.hidden_size, np.float32) for name in ("model.norm", *names)}


NORMS = ("input", "post_attention")


def tiny(kind: str) -> MadeModel:
    """A small model of float weights of this kind, packed as a checkpoint's are."""
    rng, format = np.random.default_rng(7), WeightFormat(kind)
    weights, size = {}, 0
    for name, (n, k) in shapes(TINY).items():
        values = rng.normal(0, 0.08, (n, k)).astype(np.float32)
        data = steps.as_stored(values, kind)
        packed = pack(format, data, None, None)
        weights[f"{name}.weight"] = PackedWeight(format, n, k, packed)
        size += packed.nbytes
    return MadeModel(TINY, weights, norms(TINY), size, (kind,))


def large(format: WeightFormat, layers: int) -> MadeModel:
    """A large model of so many layers whose weights have no bytes here: `made_on_the_way` brings them."""
    none, spec = np.zeros(0, np.uint8), msgspec.structs.replace(LARGE, num_layers=layers)
    weights, size = {}, 0
    for name, (n, k) in shapes(spec).items():
        kind = WeightFormat("bf16") if name in ("model.embed_tokens", "lm_head") else format
        weights[f"{name}.weight"] = PackedWeight(kind, n, k, none)
        size += parts(kind, n, k).num_bytes
    return MadeModel(spec, weights, norms(spec), size, tuple(sorted({"bf16", format.name})))


def made_on_the_way() -> Callable[[], None]:
    """Let layers have random weights in the GPU's layout instead of packing theirs; what undoes it."""
    before = register.pack, register.unpack, steps.values_of, library.unpack
    # Views, because an array that comes twice would be uploaded once.
    register.pack = lambda format, weight: _made_weight(format, weight.n, weight.k).view()  # type: ignore[attr-defined]
    register.unpack = lambda weight: (weight,)  # type: ignore[attr-defined]
    steps.values_of = lambda weight: np.resize(_noise() * np.float32(0.02), (weight.n, weight.k))  # type: ignore[attr-defined]

    library.unpack = lambda weight: (_made_rows(weight.n, weight.k).view(),)  # type: ignore[attr-defined]

    def undo() -> None:
        register.pack, register.unpack, steps.values_of, library.unpack = before  # type: ignore[attr-defined]

    return undo


@functools.cache
def _noise() -> F32Array:
    return np.random.default_rng(3).normal(0, 1, (1 << 20) + 7).astype(np.float32)


@functools.cache
def _made_rows(n: int, k: int) -> AnyArray:
    """Values of about 0.02 in bfloat16, for a library."""
    return np.resize(steps.as_stored(_noise() * np.float32(0.02), "bf16"), (n, k))


@functools.cache
def _made_weight(format: WeightFormat, n: int, k: int) -> U8Array:
    """Values of about 0.02 in the GPU's layout; whole vectors of each shape are made once."""
    where = parts(format, n, k)
    out = np.zeros(where.num_bytes, np.uint8)
    if format.is_float:
        noise = steps.as_stored(_noise() * np.float32(0.02), format.kind).view(np.uint8)
        out[where.codes] = np.resize(noise, where.codes.stop)
    else:
        codes = np.random.default_rng(5).integers(0, 256, (1 << 20) + 7, np.uint8)
        out[where.codes] = np.resize(codes, where.codes.stop)
        out[where.scales].view(np.float16)[:] = 0.004
        out[where.zeros] = 8
    return out


@dataclass(slots=True, eq=False)
class Timed:
    """A runner whose submissions are timed."""

    runner: CudaRunner
    seconds: list[float] = field(default_factory=list)
    launches: list[int] = field(default_factory=list)

    def submit(self, step: Step) -> object:
        started, before = time.perf_counter(), self.runner.gpu.launches
        flight = self.runner.submit(step)
        self.seconds.append(time.perf_counter() - started)
        self.launches.append(self.runner.gpu.launches - before)
        return flight

    def close(self) -> None:
        self.runner.close()


def tokens(kind: str, **options: object) -> list[tuple[int, ...]]:
    """What five requests get: greedy and sampled, with penalties, longer than a step, beginning alike."""
    config = EngineConfig(
        max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, num_gpu_blocks_override=96, block_size=16,
        speculative_config=NO_SPECULATION, **options,
    )  # fmt: skip
    model = tiny(kind)
    plan, _ = resolve(config, model)
    runner = make_runner(model, plan)
    engine = Engine(Scheduler(scheduler_config(plan, 0)), runner, plan.async_depth)
    prompts = [[(i * 37 + j) % 500 + 3 for i in range(20 + 30 * j)] for j in range(4)]
    ways = (
        SamplingParams(temperature=0), SamplingParams(temperature=0.8, top_k=40, top_p=0.9),
        SamplingParams(temperature=0, repetition_penalty=1.2, frequency_penalty=0.3), SamplingParams(temperature=0),
    )  # fmt: skip
    for number, (prompt, way) in enumerate(zip([*prompts, prompts[2]], [*ways, ways[0]], strict=True)):
        engine.add(
            Request(id=str(number), prompt=tuple(prompt), sampling=way, seed=11 + number, stop_ids=(), max_tokens=24)
        )
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.tokens)
    engine.close()
    return [tuple(found[name]) for name in sorted(found)]


def same_tokens() -> dict[str, object]:
    """Whether a GPU gives the CPU's tokens in float32, and graphs those of eager launches in every type."""
    expected = tokens("f32", device="cpu", kernels="reference")
    found: dict[str, object] = {"cpu": [list(row[:6]) for row in expected]}
    wrong = []
    for deterministic in (True, False):
        for eager in (True, False):
            got = tokens("f32", device="cuda", deterministic=deterministic, enforce_eager=eager)
            if got != expected:
                wrong.append({"deterministic": deterministic, "eager": eager, "got": [list(row) for row in got]})
    for kind, cache in MIXED:
        both = [
            tokens(kind, device="cuda", deterministic=True, enforce_eager=eager, kv_cache_dtype=cache)
            for eager in (True, False)
        ]
        if both[0] != both[1]:
            wrong.append({"graphs are not eager launches": kind, "cache": cache})
    return found | ({"failed": wrong} if wrong else {})


def speeds(batches: tuple[int, ...] = BATCHES, measured: int = MEASURED) -> list[dict[str, object]]:
    """Decoding of the large model, by format and number of sequences."""
    return list(speed_rows(batches, measured, LARGE.num_layers))


def speed_rows(
    batches: tuple[int, ...],
    measured: int,
    layers: int,
    *,
    enforce_eager: bool = False,
    measuring_ended: Callable[[], None] = int,
) -> Iterator[dict[str, object]]:
    """The rows of `speeds` one by one; `measuring_ended` is called before sequences begin to end."""
    for variant, (format, cache) in VARIANTS.items():
        undo = made_on_the_way()
        try:
            started = time.perf_counter()
            model = large(format, layers)
            config = EngineConfig(
                device="cuda", max_model_len=2048, max_num_seqs=256, max_num_batched_tokens=8192, block_size=16,
                kv_cache_dtype=cache, num_gpu_blocks_override=256 * 24, enable_prefix_caching=False,
                speculative_config=NO_SPECULATION, enforce_eager=enforce_eager,
            )  # fmt: skip
            plan, _ = resolve(config, model)
            runner = make_runner(model, plan)
            assert isinstance(runner, CudaRunner)
        finally:
            undo()
        loaded = time.perf_counter() - started
        for batch in batches:
            found = _decode(runner, plan, batch, measured, measuring_ended)
            yield {"model": variant, "batch": batch, **found, "load_s": round(loaded, 1)}
        runner.close()
        _made_weight.cache_clear()
        _made_rows.cache_clear()


@functools.cache
def kernels(arch: str) -> tuple[Kernel, ...]:
    """All that `same_tokens` and `speeds` launch on a GPU of this architecture, found by a driver that writes down."""
    number = int(arch[3:].rstrip("a"))
    host = HostDriver(None, (number // 10, number % 10), processors=132, memory_total=140 << 30)
    devices.use_driver(host, host.get)
    try:
        launch_all(lambda: list(speed_rows((1, 2, 256), 2, layers=1)))
    finally:
        devices.use_driver(None)
    return tuple(host.loaded)


def launch_all(speed: Callable[[], object]) -> None:
    """Run what is run on a GPU, but for the CPU's tokens."""
    for deterministic in (True, False):
        tokens("f32", device="cuda", deterministic=deterministic)
    for kind, cache in MIXED:
        tokens(kind, device="cuda", deterministic=True, kv_cache_dtype=cache)
    speed()


def _decode(
    runner: CudaRunner, plan: object, batch: int, measured: int, measuring_ended: Callable[[], None]
) -> dict[str, object]:
    """Tokens a second, launches and host microseconds per step of a batch that decodes."""
    timed = Timed(runner)
    engine = Engine(Scheduler(scheduler_config(plan, 0)), timed, plan.async_depth)  # type: ignore[attr-defined]
    rng, way = np.random.default_rng(batch), SamplingParams(temperature=0.8, seed=1)
    for number in range(batch):
        prompt = tuple(rng.integers(3, LARGE.vocab_size, PROMPT).tolist())
        engine.add(
            Request(
                id=f"{batch}-{number}", prompt=prompt, sampling=way, seed=number, stop_ids=(),
                max_tokens=WARM + measured + 16,
            )
        )  # fmt: skip
    counts = {f"{batch}-{number}": 0 for number in range(batch)}
    began = time.perf_counter()
    prefilled = began
    while min(counts.values()) < WARM:
        _count(engine, counts)
        if prefilled == began and min(counts.values()) > 0:
            prefilled = time.perf_counter()
    first, started, scheduling = sum(counts.values()), time.perf_counter(), engine.stats().scheduler_s
    timed.seconds.clear()
    timed.launches.clear()
    while min(counts.values()) < WARM + measured:
        _count(engine, counts)
    seconds, got, done = time.perf_counter() - started, sum(counts.values()) - first, len(timed.seconds)
    scheduling = engine.stats().scheduler_s - scheduling
    measuring_ended()
    graphs = runner.graphs
    while engine.has_work:
        engine.step()
    return {
        "tokens_per_s": round(got / seconds),
        "step_us": round(1e6 * seconds / done),
        "submit_us": round(1e6 * sum(timed.seconds) / done),
        "scheduling_us": round(1e6 * scheduling / done),
        "launches": sorted(timed.launches)[done // 2],
        "prefill_s": round(prefilled - began, 2),
        "graphs": 0 if graphs is None else len(graphs.graphs),
        "graph_nodes": 0 if graphs is None or not graphs.graphs else list(graphs.graphs.values())[-1].nodes,
        "graph_bytes": 0 if graphs is None else graphs.num_bytes,
        "device_bytes": runner.gpu.used,
    }


def _count(engine: Engine, counts: dict[str, int]) -> None:
    for output in engine.step():
        counts[output.request_id] += len(output.tokens)
