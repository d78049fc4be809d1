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
from .draft import Draft, Row
from .limits import SchedulerConfig
from .memory import KVMemory
from .outcome import accepted_of, finish_of, logprobs_of, output_of
from .policy import make_queue
from .sequence import Phase, Sequence
from .speculate import Speculator
from .stats import Counts, SchedulerStats, SequenceState, state_of
from .step import ChunkResult, Step, StepResult
from .waiting import WaitingLine

log = logging.getLogger(__name__)


class Scheduler:
    """Requests in, Steps out, results in, Outputs out. Not thread-safe; makes no system call and reads no clock."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._memory = KVMemory(config.num_blocks, config.block_size, config.enable_prefix_caching, config.eviction_k)
        self._admission = Admission(self._memory)
        self._speculator = Speculator(config.speculation, self._memory)
        if config.limit < config.max_model_len:
            log.warning(
                "sequences end at %d tokens, not at %d: there are no more KV blocks", config.limit, config.max_model_len
            )
        if config.max_running < config.max_num_seqs:
            log.warning(
                "%d sequences run at once, not %d: a step has no more tokens", config.max_running, config.max_num_seqs
            )
        self._queue = make_queue(config.policy, config.limit, dict(config.tenant_weights))
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
            for index in range(1, request.sampling.n)
        ]
        self._next_order += len(samples)
        self._live += len(samples)
        self._requests[request.id] = samples
        self._waiting.hold(leader, samples[1:])
        self._enqueue(leader)

    def abort(self, request_id: str, index: int | None = None) -> tuple[Output, ...]:
        """End every unfinished sequence of the request, or only that with this index; an unknown one is no error.

        Its blocks are free at once.
        """
        samples = tuple(seq for seq in self._requests.get(request_id, ()) if index in (None, seq.index))
        for seq in samples:
            self._waiting.forget(seq)
        return tuple(self._end(seq, (), (), FinishReason.ABORT) for seq in samples)

    def schedule(self) -> Step | None:
        """The next step, or None while nothing can run: no work, or results have to come first."""
        if len(self._in_flight) >= self._config.depth:
            return None
        draft = Draft(self._config.max_num_batched_tokens)
        for victim in victims(self._running.values(), self._memory):
            self._preempt(victim)
        prefills: list[Sequence] = []
        for seq in self._running.values():
            todo = seq.todo
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
        outputs = [self._settle(row, chunk) for row, chunk in zip(flight.rows, result.chunks)]
        return tuple(output for output in outputs if output is not None)

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
        return bool(self._waiting and self._free_slots) and len(self._running) < self._config.max_running

    def _preempt(self, seq: Sequence) -> None:
        seq.move(Phase.PREEMPTED)
        self._counts.preemptions += 1
        del self._running[seq.order]
        self._memory.release(seq)
        seq.scheduled = seq.computed = 0
        if seq.in_flight == 0:
            self._free_slot(seq)
            self._enqueue(seq)

    def _extend(self, draft: Draft, seq: Sequence) -> int:
        """Schedule as much of a running sequence as tokens and blocks allow; how many tokens that is."""
        end = seq.scheduled + min(seq.todo, draft.left)
        count = min(self._memory.grow(seq, end), end) - seq.scheduled
        if count <= 0:
            return 0
        end = seq.scheduled + count
        samples = end == len(seq.tokens) + seq.pending and seq.wants_token
        draft.row(seq, count, samples)
        self._counts.scheduled_tokens += count
        seq.scheduled = end
        self._counts.recomputed_tokens += count - self._charge(seq)
        seq.in_flight += 1
        seq.pending += samples
        return count

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
        if allowed <= 0 or not self._may_admit:
            return 0
        head = self._waiting.head()
        if head is None or (whole and head[1].prompt > allowed):
            return 0
        seq = head[0]
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
        seq.move(Phase.RUNNING)
        seq.slot = heapq.heappop(self._free_slots)
        self._running[seq.order] = seq
        draft.admit(seq, start, self._memory.begin(seq, start))
        seq.scheduled = seq.computed = skipped
        seq.charged = max(seq.charged, skipped)
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
            error = f"the model gave NaN or Inf at position {row.start + row.tokens - 1}"
            return self._end(seq, (), (), FinishReason.ERROR, error)
        else:
            assert len(chunk.tokens) == row.samples, f"{len(chunk.tokens)} tokens sampled, expected {int(row.samples)}"
        tokens = accepted_of(seq, chunk)
        logprobs = logprobs_of(chunk, len(tokens))
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

    def _verified(self, row: Row, chunk: ChunkResult) -> None:
        """Learn from a chunk with drafts.

        A value that is not finite may come from a draft, so it ends nothing: its position is computed again without.
        """
        accepted = max(len(chunk.tokens) - 1, 0)
        assert accepted <= len(row.drafts) and (chunk.tokens or not chunk.finite), (row, chunk)
        self._counts.drafts += 1
        self._counts.draft_tokens += len(row.drafts)
        self._counts.accepted_tokens += accepted
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
