"""The options of `llmctl bench` apart from the engine's, and the records that they become. Names are vLLM's first."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ...kernels.errors import UsageError
from ..expand import Built
from ..options import Json, Seed, parse_count
from .dataset_options import DEFAULTS, MOST, WorkloadOptions
from .dataset_options import check as check_workload
from .load_shape import Load

AGAINST = ("transformers",)
LATENCIES = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a run goes, as asked; None means: as suits the dataset. `salt` "" is none."""

    max_concurrency: int | None
    request_rate: float
    burstiness: float
    num_warmups: int
    rounds: int | None
    timeout_s: float
    salt: str


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """What to measure: this process's engine if `base_url` is empty, else a server; and whom to set beside it."""

    base_url: str
    endpoint: str
    tokenizer: str
    api_key: str
    ready_timeout_s: float
    server_pid: int | None
    against: str


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What becomes of the figures. `folder` None: nothing is saved."""

    json: bool
    folder: Path | None
    filename: str
    limits_ms: dict[str, float]
    allow_tainted: bool


def _number(text: str | float) -> float:
    try:
        return float(text)
    except ValueError as error:
        raise typer.BadParameter(f"`{text}` is not a number") from error


def workload_options(
    dataset: Annotated[
        str,
        typer.Option("--dataset", "--dataset-name", metavar="NAME", help=f"What to ask: {', '.join(DEFAULTS)}."),
    ] = "synthetic",
    dataset_path: Annotated[
        Path | None,
        typer.Option("--dataset-path", metavar="PATH", help="The file of jsonl or sharegpt, or texts for pg19."),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", "-n", parser=parse_count, metavar="N", help="Requests in a round.")
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--prompt-tokens", "--random-input-len", "--input-len", parser=parse_count, metavar="N",
            help="Length of prompts.",
        ),
    ] = None,
    output_tokens: Annotated[
        int | None,
        typer.Option(
            "--output-tokens", "--random-output-len", "--output-len", parser=parse_count, metavar="N",
            help="Length of answers.",
        ),
    ] = None,
    range_ratio: Annotated[
        float,
        typer.Option(
            "--random-range-ratio", parser=_number, metavar="R",
            help="Lengths vary evenly between (1 - R) and (1 + R) times what was asked.",
        ),
    ] = 0.0,
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="Whether answers go on to their full length; by default where the dataset has no answers of its own.",
        ),
    ] = None,
    seed: Seed = None,
) -> WorkloadOptions:  # fmt: skip
    """The checked workload that these options ask for."""
    options = WorkloadOptions(
        dataset, dataset_path, num_prompts, prompt_tokens, output_tokens, range_ratio, ignore_eos, seed or 0
    )
    check_workload(options)
    return options


def load_options(
    max_concurrency: Annotated[
        int | None,
        typer.Option(
            "--max-concurrency", parser=parse_count, metavar="N", help="Open requests at most; 0: no limit."
        ),
    ] = None,
    request_rate: Annotated[
        float,
        typer.Option(
            "--request-rate", parser=_number, metavar="R",
            help="Requests per second; inf: each as soon as there is room.",
        ),
    ] = math.inf,
    burstiness: Annotated[
        float,
        typer.Option(
            "--burstiness", parser=_number, metavar="B",
            help="1: arrivals as of a Poisson process; below: burstier; inf: evenly spaced.",
        ),
    ] = 1.0,
    num_warmups: Annotated[
        int, typer.Option("--num-warmups", parser=parse_count, metavar="N", help="Requests before the first round.")
    ] = 1,
    rounds: Annotated[
        int | None,
        typer.Option("--rounds", parser=parse_count, metavar="N", help="Times that the whole workload is sent."),
    ] = None,
    request_timeout: Annotated[
        float,
        typer.Option(
            "--request-timeout", parser=_number, metavar="S", help="Seconds after which a request has timed out."
        ),
    ] = 600.0,
    salt: Annotated[
        str | None, typer.Option("--salt", metavar="TEXT", help="The salt of an earlier run, to repeat its prompts.")
    ] = None,
    no_salt: Annotated[
        bool, typer.Option("--no-salt", help="Send prompts as they are, also to a cache that knows them.")
    ] = False,
) -> LoadOptions:  # fmt: skip
    """The checked load that these options ask for."""
    Load(max_concurrency or 0, request_rate, burstiness).check()
    for name, value, least in (("--rounds", rounds, 1), ("--num-warmups", num_warmups, 0)):
        if value is not None and not least <= value <= MOST:
            raise UsageError(f"{name} is {value}, it must be from {least} to {MOST}")
    if not request_timeout > 0:
        raise UsageError(f"--request-timeout is {request_timeout:g}, it must be above 0")
    if salt is not None and (no_salt or not salt):
        raise UsageError("--salt needs a text and excludes --no-salt")
    chosen = "" if no_salt else salt or secrets.token_hex(4)
    return LoadOptions(max_concurrency, request_rate, burstiness, num_warmups, rounds, request_timeout, chosen)


def target_options(
    base_url: Annotated[
        str,
        typer.Option("--base-url", metavar="URL", help="Measure the OpenAI-compatible server there, not this process."),
    ] = "",
    endpoint: Annotated[
        str, typer.Option("--endpoint", metavar="PATH", help="/v1/completions or /v1/chat/completions.")
    ] = "",
    tokenizer: Annotated[
        str,
        typer.Option("--tokenizer", metavar="MODEL", help="The server's model as it is here, to count prompts with."),
    ] = "",
    api_key: Annotated[
        str, typer.Option("--api-key", metavar="KEY", envvar="OPENAI_API_KEY", help="Sent to the server.")
    ] = "",
    ready_timeout: Annotated[
        float,
        typer.Option(
            "--ready-check-timeout-sec", parser=_number, metavar="S", help="Seconds to wait for the server to start."
        ),
    ] = 0.0,
    server_pid: Annotated[
        int | None, typer.Option("--server-pid", metavar="PID", help="The server's process here, to see its memory.")
    ] = None,
    against: Annotated[
        str, typer.Option("--against", metavar="NAME", help="Send everything to this peer as well: transformers.")
    ] = "",
) -> TargetOptions:  # fmt: skip
    """The checked target that these options ask for."""
    if against and against not in AGAINST:
        raise UsageError(f"--against is `{against}`", f"choose one of: {', '.join(AGAINST)}")
    if not base_url:
        for name, value in (
            ("--endpoint", endpoint),
            ("--tokenizer", tokenizer),
            ("--ready-check-timeout-sec", ready_timeout),
            ("--server-pid", server_pid),
        ):
            if value:
                raise UsageError(f"{name} says something about a server, and there is none", "give its --base-url")
    if base_url and against and not tokenizer:
        raise UsageError("--against needs the server's model on this machine", "name it with --tokenizer")
    return TargetOptions(base_url, endpoint, tokenizer, api_key, ready_timeout, server_pid, against)


def report_options(
    json: Json = False,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write the JSON to a file as well.")] = False,
    result_dir: Annotated[
        Path | None, typer.Option("--result-dir", metavar="DIR", help="Where that file goes; saves.")
    ] = None,
    result_filename: Annotated[
        str, typer.Option("--result-filename", metavar="NAME", help="What that file is called; saves.")
    ] = "",
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            "--goodput", metavar="LIMIT",
            help="Count answers that keep limits in ms, such as `ttft:200 tpot:50`; repeatable.",
        ),
    ] = None,
    allow_tainted: Annotated[
        bool, typer.Option("--allow-tainted", help="Print figures that a guard would withhold.")
    ] = False,
) -> ReportOptions:  # fmt: skip
    """What is to become of the figures."""
    saves = save_result or result_dir is not None or bool(result_filename)
    if Path(result_filename).name != result_filename:
        raise UsageError(f"--result-filename is `{result_filename}`, which holds a folder", "name it with --result-dir")
    folder = (result_dir or Path()) if saves else None
    return ReportOptions(json, folder, result_filename, parse_goodput(goodput or ()), allow_tainted)


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Limits in milliseconds out of `ttft:200 tpot:50`."""
    limits: dict[str, float] = {}
    for word in " ".join(texts).replace(",", " ").split():
        name, _, value = word.partition(":")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if name not in LATENCIES or not limits[name] > 0:
            raise UsageError(
                f"--goodput has `{word}`", f"give limits in ms such as `ttft:200` of {', '.join(LATENCIES)}"
            )
    return limits


Workloads = Annotated[WorkloadOptions, Built(workload_options)]
Loads = Annotated[LoadOptions, Built(load_options)]
Targets = Annotated[TargetOptions, Built(target_options)]
Reports = Annotated[ReportOptions, Built(report_options)]
