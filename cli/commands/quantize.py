"""`llmctl quantize`: a model in, a 4-bit checkpoint and what it is worth out."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from ...engine.config import environment
from ..config_file import Config, choose_named
from ..console import Console
from ..exits import ExitCode
from ..expand import Built
from ..options import Json
from ..quantize.asked import Asked
from ..quantize.options import asked_options
from ..sigterm import sigterm_like_ctrl_c

if TYPE_CHECKING:
    from ..quantize.preflight import Work
    from ..quantize.run import Outcome


def quantize(
    context: typer.Context,
    asked: Annotated[Asked, Built(asked_options)],
    file: Config = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be made and what that needs, from headers alone.")
    ] = False,
    json: Json = False,
) -> None:
    """Quantize a model to 4 bits, and measure what that loses.

    Makes a folder in AutoAWQ's layout, which other tools load too. In it is `llmctl_quality.json` with size,
    perplexity, KL divergence to the original and speed, measured on the checkpoint as it lies on disk.
    """
    # Read when torch is loaded. Its threads spin for each other otherwise, which on a busy machine takes five times the
    # processor time of the work itself.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    from ...engine.load.checkpoint import open_checkpoint
    from ...engine.load.hub import resolve
    from ...kernels.device import read_machine
    from ..quantize.preflight import check_output, check_room, check_text, prepare
    from ..quantize.run import run

    console: Console = context.obj
    with sigterm_like_ctrl_c(console):
        settings = environment()
        with console.progress() as progress:
            source = resolve(choose_named(asked.model, file), environment=settings, progress=progress)
        work = prepare(open_checkpoint(source), asked)
        check_output(work, asked.overwrite)
        check_text(work, asked)
        available = read_machine().memory_available
        if dry_run:
            show_plan(console, work, asked, available, json)
            return
        check_room(work, available)
        announce(console, work, asked)
        torch.set_num_threads(asked.threads)
        with console.progress() as progress:
            outcome = run(work, asked, settings, progress)
        show(console, work, asked, outcome, json)
        failed = [str(gate) for gate in asked.fail_if if gate.fails(outcome.metrics)]
        if failed:
            console.error(f"`{work.output}` is written, but {' and '.join(failed)}")
            raise typer.Exit(ExitCode.FAILURE)


def announce(console: Console, work: Work, asked: Asked) -> None:
    """Say what is about to happen, above all what the user may not expect."""
    from ..quantize.report import title

    console.say(title(work, asked.scheme))
    if work.is_dequantized:
        formats = ", ".join(work.source_formats)
        console.say(f"the model is quantized already ({formats}): its values are unpacked, and quantized again")
    if work.stale and not work.scales:
        console.say(
            f"{len(work.stale)} scales of the model's KV cache are left out, as they are not for these weights: "
            "`--kv-cache-scheme fp8` measures new ones"
        )


def show_plan(console: Console, work: Work, asked: Asked, available: int, json: bool) -> None:
    """What `--dry-run` prints."""
    from ...engine.sizes import format_bytes
    from ..quantize.preflight import free_bytes, linear_bits
    from ..quantize.report import title

    free = free_bytes(work.output)
    if json:
        console.json(
            {
                "model": work.name,
                "output": str(work.output),
                "method": asked.scheme.method,
                "group_size_asked": asked.scheme.group_size,
                "group_size": work.format.group,
                "linears": len(work.linears),
                "kv_cache_scheme": asked.kv_cache_scheme if work.scales else None,
                "dequantized_first": work.is_dequantized,
                "output_bytes": work.output_bytes,
                "scratch_bytes": work.scratch,
                "disk_free_bytes": free,
                "memory_bytes": work.memory,
                "memory_available_bytes": available,
            }
        )
        return
    source = ", ".join(work.source_formats)
    console.table(
        ["", ">size", ""],
        [
            ["model", format_bytes(work.source_bytes), source],
            [f"output `{work.output}`", format_bytes(work.output_bytes), f"{len(work.linears)} Linears quantized, "
             f"{linear_bits(work):.2f} bits per weight"],
            ["disk while measuring", format_bytes(work.output_bytes + work.scratch), f"{format_bytes(free)} are free"],
            ["memory", format_bytes(work.memory), f"at most, estimated; {format_bytes(available)} are available"],
        ],
        title=title(work, asked.scheme),
    )  # fmt: skip


def show(console: Console, work: Work, asked: Asked, outcome: Outcome, json: bool) -> None:
    """The result: a table and what it is of, or the quality card."""
    from ..quantize.report import table_rows, title

    if json:
        console.json(outcome.card | {"output": str(work.output)})
        return
    columns = ["", ">before", ">after", ""]
    console.table(columns, table_rows(work, outcome.quality, outcome.speed), title=title(work, asked.scheme))
    samples = outcome.samples
    if samples.calibration is not None:
        count, length = samples.calibration.shape
        console.data(f"calibrated on {count} x {length} tokens: {samples.calibration_text}")
    console.data(f"measured on {outcome.quality.model.tokens} tokens: {samples.evaluation_text}")
    if work.is_dequantized:
        console.data(f"before: the values of the model as it is stored ({', '.join(work.source_formats)})")
    console.data(f"wrote {work.output}")
