"""Every unfinished sequence: which wait, which run, and what each move between the two does to memory and slots."""

from __future__ import annotations

from collections import deque

from ...kernels.errors import UsageError
from ..request import FinishReason, Request
from .admission import Admission
from .beams import Beams
from .draft import Draft
from .limits import SchedulerConfig
from .memory import KVMemory, Start
from .policy import Queue
from .sequence import Phase, Sequence
from .slots import Slots
from .states import KEPT, SequenceState, state_of
from .stats import Counts
from .waiting import WaitingLine


class Roster:
    """The sequences by request, the queue, those running (by order, in order of admission) and their slots."""

    def __init__(self, config: SchedulerConfig, memory: KVMemory, queue: Queue, counts: Counts) -> None:
        self.queue = queue
        self.admission = Admission(memory)
        self.beams = Beams()
        self.requests: dict[str, list[Sequence]] = {}
        self.waiting = WaitingLine(queue)
        self.running: dict[int, Sequence] = {}
        self.slots = Slots(config.max_num_seqs)
        self.live = 0
        self.ended: deque[SequenceState] = deque(maxlen=KEPT)
        self._config = config
        self._memory = memory
        self._counts = counts
        self._next_order = 0

    @property
    def may_admit(self) -> bool:
        """Whether anybody waits, and there is a place."""
        return bool(self.waiting) and self.room > 0

    @property
    def room(self) -> int:
        """Places for more sequences."""
        free = min(self.slots.num_free, self._config.max_running - len(self.running))
        return free - self.beams.reserved

    def add(self, request: Request) -> None:
        """Queue a request. CapacityError if it could not run even alone, UsageError for an id in use."""
        if request.id in self.requests:
            raise UsageError(f"request id `{request.id}` is in use", "give each request its own id")
        self._config.check(request)
        leader = Sequence(request, 0, self._next_order, self._config.limit, step=self._counts.steps)
        samples = [leader] + [
            Sequence(request, index, self._next_order + index, self._config.limit, leader, self._counts.steps)
            for index in range(1, max(request.sampling.n, request.sampling.beam_width))
        ]
        self._next_order += len(samples)
        self.live += len(samples)
        self.requests[request.id] = samples
        if leader.is_beam:
            self.beams.open(tuple(samples))
        else:
            self.waiting.hold(leader, samples[1:])
        self.enqueue(leader)

    def enqueue(self, seq: Sequence) -> None:
        """Let the sequence wait for its turn."""
        self.waiting.push(seq, self._memory.known_of(self.admission.start(seq)), self._counts.steps)

    def enter(self, draft: Draft, seq: Sequence, start: Start) -> None:
        """Give the sequence a slot and its first blocks."""
        seq.move(Phase.RUNNING, self._counts.steps)
        self.slots.give(seq)
        self.running[seq.order] = seq
        draft.admit(seq, start, self._memory.begin(seq, start))
        skipped = self._memory.tokens_of(start)
        seq.scheduled = seq.computed = skipped
        seq.charged = max(seq.charged, skipped)

    def preempt(self, seq: Sequence) -> None:
        """Take memory and slot of a running sequence, or of all beams of its search; they wait for their turn again."""
        if not seq.is_beam:
            self._stop(seq)
            if seq.in_flight == 0:
                self.enqueue(seq)
            return
        group = self.beams.of(seq)
        for each in group.members:
            if each.phase is Phase.RUNNING:
                self._stop(each)
        group.restart()
        if not any(each.in_flight for each in group.members):
            self.enqueue(group.head)

    def unseat(self, seq: Sequence) -> None:
        """Take memory and slot of a sequence that has lost its beam. It comes back when it is given another."""
        seq.move(Phase.PREEMPTED, self._counts.steps)
        del self.running[seq.order]
        self._memory.drop(seq)
        seq.scheduled = seq.computed = 0
        self.slots.free(seq)

    def leave(self, seq: Sequence, finish: FinishReason) -> None:
        """The sequence has ended, wherever it was. After an error nothing of what it computed is kept."""
        if seq.phase is Phase.RUNNING:
            del self.running[seq.order]
            if finish is FinishReason.ERROR:
                self._memory.discard(seq)
            else:
                self._memory.release(seq)
        else:
            self.waiting.remove(seq)
        seq.move(Phase.FINISHED, self._counts.steps)
        self.live -= 1
        samples = self.requests[seq.request.id]
        samples.remove(seq)
        if not samples:
            del self.requests[seq.request.id]
        if finish in (FinishReason.STOP, FinishReason.LENGTH):
            self.queue.finished(seq.request.tenant, seq.generated)
        self.unblock(seq)
        self.slots.free(seq)
        self.ended.append(state_of(seq, finish))

    def unblock(self, leader: Sequence) -> None:
        """The leader's prompt is computed, or it has ended: its siblings may come."""
        for sibling in self.waiting.release(leader):
            self.enqueue(sibling)

    def _stop(self, seq: Sequence) -> None:
        """Take a running sequence's memory, and its slot unless a step in flight still uses it."""
        seq.move(Phase.PREEMPTED, self._counts.steps)
        self._counts.preemptions += 1
        del self.running[seq.order]
        self._memory.preempt(seq)
        seq.scheduled = seq.computed = 0
        self.slots.free(seq)
