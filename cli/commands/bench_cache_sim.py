"""`llmctl bench cache-sim`: what the prefix cache would serve of a trace of requests, by size and by eviction."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...engine.config import EngineConfig
from ...kernels.errors import UsageError
from ..console import Console
from ..options import Json, parse_count

if TYPE_CHECKING:
    from ..bench.cache_sim import Served

_DEFAULT = EngineConfig()


def bench_cache_sim(
    context: typer.Context,
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="A JSONL file of requests in order of arrival, each with `tokens` (and `prompt_len`, if the answer's "
            "are among them) or with `hash_ids`, one for each block.",
        ),
    ],
    sizes: Annotated[
        str,
        typer.Option(
            "--sizes", metavar="N,...", help="Cache sizes in blocks; else 1 to 100 % of the trace's distinct blocks."
        ),
    ] = "",
    block_size: Annotated[
        int, typer.Option("--block-size", parser=parse_count, metavar="N", help="Tokens in one block.")
    ] = _DEFAULT.block_size,
    k: Annotated[
        int, typer.Option("--cache-eviction-k", parser=parse_count, metavar="N", help="K of lru-k.")
    ] = _DEFAULT.cache_eviction_k,
    json: Json = False,
) -> None:
    """Show what share of the prompts' tokens the prefix cache would have had.

    The trace is run through the engine's own cache without a model, with lru and lru-k for each size.
    """
    from ..bench.cache_sim import read_trace, serve, sizes_of

    console: Console = context.obj
    asked = [parse_count(text) for text in sizes.split(",") if text.strip()]
    if min(asked, default=1) < 1 or block_size < 1 or k < 1:
        raise UsageError("a cache has at least one block of one token, and K is at least 1")
    requests = read_trace(trace, block_size)
    most = serve(requests, requests.total_blocks, 1)
    found = []
    with console.progress() as progress:
        tried = sizes_of(most.kept, asked)
        for number, blocks in enumerate(tried):
            progress("caches", number, len(tried))
            found.append((serve(requests, blocks, 1), serve(requests, blocks, k)))
        progress("caches", len(tried), len(tried))
    if json:
        console.json(
            {
                "requests": len(requests.requests),
                "block_size": requests.block_size,
                "distinct_blocks": most.kept,
                "best_hit_rate": most.hit_rate,
                "k": k,
                "sizes": [
                    {"blocks": lru.blocks, "lru": _as_json(lru), "lru-k": _as_json(lru_k)} for lru, lru_k in found
                ],
            }
        )
        return
    console.table(
        [">blocks", ">of the content", ">hits, lru", f">hits, lru-{k}", ">evicted and asked again, lru", f">lru-{k}"],
        [
            [
                str(lru.blocks),
                f"{lru.blocks / most.kept:.0%}",
                *(f"{each.hit_rate:.2%}" for each in (lru, lru_k)),
                *(f"{each.regrets} of {each.evictions}" for each in (lru, lru_k)),
            ]
            for lru, lru_k in found
        ],
        title=f"{len(requests.requests)} requests, {most.kept} distinct blocks; at most {most.hit_rate:.2%} can hit",
    )


def _as_json(served: Served) -> dict[str, float]:
    return {
        "hit_rate": served.hit_rate,
        "hit_tokens": served.hit_tokens,
        "evictions": served.evictions,
        "evicted_reused": served.regrets,
    }
