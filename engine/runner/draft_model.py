"""A draft model as a Proposer: a smaller model of the same vocabulary that runs ahead of the one that is asked.

Its KV cache has as many blocks as the target's, and the two share their block tables: where a sequence keeps K and V of
the target, it keeps those of the draft model in the block of the same number. So memory is planned once, and whatever
becomes of a block (shared by a prefix hit, evicted, given to another sequence) needs no second bookkeeping. What a
block holds for the draft model is remembered with the tokens that it was computed for, and only what agrees with a
sequence's own tokens is used. Thus prefix hits are hits here too, and what is missing (after rejected drafts, after
steps without drafts, in a block that the target has copied) is computed when the sequence drafts next. At most a step's
worth of such rows is computed at a time, so that a long prompt delays neither its own first token nor anybody's next.

Drafts are sampled as the target samples: the same temperature, penalties and seed, hence the same noise. Drafts of
three tokens for SmolLM2-135M in Q4_1, by the same model in Q4_0: 56, 48 and 51 % stood at temperatures 0.5, 0.8 and 1.
Of the draft model's likeliest tokens 48, 31 and 23 % stood, and of tokens sampled with other noise 36, 20 and 13 %.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from ..schedule.proposer import Wanted
from ..schedule.sequence import Sequence, slot_sampling
from ..schedule.step import Admit, Chunk, ChunkResult, Step, TableDelta
from .contents import Contents
from .runner import Runner

if TYPE_CHECKING:
    from .cuda_runner import CudaRunner

GROUP = 0  # of the target, whose block numbers are used


class DraftModel:
    """Runs `runner`, whose slots and blocks have the target's numbers, ahead of the sequences that are wanted.

    cost         of one of its steps of a row, as a share of the target's
    max_rows     of one of its steps
    max_tokens   of a sequence, as far as its context goes
    vocab_size   of the target, which may be padded less
    """

    def __init__(
        self, runner: Runner | CudaRunner, *, cost: float, max_rows: int, max_tokens: int, vocab_size: int
    ) -> None:
        self.cost = cost
        self.seconds = 0.0
        self._runner = runner
        self._max_rows, self._max_tokens, self._vocab_size = max_rows, max_tokens, vocab_size
        self._contents = Contents(runner.groups[0].block_size)
        self._followers: dict[int, _Follower] = {}  # by slot
        self._broken: set[int] = set()  # orders of sequences for which the model gave NaN or Inf

    def foresees(self, seq: Sequence) -> bool:
        """Always, but not together with the first token, which should not wait, nor past the model's context."""
        return seq.generated > 0 and len(seq.tokens) < self._max_tokens and seq.order not in self._broken

    def propose(self, wanted: Items[Wanted]) -> list[tuple[int, ...]]:
        """The model's continuation of each sequence; nothing for one that it has not caught up with yet."""
        started = time.perf_counter()
        step, active = self._first_step(wanted)
        asked = [self._followers[seq.slot] for seq, _ in wanted]
        while active:
            for follower, result in zip(active, self._runner.execute(step).chunks, strict=True):
                self._take(follower, result)
            active = [follower for follower in active if follower.wanted > 0]
            step = Step(0, chunks=tuple(follower.go_on() for follower in active))
        for follower in asked:
            self._contents.note(follower.blocks, follower.first, follower.computed)
        self.seconds += time.perf_counter() - started
        return [tuple(follower.guesses) for follower in asked]

    def forget(self, seq: Sequence) -> None:
        """See Proposer. The slot's state and what its blocks hold stay until they are used again."""
        self._broken.discard(seq.order)

    def _first_step(self, wanted: Items[Wanted]) -> tuple[Step, list[_Follower]]:
        """What the runner must be told, and the rows that are missing, as many as one step may have; whose they are."""
        drops, admits, tables, chunks, active = [], [], [], [], []
        left = self._max_rows
        for seq, count in wanted:
            follower = self._followers.get(seq.slot)
            if follower is None or follower.table is not seq.blocks:  # every admission makes a new list of blocks
                if follower is not None:
                    drops.append(seq.slot)
                follower = self._followers[seq.slot] = self._admitted(seq)
                admits.append(_admit(seq))
            if new := follower.extend():
                tables.append(TableDelta(seq.slot, 0, new))
            follower.begin(min(count, self._max_tokens - len(seq.tokens)))
            rows = min(left, len(seq.tokens) - follower.first)
            if rows:
                left -= rows
                chunks.append(follower.catch_up(rows))
                active.append(follower)
        return Step(0, tuple(drops), tuple(admits), tuple(tables), (), tuple(chunks)), active

    def _admitted(self, seq: Sequence) -> _Follower:
        found = self._contents.found([column[GROUP] for column in seq.blocks], seq.tokens[:-1])
        return _Follower(seq, seq.tokens[:found])

    def _take(self, follower: _Follower, result: ChunkResult) -> None:
        """A step's result: the next guess, if the sequence's last token was in the step."""
        if not result.finite:
            self._broken.add(follower.seq.order)
            follower.wanted = 0
        elif result.tokens:
            follower.guess(result.tokens[0], self._vocab_size)
        else:
            follower.wanted = 0


class _Follower:
    """How far the draft model has come with a sequence since this was admitted.

    table     the sequence's blocks, and `blocks` those of its blocks that the runner knows
    computed  the tokens that K and V were computed for; the first `first` of them before the proposal in the making
    wanted    guesses that are still to be made, besides `guesses`
    """

    __slots__ = ("blocks", "computed", "first", "guesses", "seq", "table", "wanted")

    def __init__(self, seq: Sequence, computed: list[int]) -> None:
        self.seq = seq
        self.table = seq.blocks
        self.blocks: list[int] = []
        self.computed = computed
        self.first = len(computed)
        self.guesses: list[int] = []
        self.wanted = 0

    def extend(self) -> tuple[int, ...]:
        """The blocks that the runner does not know yet, from now on taken for known."""
        new = tuple(column[GROUP] for column in self.table[len(self.blocks) :])
        self.blocks += new
        return new

    def begin(self, wanted: int) -> None:
        """Begin a proposal: forget what was computed for guesses that did not stand, and for the last token."""
        tokens, computed = self.seq.tokens, self.computed
        while self.first < min(len(computed), len(tokens) - 1) and computed[self.first] == tokens[self.first]:
            self.first += 1
        del computed[self.first :]
        self.guesses = []
        self.wanted = wanted

    def catch_up(self, rows: int) -> Chunk:
        """The next `rows` of the sequence's tokens; the last of all asks for a guess."""
        tokens, first = self.seq.tokens, self.first
        missing = tuple(tokens[first : first + rows])
        self.computed += missing
        return Chunk(self.seq.slot, first, rows, rows - (first + rows == len(tokens)), missing)

    def go_on(self) -> Chunk:
        """The last guess, which asks for one more; the runner knows it."""
        self.computed.append(self.guesses[-1])
        return Chunk(self.seq.slot, len(self.computed) - 1, 1, 0)

    def guess(self, token: int, vocab_size: int) -> None:
        """Take a guess, if the target can have it. None follows a token that ends the sequence."""
        if token >= vocab_size:
            self.wanted = 0
            return
        self.guesses.append(token)
        self.wanted = 0 if token in self.seq.request.stop_ids else self.wanted - 1


def _admit(seq: Sequence) -> Admit:
    packed = array("i", seq.tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return Admit(seq.slot, packed.tobytes(), seq.prompt_len, slot_sampling(seq.request, seq.index))
