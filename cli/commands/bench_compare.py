"""`llmctl bench compare`: servers beside one another on the same machine, asked the same in turn."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ...engine.load.progress import Progress
from ...kernels.errors import UsageError
from ..console import Console
from ..exits import ExitCode
from ..options import Json, parse_count

if TYPE_CHECKING:
    from ..bench.compare.scenarios import Prompts
    from ..bench.compare.subjects import Subject

DEFAULT_THREADS = 2


def bench_compare(
    context: typer.Context,
    subject: Annotated[
        list[str] | None,
        typer.Option(
            "--subject", metavar="NAME=KIND:...",
            help="Whom to compare, twice or more: NAME=llmctl:MODEL[:OPTIONS], "
            "NAME=llama-server:PROGRAM:MODEL.gguf[:OPTIONS] or NAME=url:http://... Ratios are the first one's.",
        ),
    ] = None,
    only: Annotated[
        str, typer.Option("--only", metavar="NAME,...", help="Only these scenarios; the manual says which there are.")
    ] = "",
    rounds: Annotated[
        int, typer.Option("--rounds", parser=parse_count, metavar="N", help="Times that each is asked everything.")
    ] = 5,
    threads: Annotated[
        int, typer.Option("--threads", "-t", parser=parse_count, metavar="N", help="Threads of each server.")
    ] = DEFAULT_THREADS,
    cpus: Annotated[
        str,
        typer.Option("--cpus", metavar="N,...", help="CPUs for servers and client; by default as many as threads."),
    ] = "",
    tokenizer: Annotated[
        str,
        typer.Option("--tokenizer", metavar="MODEL", help="To make prompts with; by default the first known model's."),
    ] = "",
    workload: Annotated[
        Path | None, typer.Option("--workload", metavar="FILE", help="Prompts as token ids, in JSON; see the manual.")
    ] = None,
    request_timeout: Annotated[
        float, typer.Option("--request-timeout", metavar="S", help="Seconds after which a request has failed.")
    ] = 900.0,
    ready_timeout: Annotated[
        float, typer.Option("--ready-timeout", metavar="S", help="Seconds that a server may take to start.")
    ] = 120.0,
    salt: Annotated[
        str | None, typer.Option("--salt", metavar="TEXT", help="The salt of an earlier run, to repeat its prompts.")
    ] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Compare servers: speed, latency, start-up and memory, with ratios.

    Subjects take turns within each round, on the same CPUs, client included, with the same token ids, greedily and
    for answers of an exact length. Ratios are made within a round; a round with a failed request does not count.
    """
    import asyncio

    from ..bench.compare.run import Settings, check_fit, run
    from ..bench.compare.scenarios import choose
    from ..bench.compare.subjects import parse_subjects
    from ..bench.compare.tables import show
    from ..bench.compare.terminate import cancelled_by_sigterm

    console: Console = context.obj
    subjects = parse_subjects(subject or [])
    if not 1 <= threads <= 1024:
        raise UsageError(f"--threads is {threads}, it must be from 1 to 1024")
    settings = Settings(
        rounds, threads, parse_cpus(cpus, threads), request_timeout, ready_timeout, salt or secrets.token_hex(4)
    )
    names = choose(only)
    with console.progress() as progress:
        prompts = _prompts(workload, tokenizer, subjects, names, progress)
        check_fit(settings, subjects, prompts.scenarios)
        found = asyncio.run(cancelled_by_sigterm(run(subjects, prompts, settings, progress)))
    if json:
        console.json(msgspec.to_builtins(found))
    else:
        show(console, found)
    if found.partial:
        console.say("interrupted: these are the rounds that were measured until then", "bold")
        raise typer.Exit(ExitCode.INTERRUPTED)


def parse_cpus(text: str, threads: int) -> tuple[int, ...]:
    """The CPUs that are named, by default the first `threads` that this process may run on."""
    if not text:
        return tuple(sorted(os.sched_getaffinity(0))[:threads])
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise UsageError(f"--cpus is `{text}`", "give numbers such as 0,1") from error


def _prompts(
    workload: Path | None, tokenizer: str, subjects: Sequence[Subject], names: Sequence[str], progress: Progress
) -> Prompts:
    from ...engine.tokenizer import Tokenizer
    from ..bench.compare.scenarios import make_prompts, read_prompts
    from ..bench.run import packed_folder

    if workload is not None:
        return read_prompts(workload, names)
    model = tokenizer or next((subject.model for subject in subjects if subject.model), "")
    if not model:
        raise UsageError("no subject's model is known here, and prompts are made of its tokens", "name it with "
                         "--tokenizer, or give prompts with --workload")  # fmt: skip
    return make_prompts(Tokenizer(packed_folder(model, progress)), names)
