"""Which running sequences get drafts in a step, how many, and what their verification teaches.

A draft row shares the step's pass over the weights, so while few rows are computed it costs a fraction of a step and
saves a whole one if it stands. That ends where the kernels' time begins to grow with the rows: on CPUs of two cores a
step of 1, 2, 4 and 8 rows took 3.7, 4.1, 4.4 and 9.6 ms (AVX2 kernels on Zen 4; 5.9, 7.0, 8.5 and 13.9 on Zen 3), so
that four tokens are nearly free together and the next four are not. Hence one limit says both how long a draft may be
and how much company it may have: a step that holds drafts samples at most 1 + `num_speculative_tokens` rows.

Drafts take what nobody else wants. They are added when the step is otherwise complete, from the tokens left in its
budget and from blocks that remain when every running sequence could still have one more, so that no prompt waits and
nobody is preempted for their sake.

A sequence's draft length doubles when all of a draft stands, follows what stood when only a part did, and halves when
nothing did. After failures in a row it pauses for 1, 3, 7, 15, then 31 steps, which bounds what it can lose on text
that seems to repeat and never does: one draft in 32 steps, at a sixth of a step each, half a percent. Looking up costs
some 2.5 microseconds a token. That is why speculation is on by default: of 32 answers of SmolLM2-135M to ordinary
prompts, greedy and at temperature 0.8, replayed with the times above, none lost, and the mean gained 15 % to 130 %.

With several steps in flight a sequence's last token is not known when its next step is made, and a draft needs it. So
a sequence whose known tokens repeat earlier ones stays out of one step (`waits`) and drafts in the next; one that
repeats nothing is pipelined as if there were no speculation. A chunk with drafts is always waited for, since the
number of tokens that it gives is not known before.
"""

from __future__ import annotations

from collections.abc import Collection

from ..config import SpeculativeConfig
from .draft import Draft
from .memory import KVMemory
from .ngram import NgramIndex
from .sequence import Sequence

START = 2  # the first draft's length at most
MAX_PAUSE = 31  # steps


class Speculator:
    """The drafting state of every sequence that ever drafted, until it is forgotten."""

    def __init__(self, options: SpeculativeConfig, memory: KVMemory) -> None:
        self._options = options
        self._most = min(options.num_speculative_tokens, memory.block_size) if options.method != "none" else 0
        self._memory = memory
        self._states: dict[int, _Drafting] = {}

    def may_wait(self, running: int) -> bool:
        """Whether `waits` can be true of any of so many."""
        return running <= self._most

    def waits(self, seq: Sequence, running: int) -> bool:
        """Whether the sequence, whose last token is being sampled, should get its result before its next step."""
        if running > self._most or seq.in_flight == 0 or self._memory.available <= running:
            return False
        state = self._state(seq)
        return state.allowed > 0 and bool(state.propose(seq, 2))

    def extend(self, draft: Draft, running: Collection[Sequence]) -> int:
        """Add drafts to the step's rows that sample after known tokens; how many tokens that is."""
        if draft.sampling > self._most:
            return 0
        sampling = [place for place, row in enumerate(draft.rows) if row.samples]
        left = min(draft.left, draft.logits_left, 1 + self._most - len(sampling))
        if left <= 0:
            return 0
        spare = self._memory.available - len(running)
        added = 0
        for turn, place in enumerate(sampling):
            seq = draft.rows[place].seq
            if seq.is_beam or draft.rows[place].known:
                continue
            state = self._state(seq)
            share = -(-left // (len(sampling) - turn))
            count = self._fitting(seq, min(state.allowed, share, seq.goal - seq.scheduled), spare)
            tokens = state.propose(seq, count) if count > 0 and seq.pending == 1 else ()
            if not tokens:
                state.rest()
                continue
            held = len(seq.blocks)
            self._memory.grow(seq, seq.scheduled + len(tokens))
            spare -= len(seq.blocks) - held
            draft.speculate(place, tokens)
            seq.scheduled += len(tokens)
            left -= len(tokens)
            added += len(tokens)
        return added

    def learn(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """A chunk of this sequence with `drafted` drafts was verified."""
        self._states[seq.order].learn(drafted, accepted, self._most)

    def stop(self, seq: Sequence) -> None:
        """Draft no more for this sequence."""
        self._states[seq.order].stopped = True

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        self._states.pop(seq.order, None)

    def _state(self, seq: Sequence) -> _Drafting:
        state = self._states.get(seq.order)
        if state is None:
            options = self._options
            index = NgramIndex(options.prompt_lookup_max, options.prompt_lookup_min)
            state = self._states[seq.order] = _Drafting(index, min(START, self._most))
        return state

    def _fitting(self, seq: Sequence, count: int, spare: int) -> int:
        """How many of `count` more positions fit the blocks that the sequence has or may take."""
        blocks = len(seq.blocks) + max(spare, 0)
        return min(count, blocks * self._memory.block_size - seq.scheduled)


class _Drafting:
    """What one sequence repeats, and how well it went so far."""

    __slots__ = ("_failures", "_index", "_length", "_pause", "stopped")

    def __init__(self, index: NgramIndex, length: int) -> None:
        self._index = index
        self._length = length
        self._failures = 0  # in a row
        self._pause = 0
        self.stopped = False

    @property
    def allowed(self) -> int:
        """Tokens that a draft may have now."""
        return 0 if self.stopped or self._pause else self._length

    def propose(self, seq: Sequence, count: int) -> tuple[int, ...]:
        self._index.extend(seq.tokens)
        return self._index.propose(seq.tokens, count)

    def rest(self) -> None:
        """A step went by without a draft."""
        self._pause = max(0, self._pause - 1)

    def learn(self, drafted: int, accepted: int, most: int) -> None:
        if accepted == 0:
            self._failures += 1
            self._pause = min((1 << self._failures) - 1, MAX_PAUSE)
            self._length = max(1, self._length // 2)
            return
        self._failures = 0
        self._length = min(most, 2 * self._length if accepted == drafted else accepted + 1)
