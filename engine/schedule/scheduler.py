"""Continuous batching: which positions of which sequences the next step computes, and what their results mean.

A step takes one token of every decoding sequence first, then cuts prompts into what is left of the token budget. One
long prompt is under way at a time, but under `hybrid` short ones may use up to half of the budget beside it, so that
they do not wait behind it. Blocks are given as chunks are scheduled (`filling.py`). When memory is short, cached leaves
go first, then sequences are preempted (`admission.py`), never the first in rank. That one can always go on alone, since
`add` refused what does not fit, so everything ends.

Steps are executed in the order they are made, so blocks freed here may be given away at once although a step in flight
still writes to them; a runner slot waits for its last result, which is read per slot (`settling.py`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from typing import NamedTuple

from ..request import FinishReason, Output, Request
from .draft import Draft, Row
from .filling import Filler
from .limits import SchedulerConfig
from .lookup import PromptLookup
from .memory import KVMemory
from .pace import Pace
from .policy import make_queue
from .proposer import Proposer
from .roster import Roster
from .sequence import Phase
from .settling import Settler
from .speculate import Speculator
from .states import SequenceState, state_of
from .stats import Counts, SchedulerStats
from .step import Step, StepResult

log = logging.getLogger(__name__)


class Scheduler:
    """Requests in, Steps out, results in, Outputs out. Not thread-safe; makes no system call and reads no clock."""

    def __init__(self, config: SchedulerConfig, proposer: Proposer | None = None) -> None:
        """`proposer` guesses tokens ahead; None: prompt lookup does."""
        if config.limit < config.max_model_len:
            log.warning(
                "sequences end at %d tokens, not at %d: there are no more KV blocks", config.limit, config.max_model_len
            )
        if config.max_running < config.max_num_seqs:
            log.warning(
                "%d sequences run at once, not %d: a step has no more tokens", config.max_running, config.max_num_seqs
            )
        self._config = config
        self._counts = Counts()
        self._memory = KVMemory(
            config.num_blocks,
            config.block_size,
            config.enable_prefix_caching,
            config.eviction_k,
            config.tier_blocks,
            config.preemption_mode,
            config.windows,
        )
        queue = make_queue(config.policy, config.limit, dict(config.tenant_weights))
        proposer = proposer or PromptLookup(config.speculation)
        self._speculator = speculator = Speculator(config.speculation, self._memory, proposer)
        self._roster = Roster(config, self._memory, queue, self._counts)
        self._pace = None if config.pace is None else Pace(config.pace)
        self._filler = Filler(self._roster, self._memory, speculator, self._counts, self._pace)
        self._settler = Settler(self._roster, self._filler, self._memory, speculator, self._counts, config.epoch)
        self._in_flight: deque[_InFlight] = deque()

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished or any result outstanding."""
        return bool(self._roster.live or self._in_flight)

    def add(self, request: Request) -> None:
        """Queue a request. CapacityError if it could not run even alone, UsageError for an id in use."""
        self._roster.add(request)

    def knows(self, request_id: str) -> bool:
        """Whether the request has not ended."""
        return request_id in self._roster.requests

    def hurry(self, request_id: str, due: float) -> None:
        """Let a request that never ran go before others of its tenant and priority, but those with an earlier `due`."""
        for seq in self._roster.requests.get(request_id, ()):
            if seq.leader.phase is Phase.WAITING:
                self._roster.waiting.hurry(seq, due)

    def expire(self, request_id: str, error: str) -> tuple[Output, ...]:
        """End a request that has waited for too long, if it never ran; what it is told is `error`."""
        samples = tuple(self._roster.requests.get(request_id, ()))
        if not samples or samples[0].leader.phase is not Phase.WAITING:
            return ()
        if samples[0].is_beam:
            return self._settler.end_search(samples[0], FinishReason.OVERDUE, error)
        for seq in samples:
            self._roster.waiting.forget(seq)
        return tuple(self._settler.end(seq, (), (), FinishReason.OVERDUE, error) for seq in samples)

    def abort(self, request_id: str, index: int | None = None) -> tuple[Output, ...]:
        """End every unfinished sequence of the request, or only that with this index; an unknown one is no error.

        Its blocks are free at once. The hypotheses of a beam search end together: an index ends none of them.
        """
        samples = tuple(self._roster.requests.get(request_id, ()))
        if samples and samples[0].is_beam:
            return self._settler.end_search(samples[0], FinishReason.ABORT) if index is None else ()
        samples = tuple(seq for seq in samples if index in (None, seq.index))
        for seq in samples:
            self._roster.waiting.forget(seq)
        return tuple(self._settler.end(seq, (), (), FinishReason.ABORT) for seq in samples)

    def schedule(self) -> Step | None:
        """The next step, or None while nothing can run: no work, or results have to come first."""
        if len(self._in_flight) >= self._config.depth:
            return None
        draft = Draft(self._config.max_num_batched_tokens, self._config.logit_rows)
        self._filler.fill(draft)
        if not draft.rows and not self._memory.due:
            assert self._in_flight or not self._roster.live, f"{self._roster.live} sequences live and none can run"
            return None
        step = draft.freeze(self._counts.steps, self._roster.slots.take_drops(), self._memory.take_moves())
        self._counts.steps += 1
        self._in_flight.append(_InFlight(step.index, tuple(draft.rows), draft.decodes, draft.prompt_tokens))
        return step

    def update(self, result: StepResult, seconds: float = 0.0) -> tuple[Output, ...]:
        """What the oldest step in flight brought, one Output for each sequence that got a token or ended.

        `seconds`: how long it took, if that is known.
        """
        flight = self._in_flight.popleft()
        assert flight.step == result.index, f"result of step {result.index}, expected that of {flight.step}"
        assert len(flight.rows) == len(result.chunks), (len(flight.rows), len(result.chunks))
        if self._pace is not None:
            self._pace.learn(flight.decodes, flight.prompt_tokens, seconds)
        self._memory.settle(result, sum(row.tokens for row in flight.rows))
        return self._settler.settle(flight.rows, result.chunks)

    def stats(self) -> SchedulerStats:
        """Counts as they are now."""
        running = self._roster.running
        waiting = self._roster.live - len(running)
        counts = self._counts.stats(self._memory, self._config.bytes_per_block, waiting, running.values())
        return dataclasses.replace(counts, draft_s=self._speculator.seconds)

    def ended(self) -> tuple[SequenceState, ...]:
        """The sequences that ended last, at most `KEPT`, in that order."""
        return tuple(self._roster.ended)

    def states(self) -> tuple[SequenceState, ...]:
        """Every unfinished sequence, in order of arrival."""
        return tuple(state_of(seq) for samples in self._roster.requests.values() for seq in samples)


class _InFlight(NamedTuple):
    step: int
    rows: tuple[Row, ...]
    decodes: int
    prompt_tokens: int
