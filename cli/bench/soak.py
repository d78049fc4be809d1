"""A soak: a mixed load for a time or a number of requests, and whether anything is left behind when it is over.

Left behind is what nobody gives back: a request that is still open, a KV block that is neither free nor the prefix
cache's, memory that keeps growing. Memory is judged after a warm-up, by the median of its last third against that of
its first: allocators and caches make it waver, and only what grows and stays is a leak.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from ...engine.load.progress import Progress
from .drive import cut_short
from .memory import tree_pss
from .mixture import Mixture, Task
from .targets import RequestFailed, Target, sending

LEAST_SAMPLES = 9  # after the warm-up, to judge memory by
SETTLE_S = 30.0  # that the last sequences may take to end once nobody waits for them
_POLL_S = 0.1
_MOST_ERRORS = 5  # kinds of errors that are shown


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine says of itself; None where it does not."""

    open: int | None = None
    blocks_total: int | None = None
    blocks_free: int | None = None
    blocks_cached: int | None = None

    @property
    def lost_blocks(self) -> int | None:
        """Blocks that are neither free nor cached; of an idle engine these are lost."""
        if self.blocks_total is None or self.blocks_free is None or self.blocks_cached is None:
            return None
        return self.blocks_total - self.blocks_free - self.blocks_cached


class Sample(msgspec.Struct, frozen=True):
    """One look: seconds from the start, PSS of the engine's processes, KV blocks that held nothing."""

    at_s: float
    pss_bytes: int | None
    blocks_free: int | None


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """PSS after the warm-up. `growth` and `spread` are shares of the mean; `leak` is None where it is not judged."""

    samples: int
    min_bytes: int
    max_bytes: int
    mean_bytes: int
    growth: float
    spread: float
    leak: bool | None
    note: str = ""


class SoakReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was done and what was left behind. `leaks` and `failed` are what makes a soak fail."""

    backend: str
    seconds: float
    requests: int
    answered: int
    left: int
    failed: int
    timed_out: int
    kinds: dict[str, int]
    output_pieces: int
    errors: dict[str, int]
    end: Figures
    memory: Memory | None
    leaks: tuple[str, ...]
    notes: tuple[str, ...]
    samples: tuple[Sample, ...]
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """How a soak goes: it ends after `max_seconds` or `max_requests`, whichever comes first; 0: no such end.

    warmup     share of the time after which memory is judged
    tolerance  share of the memory by which it may have grown
    """

    max_seconds: float
    max_requests: int
    max_concurrency: int
    timeout_s: float
    interval_s: float
    warmup: float
    tolerance: float


@dataclass(slots=True)
class _Counts:
    answered: int = 0
    left: int = 0
    failed: int = 0
    timed_out: int = 0
    pieces: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)

    @property
    def done(self) -> int:
        return self.answered + self.left + self.failed + self.timed_out


class Soak:
    """Runs one soak. `greedy` and `sampled` are the same engine, `figures` asks it how it is."""

    def __init__(
        self,
        greedy: Target,
        sampled: Target,
        mixture: Mixture,
        limits: Limits,
        figures: Callable[[], Awaitable[Figures]],
        progress: Progress,
    ) -> None:
        self._targets = {False: greedy, True: sampled}
        self._mixture, self._limits, self._figures, self._progress = mixture, limits, figures, progress
        self._counts, self._samples = _Counts(), list[Sample]()
        self._asked, self._start = 0, 0.0

    async def run(self) -> SoakReport:
        """Ask until it is over, wait for the last sequences to end, and look. Ctrl-C ends it early."""
        loop = asyncio.get_running_loop()
        self._start = loop.time()
        watch = asyncio.ensure_future(self._watch())
        users = [asyncio.ensure_future(self._user()) for _ in range(self._limits.max_concurrency)]
        interrupted = await cut_short(users, [watch])
        seconds = loop.time() - self._start
        end = await self._idle()
        await self._look()
        return self._report(seconds, end, interrupted)

    async def _user(self) -> None:
        while not self._over():
            self._asked += 1
            await self._ask(self._mixture.next())

    def _over(self) -> bool:
        limits = self._limits
        elapsed = asyncio.get_running_loop().time() - self._start
        shares = (
            elapsed / limits.max_seconds if limits.max_seconds else 0.0,
            self._asked / limits.max_requests if limits.max_requests else 0.0,
        )
        self._progress("soak", min(1000, int(1000 * max(shares))), 1000)
        return max(shares) >= 1

    async def _ask(self, task: Task) -> None:
        counts = self._counts
        counts.kinds[task.kind] += 1
        seen = 0
        try:
            async with (
                asyncio.timeout(self._limits.timeout_s),
                sending(self._targets[task.sampled], task.item) as pieces,
            ):
                if task.leaves_after == 0:
                    with suppress(TimeoutError):  # gone before anything came, perhaps
                        async with asyncio.timeout(_POLL_S):
                            await anext(pieces, None)
                else:
                    async for piece in pieces:
                        seen += piece.tokens != 0
                        if task.leaves_after is not None and seen >= task.leaves_after:
                            break
        except TimeoutError:
            counts.timed_out += 1
            counts.errors[f"no complete answer within {self._limits.timeout_s:g} s"] += 1
        except RequestFailed as failure:
            counts.failed += 1
            counts.errors[str(failure)] += 1
            await asyncio.sleep(_POLL_S)  # whoever refuses, or is gone, is not asked again at once
        else:
            if task.leaves_after is None:
                counts.answered += 1
            else:
                counts.left += 1
        counts.pieces += seen

    async def _watch(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(self._limits.interval_s)

    async def _look(self) -> None:
        at_s = asyncio.get_running_loop().time() - self._start
        pss = await asyncio.to_thread(tree_pss, self._targets[False].pids)
        self._samples.append(Sample(round(at_s, 3), pss, (await self._figures()).blocks_free))

    async def _idle(self) -> Figures:
        """The engine's figures once nothing is open, or after SETTLE_S."""
        deadline = asyncio.get_running_loop().time() + SETTLE_S
        while True:
            figures = await self._figures()
            if not figures.open or asyncio.get_running_loop().time() >= deadline:
                return figures
            await asyncio.sleep(_POLL_S)

    def _report(self, seconds: float, end: Figures, interrupted: bool) -> SoakReport:
        counts, limits = self._counts, self._limits
        memory = judge(self._samples, limits.warmup * seconds, limits.tolerance, end.blocks_total or 0)
        return SoakReport(
            backend=self._targets[False].backend,
            seconds=round(seconds, 3),
            requests=counts.done,
            answered=counts.answered,
            left=counts.left,
            failed=counts.failed,
            timed_out=counts.timed_out,
            kinds=dict(counts.kinds),
            output_pieces=counts.pieces,
            errors=dict(counts.errors.most_common(_MOST_ERRORS)),
            end=end,
            memory=memory,
            leaks=leaks(end, memory),
            notes=_notes(end, memory),
            samples=tuple(self._samples),
            interrupted=interrupted,
        )


def judge(samples: Sequence[Sample], warmup_s: float, tolerance: float, blocks: int) -> Memory | None:
    """What memory did after `warmup_s`; None if nobody could see it.

    Not judged where there are too few samples, and while the KV pool fills: its pages are taken as they are first used.
    """
    after = [sample for sample in samples if sample.at_s >= warmup_s]
    seen = [sample.pss_bytes for sample in after if sample.pss_bytes is not None]
    if not seen:
        return None
    third = max(1, len(seen) // 3)
    mean = statistics.fmean(seen)
    growth = (statistics.median(seen[-third:]) - statistics.median(seen[:third])) / mean
    free = [sample.blocks_free for sample in after if sample.blocks_free is not None]
    leak, note = growth > tolerance, ""
    if len(seen) < LEAST_SAMPLES:
        note = f"{len(seen)} looks at memory after the warm-up are too few to judge it by: let it run longer"
    elif leak and free and free[0] - min(free) > blocks // 50:
        note = "memory grew while the KV pool filled: let it run longer, or give a smaller pool"
    return Memory(
        samples=len(seen),
        min_bytes=min(seen),
        max_bytes=max(seen),
        mean_bytes=round(mean),
        growth=growth,
        spread=(max(seen) - min(seen)) / mean,
        leak=None if note else leak,
        note=note,
    )


def leaks(end: Figures, memory: Memory | None) -> tuple[str, ...]:
    """What an idle engine holds that it should not."""
    found = []
    if end.open:
        found.append(f"{end.open} requests are still open, {SETTLE_S:g} s after the last client left")
    if not end.open and end.lost_blocks:
        found.append(f"{end.lost_blocks} of {end.blocks_total} KV blocks are neither free nor cached")
    if memory is not None and memory.leak:
        found.append(f"memory grew by {100 * memory.growth:.1f} % after the warm-up")
    return tuple(found)


def _notes(end: Figures, memory: Memory | None) -> tuple[str, ...]:
    """What could not be looked at."""
    return tuple(
        note
        for note in (
            "" if end.open is not None else "the server does not say how many requests are open",
            "" if end.lost_blocks is not None else "the server does not say what its KV blocks hold",
            "memory was not watched: name the server's process with --server-pid" if memory is None else memory.note,
        )
        if note
    )
