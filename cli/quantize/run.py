"""One run of `llmctl quantize`, from a name to a measured checkpoint.

Everything happens in a staged folder, measuring included: the output appears when it is complete, with its quality card
in it, or not at all.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...engine.config import Environment
from ...engine.load.golden import KEY
from ...engine.load.hub import Source
from ...engine.load.packed import open_packed
from ...engine.load.progress import Progress
from ...engine.tokenizer import Tokenizer
from ...quant.quality import Comparison
from ...quant.save import fill_scales, write_card
from ...quant.staging import staged_folder
from .asked import Asked
from .measure import DecodeSpeed, golden_logits, measure_quality, measure_scales, measure_speed
from .preflight import Work
from .report import make_card, metrics
from .sampled import write_text
from .samples import Samples, choose_samples
from .walk import write_quantized

_SCRATCH = ".measuring"


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """A finished run; `card` is what `llmctl_quality.json` says."""

    samples: Samples
    quality: Comparison
    speed: DecodeSpeed
    card: dict[str, object]
    metrics: dict[str, float]


def run(work: Work, asked: Asked, settings: Environment, progress: Progress) -> Outcome:
    """Quantize, measure, and put the output in its place."""
    started = time.monotonic()
    source = work.checkpoint.source
    original = open_packed(source, cache=settings.cache, progress=progress)
    tokenizer = Tokenizer(original.folder)
    samples = choose_samples(
        asked,
        tokenizer,
        work.checkpoint.spec.context_length,
        lambda count, length: write_text(
            original, tokenizer, count, length, seed=asked.seed, threads=asked.threads, progress=progress
        ),
    )
    with staged_folder(work.output, replace=asked.overwrite) as staging:
        reports = write_quantized(work, asked.scheme, samples.calibration, staging, progress)
        with _scratch(staging) as scratch:
            product = Source(staging, "hf", work.output.name)
            quantized = open_packed(product, cache=scratch, progress=progress)
            if work.scales:
                texts = samples.evaluation if samples.calibration is None else tuple(samples.calibration)
                scales = measure_scales(quantized, texts, asked.threads, progress)
                fill_scales(staging, dict(zip(work.scales, scales.reshape(-1).tolist(), strict=True)))
                quantized = open_packed(product, cache=scratch, progress=progress)
            reference = original
            if work.reference != "auto":
                reference = open_packed(source, dtype=work.reference, cache=scratch, progress=progress)
            quality = measure_quality(reference, quantized, samples.evaluation, asked.threads, progress)
            golden = golden_logits(quantized, samples.evaluation[0], asked.threads)
            speed = measure_speed(original, quantized, samples.evaluation[0], asked.threads)
        seconds = time.monotonic() - started
        card = make_card(work, asked, samples, reports, quality, speed, seconds)
        write_card(staging, {**card, KEY: msgspec.to_builtins(golden)})
    return Outcome(samples, quality, speed, card, metrics(work, quality, speed))


@contextlib.contextmanager
def _scratch(staging: Path) -> Iterator[Path]:
    """A folder for what is only needed to measure."""
    scratch = staging / _SCRATCH
    scratch.mkdir()
    yield scratch
    shutil.rmtree(scratch)
