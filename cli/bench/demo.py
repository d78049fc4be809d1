"""`python -m llmctl.cli.bench.demo`: the engine beside transformers on the same prompts, interleaved in one run.

It prints medians over the rounds and their ratios. Prompts are salted per round, so that no prefix cache helps.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from ...engine.config import EngineConfig, environment
from ...engine.frontend import Frontend
from ...engine.launch import launch
from ...engine.load.hub import Source, resolve
from ...engine.request import SamplingParams
from .peers import Timing, load_transformers, time_transformers, time_transformers_batch

MEASURES = ("decode tok/s", "prefill tok/s", "batch tok/s")


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of one round: one long prompt, and a batch of mixed lengths."""

    prompt: list[int]
    answer: int
    batch: list[list[int]]
    batch_answers: list[int]


def make_workload(seed: int, vocab_size: int, prompt: int, answer: int, batch: int) -> Workload:
    """Random token ids: what a step costs does not depend on what they say."""
    rng = random.Random(f"round {seed}")  # not the number itself: -1 and 1 would seed alike

    def ids(count: int) -> list[int]:
        return [rng.randrange(100, vocab_size) for _ in range(count)]

    lengths = [rng.randrange(32, 257) for _ in range(batch)]
    answers = [rng.randrange(16, 97) for _ in range(batch)]
    return Workload(ids(prompt), answer, [ids(n) for n in lengths], answers)


def time_ours(frontend: Frontend, prompt: Sequence[int], num_tokens: int) -> Timing:
    """Greedy generation of exactly `num_tokens` after one prompt, through the whole product."""
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    start, first, tokens = time.perf_counter(), 0.0, 0
    for delta in frontend.stream(prompt, sampling):
        tokens += len(delta.tokens)
        first = first or time.perf_counter() - start
    return Timing(first, time.perf_counter() - start, tokens)


def time_ours_batch(frontend: Frontend, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> Timing:
    """The same for many requests at once."""
    start, tokens = time.perf_counter(), 0
    streams = [
        frontend.stream(prompt, SamplingParams(temperature=0, max_tokens=length, ignore_eos=True))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    for stream in streams:
        tokens += sum(len(delta.tokens) for delta in stream)
    total = time.perf_counter() - start
    return Timing(total, total, tokens)


def measure(
    single: Callable[[Sequence[int], int], Timing],
    batch: Callable[[Sequence[Sequence[int]], Sequence[int]], Timing],
    work: Workload,
) -> tuple[float, float, float]:
    """(decode, prefill, batch) in tokens per second."""
    one = single(work.prompt, work.answer)
    many = batch(work.batch, work.batch_answers)
    return one.decode_tokens_per_s, len(work.prompt) / one.first_token_s, many.tokens / many.total_s


def run(source: Source, dtypes: Sequence[str], rounds: int, prompt: int, answer: int, batch: int) -> dict[str, object]:
    """Medians per engine over interleaved rounds."""
    frontends = {}
    for dtype in dtypes:
        config = EngineConfig(model=str(source.path), dtype=dtype, max_model_len=2048)
        frontend = launch(config)
        frontends[f"llmctl {frontend.info.weight_format}"] = frontend
    vocab = next(iter(frontends.values())).info.vocab_size
    model = load_transformers(source)
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in (*frontends, "transformers f32")}
    for number in range(-1, rounds):  # the first round warms up and is not counted
        work = make_workload(number, vocab, prompt, answer, batch)
        for name, frontend in frontends.items():
            rows[name].append(
                measure(
                    lambda p, n, f=frontend: time_ours(f, p, n),  # type: ignore[misc]
                    lambda p, n, f=frontend: time_ours_batch(f, p, n),  # type: ignore[misc]
                    work,
                )
            )
        rows["transformers f32"].append(
            measure(
                lambda p, n: time_transformers(model, p, n), lambda p, n: time_transformers_batch(model, p, n), work
            )
        )
    for frontend in frontends.values():
        frontend.close()
    medians = {
        name: dict(zip(MEASURES, map(statistics.median, zip(*measured[1:], strict=True)), strict=True))
        for name, measured in rows.items()
    }
    settings = {"prompt_tokens": prompt, "answer_tokens": answer, "batch": batch, "rounds": rounds}
    return {
        "model": source.name,
        "settings": settings,
        "median": medians,
        "rounds": {n: r[1:] for n, r in rows.items()},
    }


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m llmctl.cli.bench.demo", description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--dtypes", default="auto", help="our weight types to measure, comma separated (auto,float32)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--answer", type=int, default=48)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    source = resolve(args.model, environment=environment())
    result = run(source, args.dtypes.split(","), args.rounds, args.prompt, args.answer, args.batch)
    if args.json:
        json.dump(result, sys.stdout, indent=2)
        return
    medians: dict[str, dict[str, float]] = result["median"]  # type: ignore[assignment]
    peer = medians["transformers f32"]
    table = Table(title=f"{source.name}: prompt {args.prompt}, answer {args.answer}, batch {args.batch}")
    table.add_column("engine")
    for name in MEASURES:
        table.add_column(name, justify="right")
    for engine, row in medians.items():
        table.add_row(engine, *(f"{row[name]:.1f} ({row[name] / peer[name]:.1f}x)" for name in MEASURES))
    Console().print(table)


if __name__ == "__main__":
    main()
