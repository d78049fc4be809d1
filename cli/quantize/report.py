"""The quality card: everything measured about a quantized checkpoint, as JSON, as a table, as numbers to test."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ... import __version__
from ...engine.sizes import format_bytes
from ...quant.calibrate import LinearReport
from ...quant.quality import Comparison
from ...quant.scheme import Scheme
from .asked import Asked
from .measure import DecodeSpeed
from .preflight import Work, linear_bits
from .samples import Samples

CARD_VERSION = 1


def make_card(
    work: Work,
    asked: Asked,
    samples: Samples,
    reports: Sequence[LinearReport],
    quality: Comparison,
    speed: DecodeSpeed,
    seconds: float,
) -> dict[str, object]:
    """The content of `llmctl_quality.json`. Sizes in bytes, KL in nats per token, speed in tokens per second."""
    calibration, scheme = samples.calibration, asked.scheme
    errors = [report.error for report in reports if not math.isnan(report.error)]
    return {
        "version": CARD_VERSION,
        "llmctl": __version__,
        "model": work.name,
        "source": {
            "kind": work.checkpoint.source.kind,
            "formats": list(work.source_formats),
            "dequantized_first": work.is_dequantized,
        },
        "scheme": {
            "method": scheme.method,
            "layout": "AutoAWQ gemm",
            "bits": scheme.bits,
            "group_size_asked": scheme.group_size,
            "group_size": work.format.group,
            "symmetric": scheme.symmetric,
            "ignored": list(scheme.ignore),
            "linears": len(work.linears),
            "rounded_to_nearest": sum(report.method == "rtn" for report in reports),
            "mean_relative_error": sum(errors) / len(errors) if errors else None,
        },
        "calibration": None
        if calibration is None
        else {
            "text": samples.calibration_text,
            "samples": calibration.shape[0],
            "tokens_per_sample": calibration.shape[1],
            "seed": asked.seed,
        },
        "kv_cache_scheme": asked.kv_cache_scheme if work.scales else None,
        "evaluation": {
            "text": samples.evaluation_text,
            "windows": len(samples.evaluation),
            "tokens_per_window": max(len(window) for window in samples.evaluation),
            "predicted_tokens": quality.model.tokens,
        },
        "bytes": {"before": work.source_bytes, "after": work.output_bytes, "float16": 2 * work.parameters},
        "bits_per_weight": {
            "before": 8 * work.source_bytes / work.parameters,
            "after": 8 * work.output_bytes / work.parameters,
            "quantized_linears": linear_bits(work),
        },
        "perplexity": {
            "before": quality.original.perplexity,
            "after": quality.model.perplexity,
            "log_ratio_error": _number(quality.ratio_error),
        },
        "kl": {"mean": quality.kl_mean, "p99": quality.kl_p99},
        "top1_agreement": quality.top1,
        "decode_tokens_per_s": {"before": speed.before, "after": speed.after},
        "seconds": round(seconds, 1),
    }


def metrics(work: Work, quality: Comparison, speed: DecodeSpeed) -> dict[str, float]:
    """The figures that `--fail-if` knows, by its names."""
    return {
        "kl": quality.kl_mean,
        "kl_p99": quality.kl_p99,
        "ppl": quality.model.perplexity,
        "ppl_ratio": quality.model.perplexity / quality.original.perplexity,
        "top1": quality.top1,
        "bits": 8 * work.output_bytes / work.parameters,
        "speed": speed.after / speed.before,
    }


def table_rows(work: Work, quality: Comparison, speed: DecodeSpeed) -> list[list[str]]:
    """Rows of (what, before, after, how they compare)."""
    before, after = quality.original.perplexity, quality.model.perplexity
    share = work.output_bytes / (2 * work.parameters)
    return [
        ["size", format_bytes(work.source_bytes), format_bytes(work.output_bytes), f"{share:.0%} of float16"],
        [
            "bits per weight",
            f"{8 * work.source_bytes / work.parameters:.2f}",
            f"{8 * work.output_bytes / work.parameters:.2f}",
            f"{linear_bits(work):.2f} in quantized Linears",
        ],
        ["perplexity", f"{before:.3f}", f"{after:.3f}", f"{after / before - 1:+.2%}{_plus_minus(quality.ratio_error)}"],
        ["KL, mean", "", f"{quality.kl_mean:.4f}", "nats per token, to the original in float32"],
        ["KL, 99th percentile", "", f"{quality.kl_p99:.4f}", ""],
        ["same likeliest token", "", f"{quality.top1:.1%}", ""],
        ["decode, tokens/s", f"{speed.before:.1f}", f"{speed.after:.1f}", f"{speed.after / speed.before:.2f}x"],
    ]


def title(work: Work, scheme: Scheme) -> str:
    """What was made of what."""
    return f"{work.name}: {scheme.method}, {scheme.bits} bits, {group_text(work, scheme)}"


def group_text(work: Work, scheme: Scheme) -> str:
    """The stored group size, and the one asked for where that is another."""
    stored, asked = work.format.group, scheme.group_size
    if stored == -1:
        return "one group per output"
    return f"groups of {stored}" + (f" (asked {asked}, which does not divide every layer)" if stored != asked else "")


def _plus_minus(ratio_error: float) -> str:
    return "" if math.isnan(ratio_error) else f" ± {ratio_error:.2%}"


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value
