"""The engine loop: commands in, events out, whoever carries them (a queue or a socket)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ..kernels.errors import LlmctlError
from .engine import Core
from .messages import (
    Abort,
    Command,
    EngineStats,
    Event,
    GetStates,
    GetStats,
    Outputs,
    Shutdown,
    States,
    Stats,
    Submit,
)
from .request import FinishReason, Output, Request

Inbox = Callable[[bool], Iterable[Command]]  # inbox(wait): the commands that have come; waits for one if asked
Emit = Callable[[Event], None]


def run_loop(engine: Core, epoch: int, inbox: Inbox, emit: Emit) -> None:
    """Serve commands until Shutdown. An error of one request ends that request only; any other error is raised."""
    steps, generated, last_step = 0, 0, time.monotonic()
    while True:
        for command in inbox(not engine.has_work):
            match command:
                case Submit(request):
                    _submit(engine, epoch, request, emit)
                case Abort(request_id, index):
                    _emit_outputs(engine.abort(request_id, index), emit)
                case GetStats(ticket):
                    age = time.monotonic() - last_step if engine.has_work else 0.0
                    emit(Stats(ticket, _stats(engine, steps, generated, age)))
                case GetStates(ticket):
                    emit(States(ticket, engine.states()))
                case Shutdown():
                    return
        if engine.has_work:
            outputs = engine.step()
            steps, last_step = steps + 1, time.monotonic()
            generated += sum(len(output.tokens) for output in outputs)
            _emit_outputs(outputs, emit)
        else:
            last_step = time.monotonic()


def _submit(engine: Core, epoch: int, request: Request, emit: Emit) -> None:
    try:
        engine.add(request)
    except LlmctlError as error:
        text = error.message + (f" ({error.hint})" if error.hint else "")
        outputs = tuple(
            Output(
                request_id=request.id, index=i, epoch=epoch, first=0, tokens=(), finish=FinishReason.ERROR, error=text
            )
            for i in range(request.sampling.n)
        )
        _emit_outputs(outputs, emit)


def _emit_outputs(outputs: tuple[Output, ...], emit: Emit) -> None:
    if outputs:
        emit(Outputs(outputs))


def _stats(engine: Core, steps: int, generated: int, age: float) -> EngineStats:
    stats = engine.stats()
    return EngineStats(
        waiting=stats.waiting,
        running=stats.running,
        preemptions=stats.preemptions,
        blocks_total=stats.blocks_free + stats.blocks_active + stats.blocks_cached,
        blocks_free=stats.blocks_free,
        blocks_cached=stats.blocks_cached,
        fragmentation=stats.fragmentation,
        waste=stats.waste,
        evictions=stats.evictions,
        evicted_reused=stats.evicted_reused,
        prompt_tokens=stats.prefix_query_tokens,
        cached_tokens=stats.prefix_hit_tokens,
        generated_tokens=generated,
        drafts=stats.drafts,
        draft_tokens=stats.draft_tokens,
        accepted_tokens=stats.accepted_tokens,
        recomputed_tokens=stats.recomputed_tokens,
        tier_blocks=stats.tier_blocks,
        tier_blocks_used=stats.tier_blocks_used,
        tier_writes=stats.tier_writes,
        tier_clean_drops=stats.tier_clean_drops,
        tier_hits=stats.tier_hits,
        tier_failures=stats.tier_failures,
        swapped_out_bytes=stats.swapped_out_bytes,
        swapped_in_bytes=stats.swapped_in_bytes,
        accepted_per_position=stats.accepted_per_position,
        cache_audits=stats.audits,
        cache_audit_failures=stats.audit_failures,
        steps=steps,
        scheduler_s=stats.scheduler_s,
        draft_s=stats.draft_s,
        step_s=stats.step_s,
        last_step_age_s=age,
    )
