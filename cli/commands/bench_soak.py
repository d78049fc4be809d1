"""`llmctl bench soak`: a mixed load for a time, and whether anything is left behind when it is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ...engine.config import EngineConfig
from ...engine.load.progress import Progress
from ...kernels.errors import UsageError
from ..config_file import Config, choose_named
from ..console import Console
from ..exits import ExitCode
from ..options import EngineOptions, Json, parse_count
from ..sigterm import sigterm_like_ctrl_c

if TYPE_CHECKING:
    from ..bench.soak import Limits, Soak, SoakReport

DEFAULT_SECONDS = 60.0
TOKENS_PER_WORD = 8  # at most, of a model whose tokens are bytes


def bench_soak(
    context: typer.Context,
    config: EngineOptions,
    max_seconds: Annotated[
        float, typer.Option("--max-seconds", "--duration", metavar="S", help="How long to ask; 60 if nothing ends it.")
    ] = 0.0,
    max_requests: Annotated[
        int,
        typer.Option(
            "--max-requests", "--num-prompts", "-n", parser=parse_count, metavar="N",
            help="Requests; 0: as many as time allows.",
        ),
    ] = 0,
    max_concurrency: Annotated[
        int, typer.Option("--max-concurrency", parser=parse_count, metavar="N", help="Users that ask at once.")
    ] = 16,
    prompt_tokens: Annotated[
        int,
        typer.Option(
            "--prompt-tokens", "--random-input-len", parser=parse_count, metavar="N",
            help="Length of ordinary prompts, in words for a server.",
        ),
    ] = 128,
    output_tokens: Annotated[
        int,
        typer.Option(
            "--output-tokens", "--random-output-len", parser=parse_count, metavar="N", help="Longest answer."
        ),
    ] = 64,
    base_url: Annotated[
        str,
        typer.Option("--base-url", metavar="URL", help="Ask the OpenAI-compatible server there, not this process."),
    ] = "",
    api_key: Annotated[
        str, typer.Option("--api-key", metavar="KEY", envvar="OPENAI_API_KEY", help="Sent to the server.")
    ] = "",
    server_pid: Annotated[
        int | None, typer.Option("--server-pid", metavar="PID", help="The server's process here, to see its memory.")
    ] = None,
    request_timeout: Annotated[
        float, typer.Option("--request-timeout", metavar="S", help="Seconds after which a request has timed out.")
    ] = 600.0,
    interval: Annotated[float, typer.Option("--interval", metavar="S", help="Seconds between looks at memory.")] = 1.0,
    warmup_percent: Annotated[
        float, typer.Option("--warmup-percent", metavar="P", help="Part of the time that memory is not judged by.")
    ] = 25.0,
    memory_tolerance: Annotated[
        float, typer.Option("--memory-tolerance", metavar="P", help="Growth in percent that is no leak.")
    ] = 3.0,
    json: Json = False,
    file: Config = None,
) -> None:  # fmt: skip
    """Ask a mixture for a time and look for what is left behind.

    New, long and continued prompts, greedy and sampled, and clients that leave early. At the end no request may be
    open, every KV block must be free or cached, memory must not have grown after the warm-up, and no request may have
    failed: else the exit code is 1.
    """
    console: Console = context.obj
    config = msgspec.structs.replace(config, model=choose_named(config.model, file))
    limits = _limits(
        max_seconds, max_requests, max_concurrency, request_timeout, interval, warmup_percent, memory_tolerance
    )
    if min(prompt_tokens, output_tokens) < 1:
        raise UsageError(f"--prompt-tokens is {prompt_tokens} and --output-tokens {output_tokens}", "both count from 1")
    if base_url:
        from .bench import refuse_engine_options

        refuse_engine_options(config)
    elif server_pid is not None:
        raise UsageError("--server-pid says something about a server, and there is none", "give its --base-url")

    async def go(progress: Progress) -> SoakReport:
        lengths = prompt_tokens, output_tokens
        if base_url:
            bring_up = _server(config, lengths, limits, base_url, api_key, server_pid, progress)
        else:
            bring_up = _own_engine(config, lengths, limits, progress)
        async with bring_up as soak:
            return await soak.run()

    with sigterm_like_ctrl_c(console):
        with console.progress() as progress:
            found = asyncio.run(go(progress))
        if json:
            console.json(msgspec.to_builtins(found))
        else:
            _show(console, found)
        _end(console, found)


def _limits(
    seconds: float, requests: int, concurrency: int, timeout_s: float, interval_s: float, warmup: float, growth: float
) -> Limits:
    from ..bench.soak import Limits

    for name, value, low, high in (
        ("--max-seconds", seconds, 0, 1e8),
        ("--max-concurrency", concurrency, 1, 4096),
        ("--request-timeout", timeout_s, 1e-3, 1e8),
        ("--interval", interval_s, 1e-3, 1e6),
        ("--warmup-percent", warmup, 0, 90),
        ("--memory-tolerance", growth, 0, 100),
    ):
        if not low <= value <= high:
            raise UsageError(f"{name} is {value:g}, it must be from {low:g} to {high:g}")
    chosen = DEFAULT_SECONDS if not seconds and not requests else seconds
    return Limits(chosen, requests, concurrency, timeout_s, interval_s, warmup / 100, growth / 100)


@asynccontextmanager
async def _own_engine(
    config: EngineConfig, lengths: tuple[int, int], limits: Limits, progress: Progress
) -> AsyncIterator[Soak]:
    from ...engine.launch import launch
    from ...engine.request import SamplingParams
    from ..bench.made import ordinary_tokens
    from ..bench.mixture import Mixture
    from ..bench.soak import Soak
    from ..bench.soak_figures import of_engine
    from ..bench.targets import InProcess

    frontend = launch(config, progress=progress)
    try:
        greedy = InProcess(frontend, SamplingParams(temperature=0, ignore_eos=True))
        sampled = InProcess(frontend, SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True))
        units = ordinary_tokens(frontend.tokenizer)
        mixture = Mixture(config.seed, units, *lengths, _room(frontend.info.max_model_len, lengths[1]))
        yield Soak(greedy, sampled, mixture, limits, of_engine(frontend), progress)
    finally:
        await asyncio.to_thread(frontend.close)


@asynccontextmanager
async def _server(
    config: EngineConfig,
    lengths: tuple[int, int],
    limits: Limits,
    base_url: str,
    api_key: str,
    server_pid: int | None,
    progress: Progress,
) -> AsyncIterator[Soak]:
    from ...engine.request import SamplingParams
    from ..bench.http_target import COMPLETIONS, Endpoint, OpenAIServer, find_model, join_url, make_client
    from ..bench.made import WORDS
    from ..bench.mixture import LONG, Mixture
    from ..bench.soak import Soak
    from ..bench.soak_figures import of_server

    async with make_client() as client:
        progress("waiting for the server", 0, 0)
        model, context = await find_model(client, base_url, api_key, config.model, 0)
        endpoint = Endpoint(join_url(base_url, COMPLETIONS), False, model, api_key)
        pids = () if server_pid is None else (server_pid,)
        greedy = OpenAIServer(client, endpoint, SamplingParams(temperature=0), pids)
        sampled = OpenAIServer(client, endpoint, SamplingParams(temperature=0.8, top_p=0.95), pids)
        room = _room(context, lengths[1]) // TOKENS_PER_WORD if context else LONG * lengths[0]
        mixture = Mixture(config.seed, WORDS, *lengths, max(1, room))
        yield Soak(greedy, sampled, mixture, limits, of_server(client, base_url), progress)


def _room(context: int, output_tokens: int) -> int:
    """Tokens that a prompt may have. UsageError if the answer takes the whole context."""
    if output_tokens >= context:
        raise UsageError(
            f"--output-tokens is {output_tokens}, the context holds {context} tokens",
            f"use at most {context // 2}, or raise --max-model-len",
        )
    return context - output_tokens


def _show(console: Console, found: SoakReport) -> None:
    from ...engine.sizes import format_bytes

    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found.kinds.items()))
    end = found.end
    rows = [
        ["requests", f"{found.requests}", kinds],
        ["answered", f"{found.answered}", f"{found.output_pieces} pieces of answers"],
        ["left early", f"{found.left}", ""],
        ["failed", f"{found.failed + found.timed_out}", f"{found.timed_out} of them timed out"],
        *([["", f"{count}", error] for error, count in found.errors.items()]),
        ["open at the end", _count(end.open), ""],
        [
            "KV blocks lost",
            _count(end.lost_blocks),
            f"{_count(end.blocks_free)} free, {_count(end.blocks_cached)} cached",
        ],
    ]
    if (memory := found.memory) is not None:
        rows.append(
            [
                "memory",
                format_bytes(memory.mean_bytes),
                f"{100 * memory.growth:+.1f} % over {memory.samples} looks after the warm-up, "
                f"{100 * memory.spread:.1f} % between least and most",
            ]
        )
    console.table(["", ">", ""], rows, title=f"{found.backend}: {found.seconds:.0f} s")
    for note in found.notes:
        console.say(note)


def _count(value: int | None) -> str:
    return "?" if value is None else str(value)


def _end(console: Console, found: SoakReport) -> None:
    """The exit code that the soak deserves."""
    if found.leaks:
        console.error("; ".join(found.leaks), "the samples that `--json` prints show since when")
    failed = found.failed + found.timed_out
    if failed:
        console.error(f"{failed} of {found.requests} requests failed: {next(iter(found.errors))}")
    if found.leaks or failed:
        raise typer.Exit(ExitCode.FAILURE)
    if found.interrupted:
        console.say("interrupted: nothing was left behind until then", "bold")
        raise typer.Exit(ExitCode.INTERRUPTED)
