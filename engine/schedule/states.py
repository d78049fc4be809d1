"""What the scheduler tells of each sequence, for debugging: where it stands, and how it came there.

There is neither text nor a token in it, but whose requests they are, and how long.
"""

from __future__ import annotations

import enum

import msgspec

from ..request import FinishReason
from .sequence import Phase, Sequence

KEPT = 256  # sequences that have ended and are still told of


class Doing(enum.StrEnum):
    """What the next step computes of a running sequence."""

    PREFILL = "prefill"  # of its prompt, from the beginning
    EXTEND = "extend"  # of its prompt, after what a cache had
    DECODE = "decode"


class Change(msgspec.Struct, frozen=True):
    """`phase` was entered when the scheduler had made `step` steps."""

    phase: Phase
    step: int


class SequenceState(msgspec.Struct, frozen=True, kw_only=True):
    """Where one sequence stands. `trace` has all its phases so far, in their order; counts are of tokens and blocks."""

    request_id: str
    index: int
    tenant: str
    priority: int
    phase: Phase
    doing: Doing | None
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    computed_tokens: int
    blocks: int
    slot: int
    finish: FinishReason | None
    trace: tuple[Change, ...]


def state_of(seq: Sequence, finish: FinishReason | None = None) -> SequenceState:
    """Where the sequence stands now; `finish` says why if it has ended."""
    cached = seq.leader.cached_tokens
    doing = None
    if seq.phase is Phase.RUNNING:
        doing = Doing.DECODE if seq.generated else Doing.EXTEND if cached else Doing.PREFILL
    return SequenceState(
        request_id=seq.request.id,
        index=seq.index,
        tenant=seq.request.tenant,
        priority=seq.request.priority,
        phase=seq.phase,
        doing=doing,
        prompt_tokens=seq.prompt_len,
        cached_tokens=cached,
        generated_tokens=seq.generated,
        computed_tokens=seq.computed,
        blocks=len(seq.blocks),
        slot=seq.slot,
        finish=finish,
        trace=tuple(Change(phase, step) for phase, step in seq.trace),
    )
