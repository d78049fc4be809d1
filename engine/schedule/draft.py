"""A Step in the making: the rows and copies decided so far, and the budget that is left."""

from __future__ import annotations

import sys
from array import array

import msgspec

from .memory import Start
from .node import Column
from .sequence import Sequence, slot_sampling
from .step import Admit, Chunk, Copy, Step, Swap, TableDelta


class Row(msgspec.Struct, frozen=True, gc=False):
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
    sampling    rows that sample after a known token
    decodes     rows of one token, and `prompt_tokens` are those of all longer ones, drafts not counted
    """

    def __init__(self, budget: int, logit_rows: int) -> None:
        self.left = budget
        self.logits_left = logit_rows
        self.sampling = 0
        self.decodes = 0
        self.prompt_tokens = 0
        self._withheld = 0
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
        """Compute `count` more positions of a sequence, for which it may have got new blocks."""
        self.rows.append(Row(seq, seq.scheduled, count, samples, (), known))
        self._told.append(seq)
        self.left -= count
        self.logits_left -= samples + known
        self.sampling += samples
        if count == 1:
            self.decodes += 1
        else:
            self.prompt_tokens += count

    @property
    def decodes_left(self) -> int:
        """Rows of one token that still fit."""
        return min(self.left, self.logits_left)

    def decoded(self, rows: int, sampling: int) -> None:
        """So many rows of one token were added to `rows`, of sequences that had a block for it already."""
        self.left -= rows
        self.decodes += rows
        self.logits_left -= sampling
        self.sampling += sampling

    def withhold(self, most: int) -> None:
        """Let prompts have no more than `most` tokens of what is left, until `release`."""
        self._withheld = max(self.left - most, 0)
        self.left -= self._withheld

    def release(self) -> None:
        """What was withheld may be used."""
        self.left += self._withheld

    def speculate(self, place: int, drafts: tuple[int, ...]) -> int:
        """Let the row at `place`, which samples, go on over proposed tokens; how many they are."""
        row, count = self.rows[place], len(drafts)
        self.rows[place] = msgspec.structs.replace(row, tokens=row.tokens + count, drafts=drafts)
        self._told.append(row.seq)
        row.seq.scheduled += count
        self.left -= count
        self.logits_left -= count
        return count

    def freeze(self, index: int, drop: tuple[int, ...], swaps: tuple[Swap, ...] = ()) -> Step:
        """The finished Step. Blocks are announced here, once per sequence and group, also of one that got no row."""
        tables: list[TableDelta] = []
        for seq in self._told:
            if len(seq.blocks) > seq.announced:
                for group, blocks in enumerate(zip(*seq.blocks[seq.announced :])):
                    tables.append(TableDelta(seq.slot, group, blocks))
                for group, table in enumerate(seq.windows, len(seq.blocks[0])):
                    tables.append(TableDelta(seq.slot, group, table.entries(seq.announced, len(seq.blocks))))
                seq.announced = len(seq.blocks)
        chunks = tuple(
            [
                Chunk(row.seq.slot, row.start, 1, 0)
                if row.tokens == 1 and row.samples
                else Chunk(row.seq.slot, row.start, row.tokens, row.tokens - _logits(row), row.drafts, row.known)
                for row in self.rows
            ]
        )
        return Step(index, drop, tuple(self._admits), tuple(tables), tuple(self._copies), chunks, swaps)


def _logits(row: Row) -> int:
    return row.known + row.samples + len(row.drafts)


def _int32(tokens: list[int]) -> bytes:
    packed = array("i", tokens)
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
