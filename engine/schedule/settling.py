"""What a row's result does: tokens accepted, drafts kept or taken back, sequences and searches ended.

Most results are one token that ends nothing, and most of the time is theirs, so `settle` has a short way for
them, which does what `_settle` does for any.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike

from ..request import FinishReason, Output, TokenLogprobs
from .beam_search import Hypothesis
from .draft import Row
from .filling import Filler
from .memory import KVMemory
from .outcome import accepted_of, finish_of, hypothesis_output, logprobs_of, not_finite, output_of, take_known
from .roster import Roster
from .sequence import Phase, Sequence
from .speculate import Speculator
from .stats import Counts
from .step import ChunkResult

_RUNNING = Phase.RUNNING  # looking it up in an enum costs as much as the rest of a condition


class Settler:
    """Applies results to sequences, in the order of the rows."""

    def __init__(
        self, roster: Roster, filler: Filler, memory: KVMemory, speculator: Speculator, counts: Counts, epoch: int
    ) -> None:
        self._roster = roster
        self._filler = filler
        self._memory = memory
        self._speculator = speculator
        self._counts = counts
        self._epoch = epoch

    def settle(self, rows: ListLike[Row], chunks: ListLike[ChunkResult]) -> tuple[Output, ...]:
        """The Outputs that follow from the results of a step's rows."""
        outputs: list[Output] = []
        epoch, size, publish = self._epoch, self._memory.block_size, self._memory.publish
        for row, chunk in zip(rows, chunks):
            seq = row.seq
            request = seq.request
            first = len(seq.tokens) - seq.prompt_len
            if not (
                row.tokens == 1
                and row.samples
                and seq.plain
                and seq.phase is _RUNNING
                and 0 < first < seq.max_new - 1
                and chunk.finite
                and (token := chunk.tokens[0]) not in request.stop_ids
            ):
                outputs.extend(self._settle_beam(row, chunk) if seq.is_beam else self._settle(row, chunk))
                continue
            seq.in_flight -= 1
            seq.pending -= 1
            seq.tokens.append(token)
            seq.computed = computed = row.start + 1
            if (seq.published + 1) * size <= computed:
                publish(seq)
            outputs.append(
                Output(
                    request_id=request.id,
                    index=seq.index,
                    epoch=epoch,
                    first=first,
                    tokens=chunk.tokens,
                    cached_tokens=seq.leader.cached_tokens,
                )
            )
        return tuple(outputs)

    def end(
        self,
        seq: Sequence,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        finish: FinishReason,
        error: str = "",
    ) -> Output:
        """End one sequence, whose last Output is returned."""
        self._roster.leave(seq, finish)
        self._speculator.forget(seq)
        return output_of(seq, self._epoch, tokens, logprobs, finish, error)

    def end_search(self, seq: Sequence, finish: FinishReason, error: str = "") -> tuple[Output, ...]:
        """End all sequences of a search; STOP for one that has come to its own end, with what it found."""
        beams = self._roster.beams
        group = beams.of(seq)
        for each in group.members:
            self.end(each, (), (), finish, error)
        beams.close(seq)
        found = group.best() if finish is FinishReason.STOP else (Hypothesis(finish=finish),) * seq.request.sampling.n
        return tuple(
            hypothesis_output(group.members[0], index, self._epoch, hypothesis, error)
            for index, hypothesis in enumerate(found)
        )

    def _settle(self, row: Row, chunk: ChunkResult) -> tuple[Output, ...]:
        seq, drafted = row.seq, len(row.drafts)
        seq.in_flight -= 1
        seq.pending -= row.samples
        if seq.phase is Phase.FINISHED:  # scheduled before its end was known, or aborted
            self._roster.slots.free(seq)
            return ()
        if drafted:
            self._verified(row, chunk)
        elif not chunk.finite:
            return (self.end(seq, (), (), FinishReason.ERROR, not_finite(row, chunk)),)
        else:
            assert len(chunk.tokens) == row.samples + row.known, f"{len(chunk.tokens)} tokens for {row}"
        chunk = take_known(row, chunk)
        tokens = accepted_of(seq, chunk)
        logprobs = logprobs_of(seq, chunk, len(tokens))
        seq.tokens.extend(tokens)
        if seq.phase is Phase.RUNNING:
            seq.computed = row.start + row.tokens - (drafted + row.samples - len(tokens))
            if drafted:
                seq.scheduled = seq.computed
                self._filler.charge(seq)
        finish = finish_of(seq, tokens)
        if finish is not None:
            return (self.end(seq, tokens, logprobs, finish),)
        if tokens:
            self._roster.unblock(seq)
        if seq.phase is Phase.RUNNING:
            self._memory.publish(seq)
        elif seq.in_flight == 0:
            self._roster.slots.free(seq)
            self._roster.enqueue(seq)
        return (output_of(seq, self._epoch, tokens, logprobs),) if tokens else ()

    def _settle_beam(self, row: Row, chunk: ChunkResult) -> tuple[Output, ...]:
        """As `_settle`, for a sequence of a beam search: it has Outputs only when the search has ended."""
        seq = row.seq
        seq.in_flight -= 1
        seq.pending -= row.samples
        if seq.phase is Phase.FINISHED:
            self._roster.slots.free(seq)
            return ()
        group = self._roster.beams.of(seq)
        if seq.phase is Phase.PREEMPTED:
            if chunk.finite:
                take_known(row, chunk)
            self._roster.slots.free(seq)
            if not any(each.in_flight for each in group.members):
                self._roster.enqueue(group.head)
            return ()
        if not chunk.finite:
            return self.end_search(seq, FinishReason.ERROR, not_finite(row, chunk))
        chunk = take_known(row, chunk)
        seq.computed = row.start + row.tokens
        self._memory.publish(seq)
        if not row.samples:
            return ()
        lost, over = group.note(seq, chunk)
        if over:
            return self.end_search(seq, FinishReason.STOP)
        for each in lost:
            self._roster.unseat(each)
        return ()

    def _verified(self, row: Row, chunk: ChunkResult) -> None:
        """Learn from a chunk with drafts.

        A value that is not finite may come from a draft, so it ends nothing: its position is computed again without.
        """
        accepted = max(len(chunk.tokens) - 1, 0)
        assert accepted <= len(row.drafts) and (chunk.tokens or not chunk.finite), (row, chunk)
        self._counts.verified(len(row.drafts), accepted)
        if chunk.finite:
            self._speculator.learn(row.seq, len(row.drafts), accepted)
        else:
            self._speculator.stop(row.seq)
