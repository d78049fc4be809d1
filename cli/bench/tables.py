"""A report as tables for people: figures to stdout, findings to stderr."""

from __future__ import annotations

from collections.abc import Sequence

from ..console import Console
from .measures import BenchResult, Spread
from .report import Report, WorkloadFacts

GB = 1e9

_HEADLINE = ("framework", ">tokens/s", ">ms/token", ">memory GB", ">TTFT ms", ">TPOT ms")
_RATIO_NAMES = {
    "tokens_per_sec": "tokens/s",
    "peak_pss_bytes": "memory",
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT",
    "e2e_ms": "E2E",
}
_LATENCY = ("latency in ms", ">mean", ">p50", ">p90", ">p95", ">p99", ">max")


def show(console: Console, report: Report) -> None:
    """Print the headline and the latencies of every backend, or only the findings if they refuse a headline."""
    title = _title(report)
    if report.results:
        console.table(_HEADLINE, [_headline(result) for result in report.results], title)
        if report.ratios:
            console.table((f"ratio to {report.ratios[0].against}", ">median", ">low", ">high"), _ratios(report))
        for result in report.results:
            console.table((f"{result.backend}, {_LATENCY[0]}", *_LATENCY[1:]), _latencies(result))
            console.data(_counted(result, report))
        console.data("tokens/s and ms/token count answers and include the time for their prompts")
        if (drafted := report.speculation) is not None and drafted.length is not None:
            console.data(
                f"speculation: {drafted.draft_tokens} tokens drafted in {drafted.drafts} drafts, "
                f"{drafted.acceptance:.0%} accepted, {drafted.length:.2f} tokens a step with drafts; "
                f"by place in the draft {', '.join(f'{share:.0%}' for share in drafted.places)} stood"
            )
    console.data(_asked(report.workload))
    for note in report.workload.notes:
        console.say(f"note: {note}")
    for finding in report.findings:
        backend = f"{finding.backend}: " if finding.backend else ""
        console.say(f"{finding.guard}: {backend}{finding.message}", "bold red" if finding.refuses else "bold")


def _title(report: Report) -> str:
    workload, load = report.workload, report.load
    prompts = "" if workload.prompt_tokens_mean is None else f" of {workload.prompt_tokens_mean:.0f} tokens"
    parts = [
        f"{report.provenance.model}: {workload.dataset}{' (stand-in texts)' if workload.stand_in else ''}",
        f"{workload.num_prompts} prompts{prompts}, answers of {workload.output_tokens_mean:.0f}",
        _arrival(report) + (f", {load.rounds} rounds" if load.rounds > 1 else ""),
    ]
    if report.partial:
        parts.append("PARTIAL: interrupted")
    if report.findings and any(finding.refuses for finding in report.findings):
        parts.append("TAINTED")
    return "; ".join(parts)


def _arrival(report: Report) -> str:
    load = report.load
    limit = f"{load.max_concurrency} at once" if load.max_concurrency else "all at once"
    if load.request_rate is None:
        return limit
    return f"{load.request_rate:g} requests/s" + (f", {limit} at most" if load.max_concurrency else "")


def _headline(result: BenchResult) -> list[str]:
    memory = result.peak_pss_bytes
    return [
        result.backend,
        f"{result.tokens_per_sec:.1f}",
        f"{1000 / result.tokens_per_sec:.1f}" if result.tokens_per_sec else "-",
        "-" if memory is None else f"{memory / GB:.2f}",
        _mean(result.ttft_ms),
        _mean(result.tpot_ms),
    ]


def _ratios(report: Report) -> list[list[str]]:
    """A row per ratio that says something of its own: requests/s is that of tokens/s where all answers are complete."""
    found = {ratio.measure: ratio for ratio in report.ratios}
    return [
        [name, *(f"{value:.2f}x" for value in (found[measure].median, found[measure].low, found[measure].high))]
        for measure, name in _RATIO_NAMES.items()
        if measure in found
    ]


def _latencies(result: BenchResult) -> list[list[str]]:
    rows = (
        ("TTFT, to the first token", result.ttft_ms),
        ("ITL, between tokens", result.itl_ms),
        ("TPOT, per token after the first", result.tpot_ms),
        ("E2E, to the last token", result.e2e_ms),
    )
    return [[name, *_cells(values)] for name, values in rows]


def _cells(values: Spread | None) -> Sequence[str]:
    if values is None:
        return ["-"] * (len(_LATENCY) - 1)
    return [f"{value:.1f}" for value in (values.mean, values.p50, values.p90, values.p95, values.p99, values.max)]


def _counted(result: BenchResult, report: Report) -> str:
    cached = "unknown" if result.cached_tokens is None else str(result.cached_tokens)
    total = "" if result.total_tokens_per_sec is None else f", {result.total_tokens_per_sec:.1f} tokens/s with prompts"
    parts = [
        f"{result.num_requests} answered in {result.elapsed_sec:.2f} s ({result.qps:.2f} requests/s{total})",
        f"{result.failed} failed",
        f"{result.timed_out} timed out (limit {report.load.timeout_s:g} s)",
        *((f"{result.unfinished} unfinished",) if result.unfinished else ()),
        f"{result.output_tokens} output tokens (by {result.token_source})",
        f"{'unknown' if result.prompt_tokens is None else result.prompt_tokens} prompt tokens, {cached} from a cache",
    ]
    if result.goodput is not None:
        parts.append(f"goodput {result.goodput:.2f} requests/s")
    return "; ".join(parts) + "\n"


def _asked(workload: WorkloadFacts) -> str:
    salt = f"salt {workload.salt}" if workload.salt else "no salt: a warm cache may have helped"
    return f"texts: {workload.source}; seed {workload.seed}; {salt}"


def _mean(values: Spread | None) -> str:
    return "-" if values is None else f"{values.mean:.1f}"
