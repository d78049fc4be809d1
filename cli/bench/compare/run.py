"""The whole comparison: subjects in turn within each round, each first as often as the others.

Servers that share a scenario are all running while one of them is asked; the others must rest, and what CPU time they
take is counted against them. Scenarios that need a machine of their own get one server at a time, started for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import httpx
import msgspec

from ....engine.load.progress import Progress
from ....kernels.device import Machine, read_machine
from ....kernels.errors import UsageError
from ..drive import Round, drive
from ..guards import Finding, busy
from ..http_target import find_model, make_client
from ..load_shape import Load
from ..memory import PeakMemory
from ..report import load_average, versions
from ..targets import Target
from ..workload import Item, Salter
from .figures import SHOWN_FAULTS, Cpu, Line, Sample, compare, sample
from .lean_transport import LeanTransport
from .scenarios import Prompts, Scenario
from .servers import Server, Servers, on_cpus, running
from .subjects import Subject
from .usage import Usage, read_usage

RESTLESS = 0.02  # of a core: more than a resting server may take
FOREIGN = 0.1  # of the time: more than others may take of the CPUs in use
WARM_UP = 16  # tokens asked of a server before anything counts


@dataclass(frozen=True, slots=True)
class Settings:
    """How a comparison goes. `cpus` are those of servers and client; `salt` "" sends prompts as they are."""

    rounds: int
    threads: int
    cpus: tuple[int, ...]
    timeout_s: float
    ready_s: float
    salt: str


class SubjectFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What was compared: its command line, with 0 for the port, or its URL."""

    name: str
    command: tuple[str, ...]
    url: str


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A whole comparison; everything in `lines` can be worked out again from `samples`."""

    started: str
    machine: Machine
    versions: dict[str, str]
    subjects: tuple[SubjectFacts, ...]
    prompts: str
    cpus: tuple[int, ...]
    threads: int
    rounds: int
    salt: str
    load_average: tuple[tuple[float, float, float], tuple[float, float, float]]
    lines: tuple[Line, ...]
    findings: tuple[Finding, ...]
    partial: bool
    samples: tuple[Sample, ...]


class _Interrupted(Exception):
    """Ctrl-C while requests were being answered: what there is will be reported."""


async def run(subjects: Sequence[Subject], prompts: Prompts, settings: Settings, progress: Progress) -> Comparison:
    """Compare them. Servers that were started are ended, however this ends. Ctrl-C gives a partial comparison.

    Raises EngineDead if a server cannot be started or dies, UsageError for what cannot be run.
    """
    started, before = datetime.now(UTC), load_average()
    shared = [scenario for scenario in prompts.scenarios if not scenario.alone]
    alone = [scenario for scenario in prompts.scenarios if scenario.alone]
    with on_cpus(settings.cpus), running(settings.threads) as servers:
        async with _client(subjects) as client:
            session = _Session(subjects, prompts, settings, servers, client, progress)
            partial = False
            try:
                if shared:
                    await session.share(shared)
                if alone:
                    await session.one_by_one(alone)
            except _Interrupted:
                partial = True
    machine = read_machine()
    return Comparison(
        started=started.isoformat(timespec="seconds"),
        machine=machine,
        versions=versions(peers=False),
        subjects=tuple(
            SubjectFacts(name=subject.name, command=subject.command(0, settings.threads), url=subject.url)
            for subject in subjects
        ),
        prompts=prompts.source,
        cpus=settings.cpus,
        threads=settings.threads,
        rounds=settings.rounds,
        salt=settings.salt,
        load_average=(before, load_average()),
        lines=compare(session.samples, [subject.name for subject in subjects]),
        findings=(*busy(before[0], machine.cores), *findings(session.samples)),
        partial=partial,
        samples=tuple(session.samples),
    )


def _client(subjects: Sequence[Subject]) -> httpx.AsyncClient:
    """The cheapest client that can reach all of them; in any case one connection for each request."""
    plain = all(not subject.url or subject.url.startswith("http://") for subject in subjects)
    return make_client(LeanTransport() if plain else None, keep_alive=False)


def turned(subjects: Sequence[Subject], number: int) -> list[Subject]:
    """The subjects in the order of this round: each comes first once in as many rounds as there are subjects."""
    first = number % len(subjects)
    return [*subjects[first:], *subjects[:first]]


def findings(samples: Sequence[Sample]) -> list[Finding]:
    """What a reader must know of these samples: failures, servers that did not rest, others on the CPUs."""
    found = []
    for subject in dict.fromkeys(one.subject for one in samples):
        own = [one for one in samples if one.subject == subject]
        if failed := sum(one.failed for one in own):
            faults = dict.fromkeys(fault for one in own for fault in one.faults)
            shown = "; ".join(list(faults)[:SHOWN_FAULTS]) or "not answered"
            message = f"{failed} of {sum(one.asked for one in own)} requests failed, their rounds do not count: {shown}"
            found.append(Finding("failures", subject, message, False))
        elapsed = sum(one.cpu.elapsed_s for one in own)
        idle = sum(one.cpu.idle_s for one in own)
        if idle > RESTLESS * elapsed:
            message = f"the other servers took {idle / elapsed:.2f} CPUs while it was asked"
            found.append(Finding("restless servers", subject, message, False))
    elapsed = sum(one.cpu.elapsed_s for one in samples)
    foreign = sum(one.cpu.foreign_s for one in samples)
    if foreign > FOREIGN * elapsed:
        message = f"other programs kept {foreign / elapsed:.2f} of the CPUs in use busy"
        worst = sorted(samples, key=lambda one: -one.cpu.foreign_s / one.cpu.elapsed_s)[:SHOWN_FAULTS]
        message += ", most during " + ", ".join(
            f"{one.scenario} of {one.subject} in round {one.round + 1} ({one.cpu.foreign_s / one.cpu.elapsed_s:.2f})"
            for one in worst
        )
        found.append(Finding("busy machine", "", message, False))
    return found


class _Session:
    def __init__(
        self,
        subjects: Sequence[Subject],
        prompts: Prompts,
        settings: Settings,
        servers: Servers,
        client: httpx.AsyncClient,
        progress: Progress,
    ) -> None:
        self.samples: list[Sample] = []
        self._subjects, self._settings, self._servers = subjects, settings, servers
        self._client, self._progress = client, progress
        self._salter = Salter(settings.salt, prompts.pool)
        self._warm_up = Item(prompts.pool[:WARM_UP], WARM_UP)

    async def share(self, scenarios: Sequence[Scenario]) -> None:
        """All servers up; in every round each scenario is put to every subject before the next one."""
        async with contextlib.AsyncExitStack() as stack:
            targets: dict[str, Target] = {}
            servers: list[Server] = []
            for subject in self._subjects:
                server, target = await stack.enter_async_context(self._up(subject))
                targets[subject.name] = target
                servers += [server] if server is not None else []
                await self._ask(target, [self._warm_up], 1, 0)
            for number in range(self._settings.rounds):
                for scenario in scenarios:
                    items = self._salted(scenario)
                    for subject in turned(self._subjects, number):
                        self._tell(scenario, subject, number)
                        others = [server for server in servers if server.subject is not subject]
                        await self._measure(scenario, items, subject, targets[subject.name], others, number)

    async def one_by_one(self, scenarios: Sequence[Scenario]) -> None:
        """One server at a time, started anew in every round; the first request of its life is that of `startup`."""
        first = [scenario for scenario in scenarios if scenario.kind == "startup"]
        rest = [scenario for scenario in scenarios if scenario.kind != "startup"]
        for number in range(self._settings.rounds):
            asked = {scenario.name: self._salted(scenario) for scenario in scenarios}
            for subject in turned(self._subjects, number):
                if not rest and subject.url:
                    continue
                self._tell(scenarios[0], subject, number)
                async with self._up(subject) as (server, target):
                    if server is None or not first:
                        await self._ask(target, [self._warm_up], 1, 0)
                    for scenario in (*(first if server is not None else ()), *rest):
                        self._tell(scenario, subject, number)
                        began_s = server.began_s if server is not None and scenario.kind == "startup" else None
                        await self._measure(scenario, asked[scenario.name], subject, target, [], number, began_s)

    @contextlib.asynccontextmanager
    async def _up(self, subject: Subject) -> AsyncIterator[tuple[Server | None, Target]]:
        """The subject's server, ready; one that was started here is ended afterwards."""
        if subject.url:
            await find_model(self._client, subject.url, "", subject.model, self._settings.ready_s)
            yield None, await subject.target(self._client, subject.url, ())
            return
        server = self._servers.start(subject)
        try:
            await server.wait_ready(self._client, self._settings.ready_s)
            yield server, await subject.target(self._client, server.base_url, server.pids)
        finally:
            await self._servers.stop(server)

    async def _measure(
        self,
        scenario: Scenario,
        items: list[Item],
        subject: Subject,
        target: Target,
        others: Sequence[Server],
        number: int,
        began_s: float | None = None,
    ) -> None:
        trees = (target.pids, *(server.pids for server in others))
        begun, asked_s = read_usage(trees, self._settings.cpus), time.monotonic()
        memory = PeakMemory(target.pids) if scenario.kind == "mixed" and scenario.alone else None
        try:
            seen = await self._ask(target, items, scenario.at_once, number)
        finally:
            peak = None if memory is None else memory.stop()
        ended = read_usage(trees, self._settings.cpus)
        first_token_s = None
        if began_s is not None and seen.observations and seen.observations[0].arrivals_s:
            first_token_s = asked_s - began_s + seen.observations[0].arrivals_s[0]
        seen = msgspec.structs.replace(seen, peak_pss_bytes=peak)
        self.samples.append(sample(scenario, items, seen, subject.name, used(begun, ended, target.pids), first_token_s))
        if seen.interrupted:
            raise _Interrupted
        if any(observation.error for observation in seen.observations):
            await self._servers.check_after_failures(self._client)
        else:
            self._servers.check()

    async def _ask(self, target: Target, items: list[Item], at_once: int, number: int) -> Round:
        load = Load(at_once)
        return await drive(target, items, (0.0,) * len(items), load, self._settings.timeout_s, number)

    def _salted(self, scenario: Scenario) -> list[Item]:
        return [self._salter.apply(item) for item in scenario.items]

    def _tell(self, scenario: Scenario, subject: Subject, number: int) -> None:
        self._progress(f"round {number + 1} of {self._settings.rounds}: {scenario.name}, {subject.name}", 0, 0)


def used(begun: Usage, ended: Usage, own: tuple[int, ...]) -> Cpu:
    """What was used between two readings, whose first tree is the asked server's (`own` is empty if it is not here)."""
    trees = [max(0.0, after - before) for before, after in zip(begun.trees_s, ended.trees_s, strict=True)]
    client = ended.own_s - begun.own_s
    busy_s = ended.busy_s - begun.busy_s
    return Cpu(
        elapsed_s=ended.at_s - begun.at_s,
        server_s=trees[0] if own else None,
        client_s=client,
        idle_s=sum(trees[1:]),
        foreign_s=max(0.0, busy_s - client - sum(trees)),
    )


def check_fit(settings: Settings, subjects: Sequence[Subject], scenarios: Sequence[Scenario]) -> None:
    """Raise UsageError for settings that cannot work."""
    if settings.rounds < 1:
        raise UsageError(f"--rounds is {settings.rounds}, it must be at least 1")
    if not settings.timeout_s > 0 or not settings.ready_s > 0:
        raise UsageError(
            f"--request-timeout is {settings.timeout_s:g} and --ready-timeout {settings.ready_s:g}",
            "both must be above 0",
        )
    if all(subject.url for subject in subjects) and all(scenario.kind == "startup" for scenario in scenarios):
        raise UsageError("servers that run already cannot be started", "leave `startup` out of --only")
