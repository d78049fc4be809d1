"""What a quantized checkpoint is worth: read back from disk and run by the engine, beside the original.

Quality is that of the product: the quantized model runs as it always will, with the kernels and the KV cache that it
gets by default; the original runs in float32. Speed compares both as they run by default.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...engine.assemble import assemble
from ...engine.config import NO_SPECULATION, EngineConfig
from ...engine.engine import Core
from ...engine.load.golden import Golden
from ...engine.load.packed import PackedModel
from ...engine.load.progress import Progress
from ...engine.plan import resolve
from ...engine.process import new_epoch
from ...engine.request import Request, SamplingParams
from ...engine.runner.golden import make_golden
from ...engine.runner.kv_fit import HEADROOM
from ...engine.runner.layer_watch import LayerWatch
from ...engine.runner.runner import Runner
from ...engine.score import Scorer
from ...kernels.errors import CheckpointError
from ...kernels.formats import FP8_LARGEST
from ...kernels.ops import F32Array, I32Array
from ...quant.quality import Comparison, compare

_PROMPT, _DECODED, _ROUNDS = 16, 32, 5


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Tokens per second of one sequence: the best of rounds taken by turns, as other work can only slow them."""

    before: float
    after: float


def measure_quality(
    original: PackedModel, quantized: PackedModel, windows: Sequence[I32Array], threads: int, progress: Progress
) -> Comparison:
    """Both models on the same windows of text; `original` has its weights in float formats."""
    longest = max(len(window) for window in windows)
    reference = Scorer(original, longest, EngineConfig(threads=threads, kv_cache_dtype="float32"))
    product = Scorer(quantized, longest, EngineConfig(threads=threads))

    def told() -> Iterator[list[int]]:
        for number, window in enumerate(windows):
            progress("measuring quality", number, len(windows))
            yield window.tolist()
        progress("measuring quality", len(windows), len(windows))

    return compare(reference.logits, product.logits, told())


def golden_logits(quantized: PackedModel, prompt: I32Array, threads: int) -> Golden:
    """What the product gives for the beginning of a text, to be compared whenever it is loaded."""
    count = min(_PROMPT, len(prompt), quantized.spec.context_length)
    plan, _ = resolve(
        EngineConfig(
            threads=threads, max_model_len=count, max_num_seqs=count, num_gpu_blocks_override=1,
            device="cpu", speculative_config=NO_SPECULATION,
        ),
        quantized,
    )  # fmt: skip
    return make_golden(Runner(quantized, plan), plan, tuple(prompt[:count].tolist()), quantized.spec.vocab_size)


def measure_scales(quantized: PackedModel, texts: Sequence[I32Array], threads: int, progress: Progress) -> F32Array:
    """[layers, 2]: the scales of K and V for an fp8 cache, by the largest that the model makes of these texts."""
    longest = max(len(text) for text in texts)
    config = EngineConfig(
        threads=threads, max_model_len=longest, max_num_seqs=1, max_num_batched_tokens=longest,
        kv_cache_dtype="float32", device="cpu", speculative_config=NO_SPECULATION,
    )  # fmt: skip
    watch = LayerWatch(quantized, resolve(config, quantized, split_windows=False)[0], longest)
    largest = np.zeros((quantized.spec.num_layers, 2), np.float32)
    for number, text in enumerate(texts):
        progress("measuring the KV cache", number, len(texts))
        seen = np.stack([each.largest.max(axis=1) for each in watch.read(text.tolist())])
        largest = np.maximum(largest, seen)
    progress("measuring the KV cache", len(texts), len(texts))
    if not (np.isfinite(largest) & (largest > 0)).all():
        layer = int(np.flatnonzero(~(np.isfinite(largest) & (largest > 0)).all(axis=1))[0])
        raise CheckpointError(
            f"K and V of layer {layer} reach {largest[layer].tolist()}, of which no scale can be made",
            "its weights are broken, or leave --kv-cache-scheme out",
        )
    return largest * np.float32(HEADROOM / FP8_LARGEST["fp8_e4m3"])


def measure_speed(before: PackedModel, after: PackedModel, prompt: I32Array, threads: int) -> DecodeSpeed:
    """How fast each decodes, by turns, so that a machine that grows busy slows both."""
    context = after.spec.context_length
    start = tuple(prompt[: min(_PROMPT, context // 2)].tolist())
    tokens = min(_DECODED, context - len(start) - 1)
    engines = [_engine(model, len(start) + tokens + 1, threads) for model in (before, after)]
    rates: list[list[float]] = [[], []]
    try:
        for number in range(_ROUNDS):
            for engine, found in zip(engines, rates, strict=True):
                found.append(_decode_rate(engine, number, start, tokens))
    finally:
        for engine in engines:
            engine.close()
    return DecodeSpeed(*map(max, rates))


def _engine(model: PackedModel, length: int, threads: int) -> Core:
    config = EngineConfig(
        max_model_len=length,
        max_num_seqs=1,
        max_num_batched_tokens=_PROMPT,
        threads=threads,
        device="cpu",
        enable_prefix_caching=False,
    )
    return assemble(config, model, epoch=new_epoch())[0]


def _decode_rate(engine: Core, number: int, prompt: tuple[int, ...], tokens: int) -> float:
    """Tokens per second behind the first one, which belongs to the prompt."""
    request = Request(
        id=str(number), prompt=prompt, sampling=SamplingParams(temperature=0, ignore_eos=True), seed=0, stop_ids=(),
        max_tokens=tokens + 1,
    )  # fmt: skip
    engine.add(request)
    while not _step(engine):
        pass
    started, done = time.perf_counter(), 0
    while engine.has_work:
        done += _step(engine)
    return done / (time.perf_counter() - started)


def _step(engine: Core) -> int:
    """New tokens; CheckpointError if the model fails, after which there would be none."""
    outputs = engine.step()
    for output in outputs:
        if output.error:
            raise CheckpointError(f"the model cannot write text: {output.error}", "its weights are broken, or overflow")
    return sum(len(output.tokens) for output in outputs)
