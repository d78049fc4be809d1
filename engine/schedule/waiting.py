"""Sequences that wait: in the policy's queue, or for the sibling whose prompt they share."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

from .policy import Queue
from .sequence import Phase, Sequence
from .tickets import Ticket


class WaitingLine:
    """Everything that is neither running nor finished. Not preempted ones whose last result has not come yet."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._queued: dict[int, tuple[Sequence, Ticket]] = {}  # by order
        self._siblings: dict[int, list[Sequence]] = {}  # that wait for their leader's prompt, by its order

    def __len__(self) -> int:
        """How many are in the queue."""
        return len(self._queued)

    def push(self, seq: Sequence, known: int, step: int) -> None:
        """Queue a sequence, `known` of whose tokens need not be computed, at the time of `step`."""
        ticket = Ticket(
            order=seq.order,
            tenant=seq.request.tenant,
            priority=seq.request.priority,
            prompt=len(seq.tokens) - known,
            max_tokens=seq.max_new,
            step=step,
            resumed=seq.phase is Phase.PREEMPTED,
        )
        self._queued[seq.order] = seq, ticket
        self._queue.push(ticket)

    def hurry(self, seq: Sequence, due: float) -> None:
        """Let a sequence go before others, if it is in the queue."""
        if (queued := self._queued.get(seq.order)) is not None:
            self._queue.remove(queued[1])
            ticket = queued[1]._replace(due=due)
            self._queued[seq.order] = seq, ticket
            self._queue.push(ticket)

    def head(self) -> tuple[Sequence, Ticket] | None:
        """Whose turn it is."""
        ticket = self._queue.head()
        return None if ticket is None else self._queued[ticket.order]

    def pop(self) -> None:
        """The head enters."""
        del self._queued[self._queue.pop().order]

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out of the queue if it is there."""
        queued = self._queued.pop(seq.order, None)
        if queued is not None:
            self._queue.remove(queued[1])

    def hold(self, leader: Sequence, siblings: ListLike[Sequence]) -> None:
        """Keep the siblings out of the queue until `release` of their leader."""
        if siblings:
            self._siblings[leader.order] = list(siblings)

    def forget(self, seq: Sequence) -> None:
        """Keep a sequence no longer that waits for its leader's prompt."""
        if seq in (siblings := self._siblings.get(seq.leader.order, [])):
            siblings.remove(seq)

    def release(self, leader: Sequence) -> ListLike[Sequence]:
        """The siblings that were kept; they are the caller's to push now."""
        return self._siblings.pop(leader.order, ())
