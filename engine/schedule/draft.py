"""A Step in the making: the rows and copies decided so far, and the budget that is left."""

from __future__ import annotations

import sys
from array import array
from typing import NamedTuple

from .memory import Start
from .prefix import Column
from .sequence import Sequence, slot_sampling
from .step import Admit, Chunk, Copy, Step, TableDelta


class Row(NamedTuple):
    """A chunk and whose it is, kept until its result comes.

    `known`: after so many of the positions, the last that do not sample, the next token is known and its logprob is
    wanted. `samples`: the last known position samples a token, and so does each of `drafts`, which come after it and
    are counted in `tokens`.
    """

    seq: Sequence
    start: int
    tokens: int
    samples: bool
    drafts: tuple[int, ...] = ()
    known: int = 0


class Draft:
    """Filled by the scheduler while it walks the sequences, then frozen into a Step.

    left        tokens of the step's budget that nobody has yet
    logits_left rows that may still have logits
    promised    blocks that running sequences need soon, besides those they have
    """

    def __init__(self, budget: int, logit_rows: int) -> None:
        self.left = budget
        self.logits_left = logit_rows
        self.promised = 0
        self.rows: list[Row] = []
        self._admits: list[Admit] = []
        self._copies: list[Copy] = []
        self._told: list[Sequence] = []

    def admit(self, seq: Sequence, start: Start, target: Column | None) -> None:
        """Tell the runner of a sequence that was given a slot, and of the copy into `target` that it starts with."""
        self._told.append(seq)
        self._admits.append(Admit(seq.slot, _int32(seq.tokens), seq.prompt_len, slot_sampling(seq.request, seq.index)))
        if target is not None:
            assert start.source is not None
            sources = (*start.source, *(each.source for each in start.windows))
            for group, (source, block) in enumerate(zip(sources, target)):
                self._copies.append(Copy(group, source, block, start.copied))

    def row(self, seq: Sequence, count: int, samples: bool, known: int) -> None:
        """Compute `count` more positions of a sequence."""
        self.rows.append(Row(seq, seq.scheduled, count, samples, known=known))
        self.left -= count
        self.logits_left -= samples + known

    def speculate(self, place: int, drafts: tuple[int, ...]) -> None:
        """Let the row at `place`, which samples, go on over proposed tokens."""
        row = self.rows[place]
        self.rows[place] = row._replace(tokens=row.tokens + len(drafts), drafts=drafts)
        self.left -= len(drafts)
        self.logits_left -= len(drafts)

    def freeze(self, index: int, drop: tuple[int, ...]) -> Step:
        """The finished Step. Blocks are announced here, once per sequence and group, also of one that got no row."""
        tables: list[TableDelta] = []
        for seq in (*self._told, *(row.seq for row in self.rows)):
            if len(seq.blocks) > seq.announced:
                for group, blocks in enumerate(zip(*seq.blocks[seq.announced :])):
                    tables.append(TableDelta(seq.slot, group, blocks))
                for group, table in enumerate(seq.windows, len(seq.blocks[0])):
                    tables.append(TableDelta(seq.slot, group, table.entries(seq.announced, len(seq.blocks))))
                seq.announced = len(seq.blocks)
        chunks = tuple(
            Chunk(row.seq.slot, row.start, row.tokens, row.tokens - _logits(row), row.drafts, row.known)
            for row in self.rows
        )
        return Step(index, drop, tuple(self._admits), tuple(tables), tuple(self._copies), chunks)


def _logits(row: Row) -> int:
    return row.known + row.samples + len(row.drafts)


def _int32(tokens: list[int]) -> bytes:
    packed = array("i", tokens)
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
