"""Who is admitted next. Pure: tickets in, tickets out; the clock counts steps, and nothing here knows a block.

`hybrid` has two levels. Across tenants it is a weighted fair queue on served tokens (Sheng et al.: Fairness in Serving
Large Language Models, OSDI 2024): the tenant served least so far is next, and one that comes back from idleness starts
at the present virtual time, so it can neither save up nor lose credit. Within a tenant the shortest expected job is
first, with aging. All jobs age at the same rate, so `cost - rate * waited` orders them like `cost + rate * arrival`,
which never changes while a job waits: a heap is enough. With rate = max_cost / max_wait no job is overtaken by one that
came more than max_wait steps after it. `fcfs` is the order of arrival.

Both put lower priority numbers first, and within a priority the preempted before the new: they hold results already.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from ...kernels.errors import UsageError
from ..config import POLICIES

MAX_WAIT = 512  # steps
EXPECTED_TOKENS = 256  # of a tenant's first job: nothing is known yet
MEAN_WINDOW = 16  # jobs that a tenant's running mean of outputs remembers, roughly


class Ticket(NamedTuple):
    """One waiting sequence. `order` is its arrival number, unique; `prompt` counts tokens that no cache serves yet."""

    order: int
    tenant: str
    priority: int
    prompt: int
    max_tokens: int
    step: int
    resumed: bool = False


class Queue(Protocol):
    """The waiting sequences in the order of a policy. `overtakes`: a short prompt may pass a long one under way."""

    overtakes: bool

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
    if policy == "hybrid":
        return HybridQueue(max_cost, weights)
    if policy == "fcfs":
        return FcfsQueue()
    raise UsageError(f"--scheduling-policy is `{policy}`", f"choose one of: {', '.join(POLICIES)}")


class FcfsQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self.overtakes = False
        self._heap = _Heap()

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, ticket: Ticket) -> None:
        self._heap.push((ticket.priority, not ticket.resumed), ticket)

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


class HybridQueue:
    """Fair across tenants, shortest expected job first within one, with aging."""

    def __init__(self, max_cost: int, weights: Mapping[str, float], max_wait: int = MAX_WAIT) -> None:
        self.overtakes = True
        self._weights = weights
        self._aging = max_cost / max_wait  # cost units per step
        self._tenants: dict[str, _Tenant] = {}
        self._levels: dict[int, _Level] = {}  # by priority, none empty
        self._resumed = _Heap()
        self._virtual_time = 0.0  # tokens served, by weight, to the tenant whose turn came last
        self._prune_at = 1024

    def __len__(self) -> int:
        return len(self._resumed) + sum(level.count for level in self._levels.values())

    def push(self, ticket: Ticket) -> None:
        if ticket.resumed:
            self._resumed.push((ticket.priority,), ticket)
            return
        tenant = self._tenant(ticket.tenant)
        if tenant.waiting == 0:
            tenant.served = max(tenant.served, self._virtual_time)
        tenant.waiting += 1
        mean = EXPECTED_TOKENS if tenant.mean is None else tenant.mean
        cost = ticket.prompt + min(mean, ticket.max_tokens)
        level = self._levels.setdefault(ticket.priority, _Level(self._tenants))
        level.push(cost + self._aging * ticket.step, ticket)

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
            self._virtual_time = max(self._virtual_time, self._tenants[ticket.tenant].served)
        self.remove(ticket)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        if ticket.resumed:
            self._resumed.remove(ticket)
            return
        level = self._levels[ticket.priority]
        level.remove(ticket)
        if level.count == 0:
            del self._levels[ticket.priority]
        self._tenants[ticket.tenant].waiting -= 1

    def served(self, tenant: str, tokens: int) -> None:
        """`tenant` was given so many tokens, prompt or output, that were computed for the first time."""
        record = self._tenant(tenant)
        record.served += tokens / record.weight

    def finished(self, tenant: str, tokens: int) -> None:
        """A job of `tenant` ended after so many output tokens."""
        record = self._tenant(tenant)
        record.mean = tokens if record.mean is None else record.mean + (tokens - record.mean) / MEAN_WINDOW

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
    """The waiting of one priority: a heap of jobs per tenant, and a heap of the tenants' turns.

    A turn is filed under what the tenant had been served then; that only grows, so a turn that comes up too early is
    filed again.
    """

    def __init__(self, tenants: Mapping[str, _Tenant]) -> None:
        self.count = 0
        self._tenants = tenants
        self._jobs: dict[str, _Heap] = {}
        self._turns: list[tuple[float, str]] = []

    def push(self, key: float, ticket: Ticket) -> None:
        jobs = self._jobs.get(ticket.tenant)
        if jobs is None:
            jobs = self._jobs[ticket.tenant] = _Heap()
            heapq.heappush(self._turns, (self._tenants[ticket.tenant].served, ticket.tenant))
        jobs.push((key,), ticket)
        self.count += 1

    def remove(self, ticket: Ticket) -> None:
        self._jobs[ticket.tenant].remove(ticket)
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


class _Heap:
    """Tickets by key, then by order of arrival. Removed ones are skipped when they come up."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[float, ...], int, Ticket]] = []
        self._gone: set[int] = set()

    def __len__(self) -> int:
        return len(self._entries) - len(self._gone)

    def push(self, key: tuple[float, ...], ticket: Ticket) -> None:
        heapq.heappush(self._entries, (key, ticket.order, ticket))

    def head(self) -> Ticket | None:
        while self._entries and self._entries[0][1] in self._gone:
            self._gone.remove(heapq.heappop(self._entries)[1])
        return self._entries[0][2] if self._entries else None

    def pop(self) -> Ticket:
        ticket = self.head()
        assert ticket is not None, "the queue is empty"
        heapq.heappop(self._entries)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Take out a ticket that is in the heap."""
        self._gone.add(ticket.order)
        if len(self._gone) > 64 and 2 * len(self._gone) > len(self._entries):
            self._entries = [entry for entry in self._entries if entry[1] not in self._gone]
            heapq.heapify(self._entries)
            self._gone.clear()
