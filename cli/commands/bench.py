"""`llmctl bench`: how fast an engine answers, here or behind a URL, alone or beside a peer."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ...engine.config import EngineConfig
from ...kernels.errors import UsageError
from ..bench.dataset_options import WorkloadOptions
from ..bench.options import Loads, ReportOptions, Reports, TargetOptions, Targets, Workloads
from ..config_file import Config, choose_named
from ..console import Console
from ..exits import ExitCode
from ..options import EngineOptions, parse_count
from ..sigterm import sigterm_like_ctrl_c

if TYPE_CHECKING:
    from ..bench.report import Report


def bench(
    context: typer.Context,
    config: EngineOptions,
    workload: Workloads,
    load: Loads,
    target: Targets,
    report: Reports,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show where the time of one decode step goes, op by op, and exit.")
    ] = False,
    profile_context: Annotated[
        int, typer.Option("--profile-context", parser=parse_count, metavar="N", help="Tokens before that step.")
    ] = 512,
    file: Config = None,
) -> None:
    """Measure throughput, latencies and memory.

    Without --base-url the engine runs in this process. Answers are greedy. Prompts are salted, so that no cache of an
    earlier run helps; failed requests are counted apart; figures that a guard finds unfit are withheld.
    """
    console: Console = context.obj
    config = msgspec.structs.replace(config, model=choose_named(config.model, file))
    if profile:
        with sigterm_like_ctrl_c(console):
            _profile(console, config, workload, target, report, profile_context)
        return
    if target.base_url:
        refuse_engine_options(config)
    from ..bench.run import Options, run

    with sigterm_like_ctrl_c(console):
        with console.progress() as progress:
            found = asyncio.run(run(Options(config, workload, load, target, report), progress))
        _tell(console, found, report)


def _tell(console: Console, found: Report, asked: ReportOptions) -> None:
    """Print and save a report, and end with the exit code that it deserves."""
    from ..bench.report import save
    from ..bench.tables import show

    if asked.json:
        console.json(msgspec.to_builtins(found))
    else:
        show(console, found)
    if asked.folder is not None:
        console.say(f"saved to {save(found, asked.folder, asked.filename)}")
    if found.refused:
        reasons = "; ".join(finding.message for finding in found.findings if finding.refuses)
        console.error(f"the figures are withheld: {reasons}", "mend that, or print them with --allow-tainted")
        raise typer.Exit(ExitCode.FAILURE)
    if found.partial:
        console.say("interrupted: these are the requests that were answered until then", "bold")
        raise typer.Exit(ExitCode.INTERRUPTED)


def _profile(
    console: Console,
    config: EngineConfig,
    workload: WorkloadOptions,
    target: TargetOptions,
    asked: ReportOptions,
    context: int,
) -> None:
    from ..bench.profile import profile, show

    if workload != WorkloadOptions(seed=workload.seed) or target.base_url or target.against or asked.folder:
        raise UsageError("--profile measures one step of the engine in this process: it takes no requests, no "
                         "server, no peer and saves no file", "leave those options out")  # fmt: skip
    if context < 1:
        raise UsageError(f"--profile-context is {context}, it must be at least 1")
    with console.progress() as progress:
        found = profile(config, context, progress)
    if asked.json:
        console.json(msgspec.to_builtins(found))
    else:
        show(console, found)


def refuse_engine_options(config: EngineConfig) -> None:
    """A server was started with options of its own; ours would be ignored."""
    plain = EngineConfig(model=config.model, seed=config.seed)
    changed = [
        name for name, value in msgspec.structs.asdict(config).items() if value != msgspec.structs.asdict(plain)[name]
    ]
    if changed:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in changed)
        raise UsageError(f"{names} cannot change a server that runs already", "give them where the server is started")
