"""Compiles many kernels for many architectures by several processes, and tells of each as it is done.

What is in the cache already is not compiled again, and each kernel gets there by itself: work that was cut short goes
on where it was when it is started again. A kernel that does not compile is a result like any other.
"""

from __future__ import annotations

import multiprocessing
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from ..errors import LlmctlError
from .jit import Jit
from .source import Kernel

_WAITING = 4  # jobs handed out beyond those that run: few, so that an interrupt ends soon


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel for an architecture."""

    arch: str
    kernel: Kernel


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a job. `error` is "" if it compiled; `spills` are bytes of registers in memory."""

    job: Job
    compiled: bool = False
    spills: int = 0
    error: str = ""


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
    except BrokenProcessPool:
        return list(open_jobs.values())
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return []


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
    return Outcome(job, compiled, resources.spill_stores + resources.spill_loads)
