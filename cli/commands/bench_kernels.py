"""`llmctl bench kernels`: how near every kernel comes to what this machine can do."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from ...kernels.errors import UsageError
from ..console import Console
from ..options import Json, parse_count


def bench_kernels(
    context: typer.Context,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only", metavar="TEXT,...",
            help="Only kernels with one of these in their name, such as `linear`, `int4g32/m1/` or `decode`.",
        ),
    ] = None,
    model_size: Annotated[
        list[str] | None,
        typer.Option("--model-size", metavar="SIZE,...", help="Only shapes of 0.1B, 0.5B, 1.5B or 8B models."),
    ] = None,
    rows: Annotated[
        list[str] | None, typer.Option("--rows", metavar="N,...", help="Only so many rows at once: 1, 4, 16, 64, 512.")
    ] = None,
    isa: Annotated[
        str, typer.Option("--isa", metavar="NAME", help="The kernels of this instruction set, not the best ones.")
    ] = "",
    threads: Annotated[
        int, typer.Option("--threads", "-t", parser=parse_count, metavar="N", help="0: one per physical core.")
    ] = 0,
    time_limit: Annotated[
        float, typer.Option("--time-limit", metavar="SECONDS", help="What is not measured by then is skipped.")
    ] = 300.0,
    memory_limit: Annotated[
        int, typer.Option("--memory-limit", parser=parse_count, metavar="BYTES", help="What needs more is skipped.")
    ] = 1 << 30,
    json: Json = False,
) -> None:  # fmt: skip
    """Measure every kernel beside the machine's own peaks.

    Shapes are those of models of 0.1, 0.5, 1.5 and 8 billion weights. Each kernel's time gives what it moved and
    computed per second, and how much that is of the nearer roof: memory or cache bandwidth, or arithmetic.
    """
    from ...kernels.device import default_threads
    from ..bench.roofline.measure import Wanted, measure, pick, rows_of
    from ..bench.roofline.shapes import ROWS, SHAPES
    from ..bench.roofline.table import show

    console: Console = context.obj
    if not time_limit > 0 or memory_limit < 64 << 20:
        raise UsageError(
            f"--time-limit is {time_limit:g} s and --memory-limit {memory_limit} bytes",
            "give it some time, and 64M or more",
        )
    wanted = Wanted(
        tuple(filter(None, ",".join(only or ()).split(","))),
        pick(",".join(model_size or ()), "--model-size", [shape.size for shape in SHAPES]),
        rows_of(",".join(rows or ()), ROWS),
        isa,
        time_limit,
        memory_limit,
    )
    with console.progress() as progress:
        found = measure(wanted, threads or default_threads(), progress)
    if json:
        console.json(msgspec.to_builtins(found))
    else:
        show(console, found)
