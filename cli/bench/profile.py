"""Where the time of one decode step goes: every bound op of the decoder run alone, summed by what it is.

An op that runs alone pays for starting and stopping the thread pool and cannot share a barrier with its neighbours, so
the sum is more than the recorded program takes; both are shown. Ops run in the decoder's own order, so each finds in
the caches what it finds there in a replay.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from ...engine.config import EngineConfig, environment
from ...engine.load.hub import resolve as resolve_source
from ...engine.load.packed import open_packed
from ...engine.load.progress import Progress
from ...engine.plan import Plan, resolve
from ...engine.runner.runner import Runner
from ...engine.schedule.step import Admit, Chunk, Copy, SlotSampling, Step, TableDelta
from ...kernels.errors import CapacityError, UsageError
from ..console import Console

ROWS = (1, 16)
REPEATS = 15

_GREEDY = SlotSampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, -1)

Clock = Callable[[], float]


class OpTime(msgspec.Struct, frozen=True, kw_only=True):
    """All ops of one kind in a step: how many, their time together, and its share of the sum."""

    kind: str
    count: int
    ms: float
    share: float


class StepProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A decode step of `rows` sequences that have `context` tokens each. Medians over `repeats`.

    sum_ms     the ops one by one
    replay_ms  the recorded program
    step_ms    what the engine waits for: deltas, rows laid out, replay, sampling
    """

    rows: int
    context: int
    repeats: int
    ops: tuple[OpTime, ...]
    sum_ms: float
    replay_ms: float
    step_ms: float


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The profiles of one model on this machine, and the engine's fingerprint."""

    model: str
    weight_formats: tuple[str, ...]
    kv_format: str
    isa: str
    threads: int
    fingerprint: str
    steps: tuple[StepProfile, ...]


def profile(
    config: EngineConfig,
    context: int,
    progress: Progress,
    rows: Sequence[int] = ROWS,
    repeats: int = REPEATS,
    clock: Clock = time.perf_counter,
) -> Profile:
    """Load the model and profile a step for each number of rows. Raises CapacityError if they do not fit."""
    if config.on_gpu:
        raise UsageError(
            f"--device is `{config.device}`, and the profile is of the CPU's ops", "use `--device cpu`, or leave it out"
        )
    config, settings = msgspec.structs.replace(config, device="cpu"), environment()
    source = resolve_source(config.model, environment=settings, progress=progress)
    model = open_packed(source, dtype=config.dtype, cache=settings.cache, progress=progress)
    plan, _ = resolve(config, model, split_windows=False)
    _check_room(plan, max(rows), context)
    runner = Runner(model, plan)
    try:
        steps = []
        _fill_context(runner, plan, max(rows), context, model.spec.vocab_size, progress)
        for count in rows:
            progress(f"step of {count}", 0, repeats)
            steps.append(_profile_step(runner, count, context, repeats, clock))
    finally:
        runner.close()
    return Profile(
        model=plan.model,
        weight_formats=plan.weight_formats,
        kv_format=plan.kv_format,
        isa=plan.isa,
        threads=plan.threads,
        fingerprint=plan.fingerprint,
        steps=tuple(steps),
    )


def show(console: Console, found: Profile) -> None:
    """Print a table per step."""
    for step in found.steps:
        rows = [[op.kind, str(op.count), f"{op.ms:.3f}", f"{op.share:.1%}"] for op in step.ops]
        rows += [
            ["sum of the ops, each alone", str(sum(op.count for op in step.ops)), f"{step.sum_ms:.3f}", ""],
            ["the recorded program", "", f"{step.replay_ms:.3f}", f"{step.replay_ms / step.sum_ms:.1%}"],
            ["the whole step, with sampling", "", f"{step.step_ms:.3f}", f"{step.step_ms / step.sum_ms:.1%}"],
        ]
        title = (
            f"{found.model}, {' + '.join(found.weight_formats)}, KV {found.kv_format}, {found.isa}, "
            f"{found.threads} threads: a decode step of {step.rows} with {step.context} tokens of context, "
            f"median of {step.repeats}"
        )
        console.table(["op", ">count", ">ms", ">share"], rows, title)


def _check_room(plan: Plan, rows: int, context: int) -> None:
    blocks = rows * -(-(context + 1) // plan.block_size)
    limits = (
        (rows, plan.max_num_seqs, "sequences", "--max-num-seqs"),
        (rows, plan.max_num_batched_tokens, "rows in a step", "--max-num-batched-tokens"),
        (context + 1, plan.max_model_len, "tokens of context", "--max-model-len"),
        (blocks, plan.num_blocks, "KV blocks", "--kv-cache-memory-bytes"),
    )
    for needed, limit, what, option in limits:
        if needed > limit:
            raise CapacityError(
                f"a step of {rows} after {context} tokens needs {needed} {what}, there are {limit}",
                f"lower --profile-context, or raise {option}",
            )


def _fill_context(runner: Runner, plan: Plan, rows: int, context: int, vocab_size: int, progress: Progress) -> None:
    """Give every slot the KV of the same `context` tokens and a next token to compute: computed once, then copied."""
    tokens = np.random.default_rng(0).integers(0, vocab_size, context + 1).astype("<i4").tobytes()
    per_slot = -(-(context + 1) // plan.block_size)
    blocks = [tuple(range(slot * per_slot, (slot + 1) * per_slot)) for slot in range(rows)]
    runner.execute(
        Step(
            0,
            admit=tuple(Admit(slot, tokens, context + 1, _GREEDY) for slot in range(rows)),
            tables=tuple(TableDelta(slot, 0, blocks[slot]) for slot in range(rows)),
        )
    )
    for start in range(0, context, plan.max_num_batched_tokens):
        progress("context", start, context)
        count = min(plan.max_num_batched_tokens, context - start)
        runner.execute(Step(1, chunks=(Chunk(0, start, count, count),)))
    size = plan.block_size
    copies = [
        Copy(0, blocks[0][index], blocks[slot][index], min(size, context - index * size))
        for slot in range(1, rows)
        for index in range(-(-context // size))
    ]
    runner.execute(Step(2, copies=tuple(copies)))


def _profile_step(runner: Runner, rows: int, context: int, repeats: int, clock: Clock) -> StepProfile:
    decoder = runner.decoder
    step = Step(3, chunks=tuple(Chunk(slot, context, 1, 0) for slot in range(rows)))
    whole, replay, alone = [], [], defaultdict(list)
    for _ in range(repeats + 1):  # the first of each warms up and is not counted
        whole.append(_timed(clock, lambda: runner.execute(step)))
        replay.append(_timed(clock, decoder.program.replay))
        times: dict[str, float] = defaultdict(float)
        for kind, op in zip(decoder.kinds, decoder.ops, strict=True):
            times[kind] += _timed(clock, op.run)
        for kind, seconds in times.items():
            alone[kind].append(seconds)
    medians = {kind: 1000 * statistics.median(times[1:]) for kind, times in alone.items()}
    total = sum(medians.values())
    return StepProfile(
        rows=rows,
        context=context,
        repeats=repeats,
        ops=tuple(
            OpTime(kind=kind, count=decoder.kinds.count(kind), ms=ms, share=ms / total) for kind, ms in medians.items()
        ),
        sum_ms=total,
        replay_ms=1000 * statistics.median(replay[1:]),
        step_ms=1000 * statistics.median(whole[1:]),
    )


def _timed(clock: Clock, run: Callable[[], object]) -> float:
    start = clock()
    run()
    return clock() - start
