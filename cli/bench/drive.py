"""Runs one round of requests against a target and writes down when everything happened.

The event loop's clock is the only clock. In an open loop a request's times count from when it was due, not from when it
could be sent: else a slow server would slow its own load down and look fast. A request that failed or ran out of time
is kept with its outcome; nothing here averages.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence

import msgspec

from .load_shape import Load
from .targets import Counts, Piece, RequestFailed, Target, sending
from .workload import Item

LAG_PERIOD_S = 0.05
QUIET_S = 10.0  # without a piece of an answer or a new request, after which it is told that requests wait

OK, FAILED, TIMED_OUT = "ok", "failed", "timed out"


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Seconds count from the start of its round.

    due_s           when it was due: its times count from here
    arrivals_s      when each piece of the answer came
    streamed_tokens tokens in those pieces, None where the target does not say (then each has at least one)
    end_s           when the answer was complete, or given up
    """

    index: int
    outcome: str
    due_s: float
    sent_s: float
    end_s: float
    arrivals_s: tuple[float, ...]
    asked_tokens: int
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    streamed_tokens: int | None
    error: str = ""


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One pass over a workload: what was seen, how late the event loop ran at worst, and whether it was cut short."""

    backend: str
    number: int
    observations: tuple[Observation, ...]
    unfinished: int
    lags_s: tuple[float, ...]
    interrupted: bool = False
    peak_pss_bytes: int | None = None


async def drive(
    target: Target,
    items: Sequence[Item],
    arrivals: Sequence[float],
    load: Load,
    timeout_s: float,
    number: int = 0,
    on_tokens: Callable[[int], None] | None = None,
    on_quiet: Callable[[int, float], None] | None = None,
) -> Round:
    """Send every item when it is due and wait for all answers. Ctrl-C (a cancellation) gives the round as far as it is.

    An error that is no request's own (a dead engine, a prompt that does not fit) is raised. `on_tokens` is called with
    how many more of the tokens that are asked for have come, or will not come any more. While nothing comes
    `on_quiet` is called now and then with how many requests are open, and for how many seconds nothing has come.
    """
    loop = asyncio.get_running_loop()
    observations: list[Observation] = []
    waiting = _Waiting()
    room = asyncio.Semaphore(load.max_concurrency or len(items) or 1)
    start = loop.time()

    async def one(index: int) -> None:
        left = items[index].max_tokens

        def heard(tokens: int) -> None:
            nonlocal left
            waiting.heard()
            done = min(left, tokens)
            left -= done
            if done and on_tokens is not None:
                on_tokens(done)

        await _sleep_until(start + arrivals[index])
        async with room:
            due_s = arrivals[index] if load.open_loop else loop.time() - start
            with waiting.one_more():
                observation = await _observe(target, items[index], index, start, due_s, timeout_s, heard)
        observations.append(observation)
        heard(left)

    lags: list[float] = []
    watches = [asyncio.ensure_future(_watch_lag(lags))]
    if on_quiet is not None:
        watches.append(asyncio.ensure_future(waiting.tell(on_quiet)))
    tasks = [asyncio.ensure_future(one(index)) for index in range(len(items))]
    interrupted = await cut_short(tasks, watches)
    return Round(
        backend=target.backend,
        number=number,
        observations=tuple(sorted(observations, key=lambda seen: seen.index)),
        unfinished=len(items) - len(observations),
        lags_s=tuple(lags),
        interrupted=interrupted,
    )


async def cut_short(tasks: Sequence[asyncio.Future[None]], watches: Sequence[asyncio.Future[None]]) -> bool:
    """Wait until all tasks have ended; True if Ctrl-C (a cancellation, which is taken back) came before.

    Nothing of them, nor of the watches, runs on afterwards. The first error of a task is raised.
    """
    try:
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is not None:
            current.uncancel()
        return True
    finally:
        for task in (*watches, *tasks):
            task.cancel()
        await asyncio.gather(*watches, *tasks, return_exceptions=True)
    return False


class _Waiting:
    """How many requests are open, and when anything was last sent or came."""

    def __init__(self) -> None:
        self._open, self._heard = 0, 0.0

    def heard(self) -> None:
        self._heard = asyncio.get_running_loop().time()

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        """A request is open as long as the block."""
        self._open += 1
        self.heard()
        try:
            yield
        finally:
            self._open -= 1

    async def tell(self, on_quiet: Callable[[int, float], None]) -> None:
        """Call `on_quiet` after QUIET_S of silence, and again whenever it has become twice as long."""
        loop, since, patience = asyncio.get_running_loop(), 0.0, QUIET_S
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                await asyncio.sleep(QUIET_S / 10)
                if self._heard != since:
                    since, patience = self._heard, QUIET_S
                quiet = loop.time() - since
                if self._open and quiet >= patience:
                    on_quiet(self._open, quiet)
                    patience *= 2


async def _observe(
    target: Target,
    item: Item,
    index: int,
    start: float,
    due_s: float,
    timeout_s: float,
    heard: Callable[[int], None],
) -> Observation:
    loop = asyncio.get_running_loop()
    arrivals: list[float] = []
    tokens: list[int | None] = []
    counts = Counts(None, None, None)
    sent_s = loop.time() - start
    outcome, error = OK, ""

    def take(piece: Piece) -> None:
        nonlocal counts
        if piece.tokens != 0:
            arrivals.append(loop.time() - start)
            tokens.append(piece.tokens)
        counts = piece.counts or counts

    try:
        async with asyncio.timeout(timeout_s), sending(target, item) as pieces:
            async for piece in pieces:
                take(piece)
                heard(1 if piece.tokens is None else piece.tokens)
    except TimeoutError:
        outcome, error = TIMED_OUT, f"no complete answer within {timeout_s:g} s"
    except RequestFailed as failure:
        outcome, error = FAILED, str(failure)
    if outcome == OK and not arrivals:
        outcome, error = FAILED, "the answer has no tokens"
    return Observation(
        index=index,
        outcome=outcome,
        due_s=due_s,
        sent_s=sent_s,
        end_s=loop.time() - start,
        arrivals_s=tuple(arrivals),
        asked_tokens=item.max_tokens,
        prompt_tokens=counts.prompt_tokens,
        output_tokens=counts.output_tokens,
        cached_tokens=counts.cached_tokens,
        streamed_tokens=None if None in tokens else sum(tokens),  # type: ignore[arg-type]
        error=error,
    )


async def _sleep_until(when: float) -> None:
    delay = when - asyncio.get_running_loop().time()
    if delay > 0:
        await asyncio.sleep(delay)


async def _watch_lag(lags: list[float]) -> None:
    """How much later than asked this loop wakes up: figures cannot be finer than that."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            due = loop.time() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            lags.append(max(0.0, loop.time() - due))
