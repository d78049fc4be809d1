"""The report of a run: every figure, what it was made of, and enough about machine and options to judge or repeat it.

`--json` prints it and `--save-result` writes it; both hold every request, so that all figures can be worked out again.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from ... import __version__
from ...engine.messages import EngineInfo, EngineStats
from ...kernels.device import Machine
from ...kernels.errors import UsageError
from .drive import Round
from .guards import Finding
from .measures import BenchResult, Spread

Option = bool | int | float | str | None

SCHEMA = 1
PACKAGES = ("numpy", "tokenizers", "httpx")
PEER_PACKAGES = ("torch", "transformers")


class WorkloadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked. `stand_in`: the texts are not those of the dataset; `digest` is equal for equal workloads."""

    dataset: str
    source: str
    stand_in: bool
    notes: tuple[str, ...]
    num_prompts: int
    prompt_form: str
    prompt_tokens_mean: float | None
    output_tokens_mean: float
    ignore_eos: bool
    seed: int
    salt: str
    digest: str


class LoadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How it was sent; `request_rate` and `burstiness` are None where infinite, `goodput_ms` are its limits."""

    max_concurrency: int
    request_rate: float | None
    burstiness: float | None
    num_warmups: int
    rounds: int
    timeout_s: float
    goodput_ms: dict[str, float]


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """Where figures come from. `load_average` is (1, 5, 15 minutes) before and after: who else was busy."""

    started: str
    machine: Machine
    system: str
    versions: dict[str, str]
    model: str
    engine: EngineInfo | None
    options: dict[str, Option]
    load_average: tuple[tuple[float, float, float], tuple[float, float, float]]


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """One measure of the first backend divided by the same of `against`, round by round."""

    measure: str
    against: str
    median: float
    low: float
    high: float


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """What our engine drafted in the whole run, warm-up included.

    acceptance  share of the drafted tokens that stood, None if there were none
    length      mean number of tokens that a row with drafts gave
    places      of all drafts, the share whose first, second, ... token stood
    """

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    acceptance: float | None
    length: float | None
    places: tuple[float, ...] = ()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run. `results` has one entry per backend over all of its rounds; none if a finding refuses them."""

    schema_version: int = SCHEMA
    provenance: Provenance
    workload: WorkloadFacts
    load: LoadFacts
    results: tuple[BenchResult, ...]
    ratios: tuple[Ratio, ...]
    findings: tuple[Finding, ...]
    speculation: Speculation | None = None
    partial: bool
    refused: bool
    rounds: tuple[Round, ...]


RATIO_MEASURES: dict[str, Callable[[BenchResult], float | None]] = {
    "tokens_per_sec": lambda result: result.tokens_per_sec,
    "qps": lambda result: result.qps,
    "ttft_ms": lambda result: _mean(result.ttft_ms),
    "tpot_ms": lambda result: _mean(result.tpot_ms),
    "e2e_ms": lambda result: _mean(result.e2e_ms),
    "peak_pss_bytes": lambda result: result.peak_pss_bytes,
}


def ratios(ours: Sequence[BenchResult], theirs: Sequence[BenchResult]) -> tuple[Ratio, ...]:
    """Ours over theirs, results of the same rounds in the same order; a measure that one side lacks is left out."""
    found = []
    for name, measure in RATIO_MEASURES.items():
        pairs = [(measure(a), measure(b)) for a, b in zip(ours, theirs, strict=True)]
        values = [a / b for a, b in pairs if a and b]
        if values and len(values) == len(pairs):
            median = statistics.median(values)
            found.append(
                Ratio(measure=name, against=theirs[0].backend, median=median, low=min(values), high=max(values))
            )
    return tuple(found)


def speculation(stats: EngineStats) -> Speculation:
    """The engine's counts as figures."""
    return Speculation(
        drafts=stats.drafts,
        draft_tokens=stats.draft_tokens,
        accepted_tokens=stats.accepted_tokens,
        acceptance=stats.accepted_tokens / stats.draft_tokens if stats.draft_tokens else None,
        length=1 + stats.accepted_tokens / stats.drafts if stats.drafts else None,
        places=tuple(stood / stats.drafts for stood in stats.accepted_per_position),
    )


def versions(peers: bool) -> dict[str, str]:
    """Versions of what took part."""
    found = {"llmctl": __version__, "python": platform.python_version()}
    for name in (*PACKAGES, *(PEER_PACKAGES if peers else ())):
        found[name] = importlib.metadata.version(name)
    return found


def load_average() -> tuple[float, float, float]:
    """Runnable processes over 1, 5 and 15 minutes."""
    return os.getloadavg()


def save(report: Report, folder: Path, name: str) -> Path:
    """Write the report to a file that is complete once it is there; returns its path. Nothing is written over."""
    path = folder / (name or default_name(report))
    if path.exists():
        raise UsageError(f"`{path}` exists", "choose another --result-filename")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".bench-") as temporary:
            whole = Path(temporary) / path.name
            whole.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
            os.rename(whole, path)
    except OSError as error:
        raise UsageError(f"cannot write `{path}`: {error.strerror}", "choose another --result-dir") from error
    return path


def default_name(report: Report) -> str:
    """A file name that says what was measured and when."""
    when = datetime.fromisoformat(report.provenance.started).strftime("%Y%m%d-%H%M%S")
    model = "".join(c if c.isalnum() or c in "-._" else "-" for c in report.provenance.model)
    return f"bench-{model}-{report.workload.dataset}-{when}.json"


def _mean(values: Spread | None) -> float | None:
    return None if values is None else values.mean
