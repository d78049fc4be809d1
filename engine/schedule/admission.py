"""Whether memory has room for one more sequence, now and soon, and who goes when it has not.

Admission keeps a reserve, lest it be followed by a preemption: besides what a sequence needs for its known tokens and
one block's worth to come, what was promised to those running stays untouched. Preemption takes those that lose least,
never the first in rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from .memory import KVMemory, Start
from .sequence import Phase, Sequence


class Admission:
    """The questions that the scheduler asks of memory before it admits. Changes nothing."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory
        self._refused = _Refused(-1, 0, 0)

    def start(self, seq: Sequence) -> Start:
        """The best start there is for a waiting sequence.

        A leader that was itself admitted in this step does not serve: its first blocks may be copies still to be made.
        """
        leader = seq.leader
        fresh = seq is not leader and seq.generated == 0
        if fresh and leader.phase is Phase.RUNNING and leader.computed >= leader.prompt_len and leader.announced > 0:
            return self._memory.fork(seq, leader, leader.prompt_len - 1)
        return self._memory.find(seq)

    def missing(self, seq: Sequence) -> int:
        """Blocks the sequence needs besides its own for all its known tokens and one block's worth to come."""
        soon = len(seq.tokens) + seq.pending + self._memory.block_size
        return self._memory.blocks_for(min(soon, seq.goal)) - len(seq.blocks)

    def affordable(self, seq: Sequence, promised: int, alone: bool) -> Start | None:
        """The sequence's start if memory has what it needs soon, besides what was `promised` to those running.

        `alone`: nobody runs, so that there is room whatever the start; at worst its source has to make some.
        """
        available = self._memory.room
        if alone:
            start = self.start(seq)
            if self.missing(seq) - len(start.columns) > available - self._memory.cost(start):
                start = self._memory.whole(start)
            return start
        slack = available - promised
        refused = self._refused
        if (refused.order, refused.inserts) == (seq.order, self._memory.tree.inserts) and slack <= refused.slack:
            return None
        start = self.start(seq)
        if self.missing(seq) - len(start.columns) + self._memory.cost(start) > slack:
            self._refused = _Refused(seq.order, self._memory.tree.inserts, slack)
            return None
        return start if self._memory.windows.affordable(seq, start.windows) else None


class _Refused(NamedTuple):
    """The last sequence that memory had no room for, and how things stood: not worth asking again until they change."""

    order: int
    inserts: int
    slack: int


def victims(running: Collection[Sequence], memory: KVMemory, joining: Collection[Sequence] = ()) -> Iterator[Sequence]:
    """Whom to preempt, one by one, until every decode and one token of the first in rank can have a block they need.

    `joining` are beams about to run beside others of their search; each needs a block at most. The caller preempts each
    before it asks for the next, and with a beam all others of its search.
    """
    if len(running) + len(joining) <= memory.available:  # at most one block each
        return
    first = min(running, key=rank)
    growing = {
        seq.order: seq.unit
        for seq in running
        if (seq.todo == 1 or (seq.unit == first.unit and seq.todo > 0))
        and seq.scheduled == len(seq.blocks) * memory.block_size
    }
    growing |= {seq.order: seq.unit for seq in joining}
    if len(growing) <= memory.available:
        return
    others = [seq for seq in running if seq.unit != first.unit]
    for victim in sorted(others, key=lambda seq: _loss(seq, memory.block_size)):
        if len(growing) <= memory.available:
            return
        if victim.phase is Phase.RUNNING:
            growing = {order: unit for order, unit in growing.items() if unit != victim.unit}
            yield victim


def rank(seq: Sequence) -> tuple[int, int]:
    """A sequence's rank, as a key to sort by."""
    return seq.rank


def _loss(seq: Sequence, block_size: int) -> tuple[int, int, int]:
    """Whom to preempt first: the least important, then who loses least, then who came last."""
    known = seq.published * block_size
    lost = 0 if seq.scheduled >= seq.goal else seq.scheduled - known
    return -seq.request.priority, lost, -seq.order
