"""Who is admitted next. Pure: tickets in, tickets out; the clock counts steps, and nothing here knows a block.

There are two levels, and a policy is a choice on each. Across tenants `hybrid` and `fair` have a weighted fair queue
on served tokens (Sheng et al.: Fairness in Serving Large Language Models, OSDI 2024): the tenant served least so far
is next, and one that comes back from idleness starts at the present virtual time, so it can neither save up nor lose
credit. Within a tenant, or among all where tenants do not count, `hybrid` and `sjf` take the shortest expected job
first, with aging. All jobs age at the same rate, so `cost - rate * waited` orders them like `cost + rate * arrival`,
which never changes while a job waits: a heap is enough. With rate = max_cost / max_wait no job is overtaken by one
that came more than max_wait steps after it. `fair` takes a tenant's jobs in the order of arrival.

These three put lower priority numbers first, as `priority` does, which else takes the order of arrival. Under all four
what has become urgent goes before the others of its tenant and priority. `fcfs` is the order of arrival alone. Under
each the preempted come before the new of their priority: they hold results already.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from typing import Protocol

from ...kernels.errors import UsageError
from ..config import POLICIES
from .tickets import Ticket, TicketHeap

MAX_WAIT = 512  # steps
EXPECTED_TOKENS = 256  # of a tenant's first job: nothing is known yet
MEAN_WINDOW = 16  # jobs that a tenant's running mean of outputs remembers, roughly


class Queue(Protocol):
    """The waiting sequences in the order of a policy.

    `overtakes`: a short prompt may pass a long one under way. `ranks`: so may any of a more important request.
    """

    overtakes: bool
    ranks: bool

    def __len__(self) -> int: ...
    def push(self, ticket: Ticket) -> None: ...
    def head(self) -> Ticket | None: ...
    def pop(self) -> Ticket: ...
    def remove(self, ticket: Ticket) -> None: ...
    def served(self, tenant: str, tokens: int) -> None: ...
    def finished(self, tenant: str, tokens: int) -> None: ...


def make_queue(policy: str, max_cost: int, weights: Mapping[str, float]) -> Queue:
    """An empty queue of the named policy. `max_cost`: tokens of the largest job there can be."""
    for tenant, weight in weights.items():
        if not 0 < weight < math.inf:
            raise UsageError(f"the weight of tenant `{tenant}` is {weight}, it must be above 0 and finite")
    match policy:
        case "hybrid" | "fair" | "sjf":
            return SharedQueue(max_cost, weights, fair=policy != "sjf", shortest=policy != "fair")
        case "priority" | "fcfs":
            return ArrivalQueue(by_priority=policy == "priority")
    raise UsageError(f"--scheduling-policy is `{policy}`", f"choose one of: {', '.join(POLICIES)}")


class ArrivalQueue:
    """First come, first served; more important requests before others if `by_priority`."""

    def __init__(self, by_priority: bool) -> None:
        self.overtakes = False
        self.ranks = by_priority
        self._heap = TicketHeap()

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, ticket: Ticket) -> None:
        urgency = (ticket.priority, not ticket.resumed, ticket.due) if self.ranks else (not ticket.resumed,)
        self._heap.push(urgency, ticket)

    def head(self) -> Ticket | None:
        return self._heap.head()

    def pop(self) -> Ticket:
        return self._heap.pop()

    def remove(self, ticket: Ticket) -> None:
        self._heap.remove(ticket)

    def served(self, tenant: str, tokens: int) -> None:
        """Nothing: who was served how much is no matter here."""

    def finished(self, tenant: str, tokens: int) -> None:
        """Nothing: how long outputs are is no matter here."""


class SharedQueue:
    """Tenants in turn by what they were served, unless not `fair`; the `shortest` expected job first, or the earliest.

    A lane holds the jobs of one tenant, or of all.
    """

    def __init__(
        self,
        max_cost: int,
        weights: Mapping[str, float],
        fair: bool = True,
        shortest: bool = True,
        max_wait: int = MAX_WAIT,
    ) -> None:
        self.overtakes = self.ranks = True
        self._fair, self._shortest = fair, shortest
        self._weights = weights
        self._aging = max_cost / max_wait  # cost units per step
        self._tenants: dict[str, _Tenant] = {}
        self._levels: dict[int, _Level] = {}  # by priority, none empty
        self._resumed = TicketHeap()
        self._virtual_time = 0.0  # tokens served, by weight, to the tenant whose turn came last
        self._prune_at = 1024

    def __len__(self) -> int:
        return len(self._resumed) + sum(level.count for level in self._levels.values())

    def push(self, ticket: Ticket) -> None:
        if ticket.resumed:
            self._resumed.push((ticket.priority,), ticket)
            return
        lane = self._tenant(self._lane(ticket))
        if lane.waiting == 0:
            lane.served = max(lane.served, self._virtual_time)
        lane.waiting += 1
        level = self._levels.get(ticket.priority)
        if level is None:
            level = self._levels[ticket.priority] = _Level(self._tenants)
        level.push(self._lane(ticket), (ticket.due, self._key(ticket) if self._shortest else 0.0), ticket)

    def head(self) -> Ticket | None:
        resumed = self._resumed.head()
        if not self._levels:
            return resumed
        priority = min(self._levels)
        if resumed is not None and resumed.priority <= priority:
            return resumed
        return self._levels[priority].head()

    def pop(self) -> Ticket:
        ticket = self.head()
        assert ticket is not None, "the queue is empty"
        if not ticket.resumed:
            self._virtual_time = max(self._virtual_time, self._tenants[self._lane(ticket)].served)
        self.remove(ticket)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        if ticket.resumed:
            self._resumed.remove(ticket)
            return
        level = self._levels[ticket.priority]
        level.remove(self._lane(ticket), ticket)
        if level.count == 0:
            del self._levels[ticket.priority]
        self._tenants[self._lane(ticket)].waiting -= 1

    def served(self, tenant: str, tokens: int) -> None:
        """`tenant` was given so many tokens, prompt or output, that were computed for the first time."""
        if self._fair:
            record = self._tenant(tenant)
            record.served += tokens / record.weight

    def finished(self, tenant: str, tokens: int) -> None:
        """A job of `tenant` ended after so many output tokens."""
        record = self._tenant(tenant)
        record.mean = tokens if record.mean is None else record.mean + (tokens - record.mean) / MEAN_WINDOW

    def _lane(self, ticket: Ticket) -> str:
        return ticket.tenant if self._fair else ""

    def _key(self, ticket: Ticket) -> float:
        """Where the job stands in its lane: what it is expected to cost, and the later it came the further back."""
        mean = self._tenant(ticket.tenant).mean
        cost = ticket.prompt + min(EXPECTED_TOKENS if mean is None else mean, ticket.max_tokens)
        return cost + self._aging * ticket.step

    def _tenant(self, name: str) -> _Tenant:
        record = self._tenants.get(name)
        if record is None:
            if len(self._tenants) >= self._prune_at:
                self._forget_idle()
            record = self._tenants[name] = _Tenant(self._weights.get(name, 1.0), self._virtual_time)
        return record

    def _forget_idle(self) -> None:
        """Drop tenants whose record says no more than a fresh one would, but for their mean."""
        idle = [
            name for name, record in self._tenants.items() if not record.waiting and record.served <= self._virtual_time
        ]
        for name in idle:
            del self._tenants[name]
        self._prune_at = max(1024, 2 * len(self._tenants))


class _Tenant:
    """What is known of a tenant: tokens served by weight (at least the virtual time it came back at), mean output."""

    __slots__ = ("mean", "served", "waiting", "weight")

    def __init__(self, weight: float, served: float) -> None:
        self.weight = weight
        self.served = served
        self.mean: float | None = None
        self.waiting = 0


class _Level:
    """The waiting of one priority: a heap of jobs per lane, and a heap of the lanes' turns.

    A turn is filed under what the lane had been served then; that only grows, so a turn that comes up too early is
    filed again.
    """

    def __init__(self, tenants: Mapping[str, _Tenant]) -> None:
        self.count = 0
        self._tenants = tenants
        self._jobs: dict[str, TicketHeap] = {}
        self._turns: list[tuple[float, str]] = []

    def push(self, lane: str, key: tuple[float, float], ticket: Ticket) -> None:
        jobs = self._jobs.get(lane)
        if jobs is None:
            jobs = self._jobs[lane] = TicketHeap()
            heapq.heappush(self._turns, (self._tenants[lane].served, lane))
        jobs.push(key, ticket)
        self.count += 1

    def remove(self, lane: str, ticket: Ticket) -> None:
        self._jobs[lane].remove(ticket)
        self.count -= 1

    def head(self) -> Ticket | None:
        while self._turns:
            filed, name = self._turns[0]
            jobs = self._jobs[name]
            if not jobs:
                heapq.heappop(self._turns)
                del self._jobs[name]
            elif filed < self._tenants[name].served:
                heapq.heapreplace(self._turns, (self._tenants[name].served, name))
            else:
                return jobs.head()
        return None
