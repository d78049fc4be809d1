"""What the scheduler tells about itself: counts for metrics, and the state of each sequence for debugging."""

from __future__ import annotations

from dataclasses import dataclass

from .sequence import Phase


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts now (sequences, blocks summed over groups) and since the start (the rest)."""

    waiting: int
    running: int
    blocks_free: int
    blocks_active: int
    blocks_cached: int
    steps: int
    scheduled_tokens: int
    recomputed_tokens: int
    preemptions: int
    evictions: int
    evicted_reused: int
    prefix_query_tokens: int
    prefix_hit_tokens: int


@dataclass(frozen=True, slots=True)
class SequenceState:
    """Where one sequence stands, for debugging."""

    request_id: str
    index: int
    phase: Phase
    prompt_tokens: int
    generated_tokens: int
    computed_tokens: int
    blocks: int
    slot: int
