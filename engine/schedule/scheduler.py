"""Continuous batching: which positions of which sequences the next step computes, and what their results mean.

A step takes one token of every decoding sequence first, then cuts prompts into what is left of the token budget. One
long prompt is under way at a time, but under `hybrid` short ones may use up to half of the budget beside it, so that
they do not wait behind it. Blocks are given as chunks are scheduled. When memory is short, cached leaves go first, then
sequences are preempted: those that lose least, never the first in rank. That one can always go on alone, since `add`
refused what does not fit, so everything ends. Admission keeps a reserve, lest it be followed by a preemption.

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
from .draft import Draft, Row
from .limits import SchedulerConfig
from .memory import KVMemory, Start
from .policy import Ticket, make_queue
from .sequence import Phase, Sequence
from .stats import SchedulerStats, SequenceState
from .step import ChunkResult, Step, StepResult

log = logging.getLogger(__name__)


class Scheduler:
    """Requests in, Steps out, results in, Outputs out. Not thread-safe; makes no system call and reads no clock."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._memory = KVMemory(config.num_blocks, config.block_size, config.enable_prefix_caching, config.eviction_k)
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
        self._waiting: dict[int, tuple[Sequence, Ticket]] = {}  # in the queue, by order
        self._running: dict[int, Sequence] = {}  # by order, in order of admission
        self._free_slots = list(range(config.max_num_seqs))
        self._drops: list[int] = []
        self._in_flight: deque[_InFlight] = deque()
        self._refused = _Refused(-1, 0, 0)
        self._blocked: dict[int, list[Sequence]] = {}  # siblings that wait for their leader's prompt, by its order
        self._next_order = 0
        self._steps = 0
        self._live = 0
        self._scheduled_tokens = 0
        self._recomputed_tokens = 0
        self._preemptions = 0
        self._query_tokens = 0
        self._hit_tokens = 0

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
        if len(samples) > 1:
            self._blocked[leader.order] = samples[1:]
        self._enqueue(leader)

    def abort(self, request_id: str, index: int | None = None) -> tuple[Output, ...]:
        """End every unfinished sequence of the request, or only that with this index; an unknown one is no error.

        Its blocks are free at once.
        """
        samples = tuple(seq for seq in self._requests.get(request_id, ()) if index in (None, seq.index))
        for seq in samples:
            if seq in (siblings := self._blocked.get(seq.leader.order, [])):
                siblings.remove(seq)
        return tuple(self._end(seq, (), (), FinishReason.ABORT) for seq in samples)

    def schedule(self) -> Step | None:
        """The next step, or None while nothing can run: no work, or results have to come first."""
        if len(self._in_flight) >= self._config.depth:
            return None
        draft = Draft(self._config.max_num_batched_tokens)
        self._make_room()
        prefills: list[Sequence] = []
        for seq in self._running.values():
            todo = seq.todo
            if todo == 1:
                self._extend(draft, seq)
            elif todo > 1:
                prefills.append(seq)
        prefills.sort(key=_rank)
        if self._may_admit:
            draft.promised = sum(map(self._missing, self._running.values()))
        if prefills and self._queue.overtakes:
            allowed = draft.left // 2
            while (used := self._admit(draft, allowed, whole=True)) > 0:
                allowed -= used
        for seq in prefills:
            draft.promised -= self._missing(seq)
            self._extend(draft, seq)
            draft.promised += self._missing(seq)
        while self._admit(draft, draft.left, whole=False) > 0:
            pass
        self._memory.drop_held()
        if not draft.rows:
            assert self._in_flight or not self._live, f"{self._live} sequences live and none can run"
            return None
        step = draft.freeze(self._steps, tuple(self._drops))
        self._drops.clear()
        self._steps += 1
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
        pools, tree = self._memory.pools, self._memory.tree
        return SchedulerStats(
            waiting=self._live - len(self._running),
            running=len(self._running),
            blocks_free=sum(pool.num_free for pool in pools),
            blocks_active=sum(pool.num_active for pool in pools),
            blocks_cached=sum(pool.num_cached for pool in pools),
            steps=self._steps,
            scheduled_tokens=self._scheduled_tokens,
            recomputed_tokens=self._recomputed_tokens,
            preemptions=self._preemptions,
            evictions=tree.evictions,
            evicted_reused=tree.evicted_reused,
            prefix_query_tokens=self._query_tokens,
            prefix_hit_tokens=self._hit_tokens,
        )

    def states(self) -> tuple[SequenceState, ...]:
        """Every unfinished sequence, in order of arrival."""
        return tuple(
            SequenceState(
                request_id=seq.request.id,
                index=seq.index,
                phase=seq.phase,
                prompt_tokens=seq.prompt_len,
                generated_tokens=seq.generated,
                computed_tokens=seq.computed,
                blocks=len(seq.blocks),
                slot=seq.slot,
            )
            for samples in self._requests.values()
            for seq in samples
        )

    def _enqueue(self, seq: Sequence) -> None:
        resumed = seq.phase is Phase.PREEMPTED
        known = self._memory.tokens_of(self._start(seq))
        ticket = Ticket(
            order=seq.order,
            tenant=seq.request.tenant,
            priority=seq.request.priority,
            prompt=len(seq.tokens) - known,
            max_tokens=seq.max_new,
            step=self._steps,
            resumed=resumed,
        )
        self._waiting[seq.order] = seq, ticket
        self._queue.push(ticket)

    def _start(self, seq: Sequence) -> Start:
        """The best start there is for a waiting sequence."""
        leader = seq.leader
        fresh = seq is not leader and seq.generated == 0
        if fresh and leader.phase is Phase.RUNNING and leader.computed >= leader.prompt_len:
            return self._memory.fork(leader)
        return self._memory.find(seq)

    def _missing(self, seq: Sequence) -> int:
        """Blocks the sequence needs besides its own for all its known tokens and one block's worth to come."""
        soon = len(seq.tokens) + seq.pending + self._config.block_size
        return self._memory.blocks_for(min(soon, seq.goal)) - len(seq.blocks)

    @property
    def _may_admit(self) -> bool:
        return bool(self._waiting and self._free_slots) and len(self._running) < self._config.max_running

    def _make_room(self) -> None:
        """Preempt until every decode, and one token of the first in rank, can have the block it may need."""
        if len(self._running) <= self._memory.available:  # at most one block each
            return
        first = min(self._running.values(), key=_rank)
        growing = {
            seq.order
            for seq in self._running.values()
            if (seq.todo == 1 or (seq is first and seq.todo > 0))
            and seq.scheduled == len(seq.blocks) * self._config.block_size
        }
        if len(growing) <= self._memory.available:
            return
        for victim in sorted((seq for seq in self._running.values() if seq is not first), key=self._loss):
            if len(growing) <= self._memory.available:
                break
            growing.discard(victim.order)
            self._preempt(victim)

    def _loss(self, seq: Sequence) -> tuple[int, int, int]:
        """Whom to preempt first: the least important, then who loses least, then who came last."""
        known = seq.published * self._config.block_size
        lost = 0 if seq.scheduled >= seq.goal else seq.scheduled - known
        return -seq.request.priority, lost, -seq.order

    def _preempt(self, seq: Sequence) -> None:
        seq.move(Phase.PREEMPTED)
        self._preemptions += 1
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
        self._scheduled_tokens += count
        new = max(end - seq.charged, 0)
        self._recomputed_tokens += count - new
        self._queue.served(seq.request.tenant, new)
        seq.charged += new
        seq.scheduled = end
        seq.in_flight += 1
        seq.pending += samples
        return count

    def _admit(self, draft: Draft, allowed: int, whole: bool) -> int:
        """Admit the head of the queue and schedule up to `allowed` of its tokens; 0 if it cannot enter now.

        `whole`: only if all of its known tokens can be computed in this step.
        """
        if allowed <= 0 or not self._may_admit:
            return 0
        ticket = self._queue.head()
        if ticket is None or (whole and ticket.prompt > allowed):
            return 0
        seq = self._waiting[ticket.order][0]
        start = self._affordable(draft, seq)
        if start is None:
            return 0
        skipped = self._memory.tokens_of(start)
        if whole and len(seq.tokens) - skipped > allowed:
            return 0
        self._queue.pop()
        del self._waiting[seq.order]
        if seq.phase is Phase.WAITING and seq is seq.leader:
            self._memory.tree.tick()
            seq.cached_tokens = skipped
            self._query_tokens += seq.prompt_len
            self._hit_tokens += skipped
        seq.move(Phase.RUNNING)
        seq.slot = heapq.heappop(self._free_slots)
        self._running[seq.order] = seq
        draft.admit(seq, start, self._memory.begin(seq, start))
        seq.scheduled = seq.computed = skipped
        seq.charged = max(seq.charged, skipped)
        used = self._extend(draft, seq)
        assert used > 0, f"sequence {seq.index} of `{seq.request.id}` was admitted without room for a token"
        draft.promised += self._missing(seq)
        return used

    def _affordable(self, draft: Draft, seq: Sequence) -> Start | None:
        """The sequence's start if memory has what it needs soon, besides what was promised to those running."""
        available = self._memory.available
        if not self._running:
            start = self._start(seq)
            if self._missing(seq) - len(start.columns) > available - self._memory.cost(start):
                start = Start(start.columns, nodes=start.nodes[: len(start.columns)])  # the source has to make room
            return start
        slack = available - draft.promised
        refused = self._refused
        if (refused.order, refused.inserts) == (seq.order, self._memory.tree.inserts) and slack <= refused.slack:
            return None
        start = self._start(seq)
        if self._missing(seq) - len(start.columns) + self._memory.cost(start) > slack:
            self._refused = _Refused(seq.order, self._memory.tree.inserts, slack)
            return None
        return start

    def _settle(self, row: Row, chunk: ChunkResult) -> Output | None:
        seq = row.seq
        seq.in_flight -= 1
        seq.pending -= row.samples
        if seq.phase is Phase.FINISHED:  # scheduled before its end was known, or aborted
            self._free_slot(seq)
            return None
        if not chunk.finite:
            error = f"the model gave NaN or Inf at position {row.start + row.tokens - 1}"
            return self._end(seq, (), (), FinishReason.ERROR, error)
        if seq.phase is Phase.RUNNING:
            seq.computed = row.start + row.tokens
        assert len(chunk.tokens) == row.samples, f"{len(chunk.tokens)} tokens sampled, expected {int(row.samples)}"
        seq.tokens.extend(chunk.tokens)
        finish = self._finish_of(seq, chunk.tokens)
        if finish is not None:
            return self._end(seq, chunk.tokens, _logprobs(chunk), finish)
        if chunk.tokens:
            self._unblock(seq)
        if seq.phase is Phase.RUNNING:
            self._memory.publish(seq)
        elif seq.in_flight == 0:
            self._free_slot(seq)
            self._enqueue(seq)
        return self._output(seq, chunk.tokens, _logprobs(chunk)) if chunk.tokens else None

    def _finish_of(self, seq: Sequence, tokens: tuple[int, ...]) -> FinishReason | None:
        if tokens and tokens[-1] in seq.request.stop_ids:
            return FinishReason.STOP
        if seq.generated >= seq.max_new and (tokens or seq.computed >= seq.goal):
            return FinishReason.LENGTH
        return None

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
        elif seq.order in self._waiting:
            self._queue.remove(self._waiting.pop(seq.order)[1])
        seq.move(Phase.FINISHED)
        self._live -= 1
        samples = self._requests[seq.request.id]
        samples.remove(seq)
        if not samples:
            del self._requests[seq.request.id]
        if finish in (FinishReason.STOP, FinishReason.LENGTH):
            self._queue.finished(seq.request.tenant, seq.generated)
        self._unblock(seq)
        self._free_slot(seq)
        return self._output(seq, tokens, logprobs, finish, error)

    def _unblock(self, leader: Sequence) -> None:
        """The leader's prompt is computed, or it has ended: its siblings may come."""
        for sibling in self._blocked.pop(leader.order, ()):
            self._enqueue(sibling)

    def _free_slot(self, seq: Sequence) -> None:
        """Give the runner slot back, unless a step in flight still uses it: then this is called again."""
        if seq.slot >= 0 and seq.in_flight == 0:
            heapq.heappush(self._free_slots, seq.slot)
            self._drops.append(seq.slot)
            seq.slot = -1

    def _output(
        self,
        seq: Sequence,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        finish: FinishReason | None = None,
        error: str = "",
    ) -> Output:
        return Output(
            request_id=seq.request.id,
            index=seq.index,
            epoch=self._config.epoch,
            first=seq.generated - len(tokens),
            tokens=tokens,
            logprobs=logprobs,
            finish=finish,
            cached_tokens=seq.leader.cached_tokens,
            error=error,
        )


class _InFlight(NamedTuple):
    step: int
    rows: tuple[Row, ...]


class _Refused(NamedTuple):
    """The last sequence that memory had no room for, and how things stood: not worth asking again until they change."""

    order: int
    inserts: int
    slack: int


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.rank


def _logprobs(chunk: ChunkResult) -> tuple[TokenLogprobs, ...]:
    if not chunk.logprobs:
        return ()
    tops = zip(chunk.top_ids, chunk.top_logprobs) if chunk.top_ids else (((), ()) for _ in chunk.logprobs)
    return tuple(TokenLogprobs(logprob, *top) for logprob, top in zip(chunk.logprobs, tops))
