"""`llmctl bench scheduler`: the CPU time that scheduling a step takes, without a model."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from ...engine.config import EngineConfig
from ...kernels.errors import UsageError
from ..console import Console
from ..options import Json, parse_count

_DEFAULT = EngineConfig()


def bench_scheduler(
    context: typer.Context,
    running: Annotated[
        str, typer.Option("--running", metavar="N,...", help="How many sequences decode side by side.")
    ] = "1,64,256",
    steps: Annotated[
        int, typer.Option("--steps", parser=parse_count, metavar="N", help="Steps that are measured.")
    ] = 1000,
    scheduling_policy: Annotated[
        str, typer.Option("--scheduling-policy", metavar="NAME", help="Who goes first.")
    ] = _DEFAULT.scheduling_policy,
    block_size: Annotated[
        int, typer.Option("--block-size", parser=parse_count, metavar="N", help="Tokens in one KV block.")
    ] = _DEFAULT.block_size,
    json: Json = False,
) -> None:
    """Measure the CPU time that the scheduler and the prefix tree take for a step.

    A runner that computes nothing stands in for the model. Prompts share nothing, so the tree never serves a token.
    """
    from ..bench.scheduling import step_cost

    console: Console = context.obj
    counts = [parse_count(text) for text in running.split(",") if text.strip()]
    config = EngineConfig(scheduling_policy=scheduling_policy, block_size=block_size)
    config.check()
    if not counts or min(counts) < 1 or steps < 1:
        raise UsageError(f"--running is `{running}` and --steps {steps}", "both count from 1")
    found = []
    with console.progress() as progress:
        for number, count in enumerate(counts):
            progress("sequences", number, len(counts))
            found.append(step_cost(config, count, steps))
        progress("sequences", len(counts), len(counts))
    if json:
        console.json({"costs": [msgspec.structs.asdict(cost) for cost in found]})
        return
    console.table(
        [">running", ">schedule", ">update", ">together", ">of it the tree"],
        [
            [
                str(cost.running),
                *(f"{us:.0f} us" for us in (cost.schedule_us, cost.update_us, cost.total_us, cost.tree_us)),
            ]
            for cost in found
        ],
        title=f"CPU time for a step, mean of {steps}",
    )
