"""Compiles many kernels for many architectures by several processes, and tells of each as it is done.

What is in the cache already is not compiled again, and each kernel gets there by itself: work that was cut short goes
on where it was when it is started again. A kernel that does not compile is a result like any other.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from ..errors import LlmctlError
from .jit import Jit, Resources
from .source import Kernel

_WAITING = 4  # jobs handed out beyond those that run: few, so that an interrupt ends soon


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel for an architecture."""

    arch: str
    kernel: Kernel


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job. `error` is "" if it compiled, and then there are `resources`."""

    job: Job
    compiled: bool = False
    resources: Resources | None = None
    error: str = ""

    @property
    def spills(self) -> int:
        """Bytes of registers in memory."""
        return 0 if self.resources is None else self.resources.spills


@dataclass(frozen=True, slots=True)
class Family:
    """The kernels of one template for one architecture: how many, and the most that a thread of one takes.

    spills and local are bytes: registers that are kept in memory, and all that a thread has there.
    """

    template: str
    arch: str
    kernels: int
    registers: int
    spills: int
    local: int


def families(outcomes: Iterable[Outcome]) -> list[Family]:
    """What compiled, by template and architecture, in the order in which they first came."""
    kept: dict[tuple[str, str], list[Resources]] = {}
    for outcome in outcomes:
        if outcome.resources is not None:
            kept.setdefault((outcome.job.kernel.template, outcome.job.arch), []).append(outcome.resources)
    return [
        Family(
            template, arch, len(these), max(one.registers for one in these), max(one.spills for one in these),
            max(one.stack for one in these),
        )
        for (template, arch), these in kept.items()
    ]  # fmt: skip


def compile_many(jobs: Sequence[Job], folder: Path, workers: int) -> Iterator[Outcome]:
    """Each job's outcome, in the order in which they end."""
    if workers == 1:
        yield from (_compile(job, folder) for job in jobs)
        return
    waiting = deque(jobs)
    while waiting:
        died = yield from _by_processes(waiting, folder, workers)
        # Which of them killed its process nobody can say: they go on one by one.
        for job in died:
            yield from _by_itself(job, folder)


def _by_processes(waiting: deque[Job], folder: Path, workers: int) -> Generator[Outcome, None, list[Job]]:
    """Takes jobs from `waiting` until there are none; returns those that were under way when a process died."""
    open_jobs: dict[Future[Outcome], Job] = {}
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    finished = False
    try:
        while waiting or open_jobs:
            while waiting and len(open_jobs) < workers + _WAITING:
                job = waiting.popleft()
                open_jobs[pool.submit(_compile, job, folder)] = job
            done, _ = wait(open_jobs, return_when=FIRST_COMPLETED)
            for future in done:
                outcome = future.result()
                del open_jobs[future]
                yield outcome
        finished = True
    except BrokenProcessPool:
        return list(open_jobs.values())
    finally:
        # Idle workers are told to end before anything at exit closes the queue that tells them. Whoever interrupts
        # would wait for those that compile: they are ended.
        if not finished:
            _end_workers(pool)
        pool.shutdown(wait=True, cancel_futures=True)
    return []


def _end_workers(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):
        process.terminate()


def _by_itself(job: Job, folder: Path) -> Iterator[Outcome]:
    left = deque((job,))
    died = yield from _by_processes(left, folder, 1)
    if died:
        yield Outcome(job, error="the compiler's process died")


def _compile(job: Job, folder: Path) -> Outcome:
    jit = Jit(folder, job.arch)
    try:
        compiled = not jit.has(job.kernel)
        resources = jit.get(job.kernel).resources
    except LlmctlError as error:
        return Outcome(job, error=error.message)
    return Outcome(job, compiled, resources)
