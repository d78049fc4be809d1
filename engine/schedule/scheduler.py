"""Continuous batching: which positions of which sequences the next step computes, and what their results mean.

A step takes one token of every decoding sequence first, then cuts prompts into what is left of the token budget. One
long prompt is under way at a time, but under `hybrid` short ones may use up to half of the budget beside it, so that
they do not wait behind it. Blocks are given as chunks are scheduled. When memory is short, cached leaves go first, then
sequences are preempted (`admission.py`), never the first in rank. That one can always go on alone, since `add` refused
what does not fit, so everything ends.

Steps are executed in the order they are made, so blocks freed here may be given away at once although a step in flight
still writes to them; a runner slot waits for its last result, which is read per slot.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from typing import NamedTuple

from ...kernels.errors import UsageError
from ..request import FinishReason, Output, Request, TokenLogprobs
from .admission import Admission, rank, victims
from .beam_search import Hypothesis
from .beams import Beams, Joining, places
from .draft import Draft, Row
from .limits import SchedulerConfig
from .lookup import PromptLookup
from .memory import KVMemory, Start
from .outcome import accepted_of, finish_of, hypothesis_output, logprobs_of, not_finite, output_of, take_known
from .policy import make_queue
from .proposer import Proposer
from .sequence import Phase, Sequence
from .speculate import Speculator
from .stats import Counts, SchedulerStats, SequenceState, state_of
from .step import ChunkResult, Step, StepResult
from .waiting import WaitingLine

log = logging.getLogger(__name__)


class Scheduler:
    """Requests in, Steps out, results in, Outputs out. Not thread-safe; makes no system call and reads no clock."""

    def __init__(self, config: SchedulerConfig, proposer: Proposer | None = None) -> None:
        self._config = config
        self._memory = KVMemory(config.num_blocks, config.block_size, config.enable_prefix_caching, config.eviction_k)
        self._admission = Admission(self._memory)
        self._speculator = Speculator(config.speculation, self._memory, proposer or PromptLookup(config.speculation))
        if config.limit < config.max_model_len:
            log.warning(
                "sequences end at %d tokens, not at %d: there are no more KV blocks", config.limit, config.max_model_len
            )
        if config.max_running < config.max_num_seqs:
            log.warning(
                "%d sequences run at once, not %d: a step has no more tokens", config.max_running, config.max_num_seqs
            )
        self._queue = make_queue(config.policy, config.limit, dict(config.tenant_weights))
        self._beams = Beams()
        self._requests: dict[str, list[Sequence]] = {}  # the unfinished sequences of each
        self._waiting = WaitingLine(self._queue)
        self._running: dict[int, Sequence] = {}  # by order, in order of admission
        self._free_slots = list(range(config.max_num_seqs))
        self._drops: list[int] = []
        self._in_flight: deque[_InFlight] = deque()
        self._next_order = 0
        self._live = 0
        self._counts = Counts()

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished or any result outstanding."""
        return bool(self._live or self._in_flight)

    def add(self, request: Request) -> None:
        """Queue a request. CapacityError if it could not run even alone, UsageError for an id in use."""
        if request.id in self._requests:
            raise UsageError(f"request id `{request.id}` is in use", "give each request its own id")
        self._config.check(request)
        leader = Sequence(request, 0, self._next_order, self._config.limit)
        samples = [leader] + [
            Sequence(request, index, self._next_order + index, self._config.limit, leader)
            for index in range(1, max(request.sampling.n, request.sampling.beam_width))
        ]
        self._next_order += len(samples)
        self._live += len(samples)
        self._requests[request.id] = samples
        if leader.is_beam:
            self._beams.open(tuple(samples))
        else:
            self._waiting.hold(leader, samples[1:])
        self._enqueue(leader)

    def abort(self, request_id: str, index: int | None = None) -> tuple[Output, ...]:
        """End every unfinished sequence of the request, or only that with this index; an unknown one is no error.

        Its blocks are free at once. The hypotheses of a beam search end together: an index ends none of them.
        """
        samples = tuple(self._requests.get(request_id, ()))
        if samples and samples[0].is_beam:
            return self._end_search(samples[0], FinishReason.ABORT) if index is None else ()
        samples = tuple(seq for seq in samples if index in (None, seq.index))
        for seq in samples:
            self._waiting.forget(seq)
        return tuple(self._end(seq, (), (), FinishReason.ABORT) for seq in samples)

    def schedule(self) -> Step | None:
        """The next step, or None while nothing can run: no work, or results have to come first."""
        if len(self._in_flight) >= self._config.depth:
            return None
        draft = Draft(self._config.max_num_batched_tokens, self._config.logit_rows)
        for victim in victims(self._running.values(), self._memory, [each.seq for each in self._beams.joining()]):
            self._preempt(victim)
        for joining in self._beams.joining():
            self._join(draft, joining)
        prefills: list[Sequence] = []
        for seq in self._running.values():
            todo = seq.todo
            if seq.announced < 0:
                self._restate(draft, seq)
            if todo == 1:
                if not self._speculator.waits(seq, len(self._running)):
                    self._extend(draft, seq)
            elif todo > 1:
                prefills.append(seq)
        prefills.sort(key=rank)
        if self._may_admit:
            draft.promised = sum(map(self._admission.missing, self._running.values()))
        if prefills and self._queue.overtakes:
            allowed = draft.left // 2
            while (used := self._admit(draft, allowed, whole=True)) > 0:
                allowed -= used
        for seq in prefills:
            draft.promised -= self._admission.missing(seq)
            self._extend(draft, seq)
            draft.promised += self._admission.missing(seq)
        while self._admit(draft, draft.left, whole=False) > 0:
            pass
        self._counts.scheduled_tokens += self._speculator.extend(draft, self._running.values())
        self._memory.drop_held()
        if not draft.rows:
            assert self._in_flight or not self._live, f"{self._live} sequences live and none can run"
            return None
        step = draft.freeze(self._counts.steps, tuple(self._drops))
        self._drops.clear()
        self._counts.steps += 1
        self._in_flight.append(_InFlight(step.index, tuple(draft.rows)))
        return step

    def update(self, result: StepResult) -> tuple[Output, ...]:
        """What the oldest step in flight brought, one Output for each sequence that got a token or ended."""
        flight = self._in_flight.popleft()
        assert flight.step == result.index, f"result of step {result.index}, expected that of {flight.step}"
        assert len(flight.rows) == len(result.chunks), (len(flight.rows), len(result.chunks))
        outputs: list[Output] = []
        for row, chunk in zip(flight.rows, result.chunks):
            if row.seq.is_beam:
                outputs.extend(self._settle_beam(row, chunk))
            elif (output := self._settle(row, chunk)) is not None:
                outputs.append(output)
        return tuple(outputs)

    def stats(self) -> SchedulerStats:
        """Counts as they are now."""
        return self._counts.stats(self._memory, self._live - len(self._running), self._running.values())

    def states(self) -> tuple[SequenceState, ...]:
        """Every unfinished sequence, in order of arrival."""
        return tuple(state_of(seq) for samples in self._requests.values() for seq in samples)

    def _enqueue(self, seq: Sequence) -> None:
        self._waiting.push(seq, self._memory.tokens_of(self._admission.start(seq)), self._counts.steps)

    @property
    def _may_admit(self) -> bool:
        return bool(self._waiting) and self._room > 0

    @property
    def _room(self) -> int:
        """Places for more sequences."""
        return min(len(self._free_slots), self._config.max_running - len(self._running)) - self._beams.reserved

    def _preempt(self, seq: Sequence) -> None:
        if not seq.is_beam:
            self._stop(seq)
            if seq.in_flight == 0:
                self._enqueue(seq)
            return
        group = self._beams.of(seq)
        for each in group.members:
            if each.phase is Phase.RUNNING:
                self._stop(each)
        group.restart()
        if not any(each.in_flight for each in group.members):
            self._enqueue(group.head)

    def _stop(self, seq: Sequence) -> None:
        """Take a running sequence's memory, and its slot unless a step in flight still uses it."""
        seq.move(Phase.PREEMPTED)
        self._counts.preemptions += 1
        del self._running[seq.order]
        self._memory.release(seq)
        seq.scheduled = seq.computed = 0
        self._free_slot(seq)

    def _join(self, draft: Draft, joining: Joining) -> None:
        """Let a beam run beside others of its search, if a block can be had for it."""
        if draft.left <= 0 or self._memory.available == 0:
            return
        seq = joining.seq
        self._beams.of(seq).joining.remove(joining)
        self._enter(draft, seq, self._memory.fork(joining.source, joining.tokens))

    def _restate(self, draft: Draft, seq: Sequence) -> None:
        """Tell the runner of a running beam again: it goes on with another token than the likeliest."""
        self._drops.append(seq.slot)
        draft.admit(seq, Start(()), None)
        seq.announced = 0

    def _enter(self, draft: Draft, seq: Sequence, start: Start) -> None:
        """Give the sequence a slot and its first blocks."""
        seq.move(Phase.RUNNING)
        seq.slot = heapq.heappop(self._free_slots)
        self._running[seq.order] = seq
        draft.admit(seq, start, self._memory.begin(seq, start))
        skipped = self._memory.tokens_of(start)
        seq.scheduled = seq.computed = skipped
        seq.charged = max(seq.charged, skipped)

    def _extend(self, draft: Draft, seq: Sequence) -> int:
        """Schedule as much of a running sequence as tokens and blocks allow; how many tokens that is."""
        start = seq.scheduled
        end = start + min(seq.todo, draft.left)
        if seq.known_in(start, end) > draft.logits_left:
            end = max(start, seq.probed) + draft.logits_left
        if self._samples(seq, end) and seq.known_in(start, end) == draft.logits_left:
            end -= 1
        end = min(self._memory.grow(seq, end), end)
        if end <= start:
            return 0
        count = end - start
        samples, known = self._samples(seq, end), seq.known_in(start, end)
        draft.row(seq, count, samples, known)
        seq.probed += known
        self._counts.scheduled_tokens += count
        seq.scheduled = end
        self._counts.recomputed_tokens += count - self._charge(seq)
        seq.in_flight += 1
        seq.pending += samples
        return count

    @staticmethod
    def _samples(seq: Sequence, end: int) -> bool:
        """Whether computing up to `end` gives a token that may be accepted."""
        return end == len(seq.tokens) + seq.pending and seq.wants_token

    def _charge(self, seq: Sequence) -> int:
        """Count the positions that were scheduled for the first time as served to the tenant; how many there were."""
        new = max(seq.scheduled - seq.charged, 0)
        self._queue.served(seq.request.tenant, new)
        seq.charged += new
        return new

    def _admit(self, draft: Draft, allowed: int, whole: bool) -> int:
        """Admit the head of the queue and schedule up to `allowed` of its tokens; 0 if it cannot enter now.

        `whole`: only if all of its known tokens can be computed in this step.
        """
        if allowed <= 0 or draft.logits_left == 0 or not self._may_admit:
            return 0
        head = self._waiting.head()
        if head is None or (whole and head[1].prompt > allowed):
            return 0
        seq = head[0]
        if places(seq) > self._room:
            return 0
        start = self._admission.affordable(seq, draft.promised, not self._running)
        if start is None:
            return 0
        skipped = self._memory.tokens_of(start)
        if whole and len(seq.tokens) - skipped > allowed:
            return 0
        self._waiting.pop()
        if seq.phase is Phase.WAITING and seq is seq.leader:
            self._memory.tree.tick()
            seq.cached_tokens = skipped
            self._counts.query_tokens += seq.prompt_len
            self._counts.hit_tokens += skipped
        self._enter(draft, seq, start)
        used = self._extend(draft, seq)
        assert used > 0, f"sequence {seq.index} of `{seq.request.id}` was admitted without room for a token"
        draft.promised += self._admission.missing(seq)
        return used

    def _settle(self, row: Row, chunk: ChunkResult) -> Output | None:
        seq, drafted = row.seq, len(row.drafts)
        seq.in_flight -= 1
        seq.pending -= row.samples
        if seq.phase is Phase.FINISHED:  # scheduled before its end was known, or aborted
            self._free_slot(seq)
            return None
        if drafted:
            self._verified(row, chunk)
        elif not chunk.finite:
            return self._end(seq, (), (), FinishReason.ERROR, not_finite(row, chunk))
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
                self._charge(seq)
        finish = finish_of(seq, tokens)
        if finish is not None:
            return self._end(seq, tokens, logprobs, finish)
        if tokens:
            self._unblock(seq)
        if seq.phase is Phase.RUNNING:
            self._memory.publish(seq)
        elif seq.in_flight == 0:
            self._free_slot(seq)
            self._enqueue(seq)
        return output_of(seq, self._config.epoch, tokens, logprobs) if tokens else None

    def _settle_beam(self, row: Row, chunk: ChunkResult) -> tuple[Output, ...]:
        """As `_settle`, for a sequence of a beam search: it has Outputs only when the search has ended."""
        seq = row.seq
        seq.in_flight -= 1
        seq.pending -= row.samples
        if seq.phase is Phase.FINISHED:
            self._free_slot(seq)
            return ()
        group = self._beams.of(seq)
        if seq.phase is Phase.PREEMPTED:
            if chunk.finite:
                take_known(row, chunk)
            self._free_slot(seq)
            if not any(each.in_flight for each in group.members):
                self._enqueue(group.head)
            return ()
        if not chunk.finite:
            return self._end_search(seq, FinishReason.ERROR, not_finite(row, chunk))
        chunk = take_known(row, chunk)
        seq.computed = row.start + row.tokens
        self._memory.publish(seq)
        if not row.samples:
            return ()
        lost, over = group.note(seq, chunk)
        if over:
            return self._end_search(seq, FinishReason.STOP)
        for each in lost:
            each.move(Phase.PREEMPTED)
            del self._running[each.order]
            self._memory.drop(each)
            each.scheduled = each.computed = 0
            self._free_slot(each)
        return ()

    def _end_search(self, seq: Sequence, finish: FinishReason, error: str = "") -> tuple[Output, ...]:
        """End all sequences of a search; STOP for one that has come to its own end, with what it found."""
        group = self._beams.of(seq)
        for each in group.members:
            self._end(each, (), (), finish, error)
        self._beams.close(seq)
        found = group.best() if finish is FinishReason.STOP else (Hypothesis(finish=finish),) * seq.request.sampling.n
        return tuple(
            hypothesis_output(group.members[0], index, self._config.epoch, hypothesis, error)
            for index, hypothesis in enumerate(found)
        )

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

    def _end(
        self,
        seq: Sequence,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        finish: FinishReason,
        error: str = "",
    ) -> Output:
        if seq.phase is Phase.RUNNING:
            del self._running[seq.order]
            if finish is FinishReason.ERROR:
                self._memory.discard(seq)
            else:
                self._memory.release(seq)
        else:
            self._waiting.remove(seq)
        seq.move(Phase.FINISHED)
        self._live -= 1
        samples = self._requests[seq.request.id]
        samples.remove(seq)
        if not samples:
            del self._requests[seq.request.id]
        if finish in (FinishReason.STOP, FinishReason.LENGTH):
            self._queue.finished(seq.request.tenant, seq.generated)
        self._speculator.forget(seq)
        self._unblock(seq)
        self._free_slot(seq)
        return output_of(seq, self._config.epoch, tokens, logprobs, finish, error)

    def _unblock(self, leader: Sequence) -> None:
        """The leader's prompt is computed, or it has ended: its siblings may come."""
        for sibling in self._waiting.release(leader):
            self._enqueue(sibling)

    def _free_slot(self, seq: Sequence) -> None:
        """Give the runner slot back, unless a step in flight still uses it: then this is called again."""
        if seq.slot >= 0 and seq.in_flight == 0:
            heapq.heappush(self._free_slots, seq.slot)
            self._drops.append(seq.slot)
            seq.slot = -1


class _InFlight(NamedTuple):
    step: int
    rows: tuple[Row, ...]
