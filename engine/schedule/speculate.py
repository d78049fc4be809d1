"""Which running sequences get drafts in a step, how many, and what their verification teaches.

Who guesses is a Proposer: prompt lookup or a draft model. The rest is one for both, and is here.

A draft row shares the step's pass over the weights, so while few rows are computed it costs a fraction of a step and
saves a whole one if it stands. That ends where the kernels' time begins to grow with the rows: on CPUs of two cores a
step of 1, 2, 4 and 8 rows took 3.7, 4.1, 4.4 and 9.6 ms (AVX2 kernels on Zen 4; 5.9, 7.0, 8.5 and 13.9 on Zen 3), so
that four tokens are nearly free together and the next four are not. Hence one limit, SpeculativeConfig's `max_rows`,
says both how long a draft may be and how much company it may have.

Drafts take what nobody else wants. They are added when the step is otherwise complete, from the tokens left in its
budget and from blocks that remain when every running sequence could still have one more, so that no prompt waits and
nobody is preempted for their sake.

How long drafts are, and when a sequence makes none for a while, is `draft_length.py`'s matter. Prompt lookup takes
some four microseconds of a sequence's step, of which it is asked in the company of few, and loses at most one draft in
32 steps, at a sixth of a step each, half a percent. That is why it is on by default: of 32 answers of SmolLM2-135M to
ordinary prompts, greedy and at temperature 0.8, replayed with the times above, none lost, and the mean gained 15 % to
130 %.

With several steps in flight a sequence's last token is not known when its next step is made, and a draft needs it. So
a sequence for which a draft is foreseen stays out of one step (`waits`) and drafts in the next; one that repeats
nothing is pipelined as if there were no speculation. A chunk with drafts is always waited for, since the number of
tokens that it gives is not known before.
"""

from __future__ import annotations

from collections.abc import Collection

from ..config import SpeculativeConfig
from .draft import Draft
from .draft_length import DraftLength
from .memory import KVMemory
from .proposer import Proposer
from .sequence import Sequence


class Speculator:
    """The draft lengths of every sequence that ever drafted, until it is forgotten."""

    def __init__(self, options: SpeculativeConfig, memory: KVMemory, proposer: Proposer) -> None:
        self._most = min(options.num_speculative_tokens, memory.block_size) if options.method != "none" else 0
        self._company = options.max_sequences if self._most else 0
        self._rows = min(options.max_rows, self._company * (1 + self._most))
        self._memory = memory
        self._proposer = proposer
        self._lengths: dict[int, DraftLength] = {}

    def may_wait(self, running: int) -> bool:
        """Whether `waits` can be true of any of so many."""
        return running <= self._company

    @property
    def seconds(self) -> float:
        """What guessing has taken beside scheduling."""
        return self._proposer.seconds

    def waits(self, seq: Sequence, running: int) -> bool:
        """Whether the sequence, whose last token is being sampled, should get its result before its next step."""
        if running > self._company or seq.in_flight == 0 or self._memory.available <= running:
            return False
        return self._length(seq).allowed > 0 and self._proposer.foresees(seq)

    def extend(self, draft: Draft, running: Collection[Sequence]) -> int:
        """Add drafts to the step's rows that sample after known tokens; how many tokens that is."""
        if draft.sampling > self._company:
            return 0
        sampling = [place for place, row in enumerate(draft.rows) if row.samples]
        left = min(draft.left, draft.logits_left, self._rows - len(sampling))
        if left <= 0 or len(sampling) > self._company:
            return 0
        spare = self._memory.available - len(running)
        places, wanted = [], []
        for turn, place in enumerate(sampling):
            seq = draft.rows[place].seq
            if seq.is_beam or draft.rows[place].known:
                continue
            length = self._length(seq)
            share = -(-left // (len(sampling) - turn))
            count = self._fitting(seq, min(length.allowed, share, seq.goal - seq.scheduled), spare)
            if count <= 0 or seq.pending != 1 or not self._proposer.foresees(seq):
                length.rest()
                continue
            held = len(seq.blocks)
            self._memory.grow(seq, seq.scheduled + count)
            spare -= len(seq.blocks) - held
            left -= count
            places.append(place)
            wanted.append((seq, count))
        return sum(map(draft.speculate, places, self._proposer.propose(wanted))) if wanted else 0

    def learn(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """A chunk of this sequence with `drafted` drafts was verified."""
        self._lengths[seq.order].learn(drafted, accepted)

    def stop(self, seq: Sequence) -> None:
        """Draft no more for this sequence."""
        self._lengths[seq.order].stopped = True

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self._lengths.pop(seq.order, None)
        self._proposer.forget(seq)

    def _length(self, seq: Sequence) -> DraftLength:
        length = self._lengths.get(seq.order)
        if length is None:
            length = self._lengths[seq.order] = DraftLength(self._most, self._proposer.cost)
        return length

    def _fitting(self, seq: Sequence, count: int, spare: int) -> int:
        """How many of `count` more positions fit the blocks that the sequence has or may take."""
        blocks = len(seq.blocks) + max(spare, 0)
        return min(count, blocks * self._memory.block_size - seq.scheduled)
