"""An engine that checks its own prefix cache: a share of the hits is computed again, without the cache, and compared.

For a hit that is looked at, two requests with its prompt are added behind all others: one that uses the cache, and one
that must compute every position, since it asks for prompt logprobs. Both give one token and the logprobs of the 20
likeliest. By the promise of the same bits they are equal; if they are not, a block in the cache is not what it was, and
the log and the counters say so. The second request leaves nothing in the cache: what it computes is there already.
"""

from __future__ import annotations

import dataclasses
import logging

from .engine import Core
from .request import MAX_LOGPROBS, FinishReason, Output, Request, SamplingParams
from .schedule.states import SequenceState
from .schedule.stats import SchedulerStats

log = logging.getLogger(__name__)

LAST = 1 << 31  # a priority behind any that a client may name
_WAYS = ("cached", "computed")


class AuditedEngine:
    """An engine's face, of which every 1/share-th request with a prefix hit is audited. Audits have no outputs."""

    def __init__(self, engine: Core, share: float) -> None:
        self._engine, self._share = engine, share
        self._due = 0.0
        self._requests: dict[str, Request] = {}  # that have no output yet
        self._audits: dict[str, tuple[str, str]] = {}  # by the id of each of its requests: (its name, the way)
        self._found: dict[str, dict[str, Output]] = {}
        self._serial = self._done = self._failed = 0

    @property
    def has_work(self) -> bool:
        """See Engine."""
        return self._engine.has_work

    def add(self, request: Request) -> None:
        """See Engine."""
        self._engine.add(request)
        self._requests[request.id] = request

    def abort(self, request_id: str, index: int | None = None) -> tuple[Output, ...]:
        """See Engine."""
        outputs = self._engine.abort(request_id, index)
        for output in outputs:
            self._requests.pop(output.request_id, None)
        return outputs

    def step(self) -> tuple[Output, ...]:
        """See Engine."""
        shown = []
        for output in self._engine.step():
            if output.request_id in self._audits:
                self._take(output)
                continue
            shown.append(output)
            request = self._requests.pop(output.request_id, None)
            if request is not None and output.cached_tokens and output.finish is not FinishReason.ERROR:
                self._due += self._share
                if self._due >= 1:
                    self._due -= 1
                    self._audit(request)
        return tuple(shown)

    def stats(self) -> SchedulerStats:
        """See Engine; audits are among its requests."""
        return dataclasses.replace(self._engine.stats(), audits=self._done, audit_failures=self._failed)

    def states(self) -> tuple[SequenceState, ...]:
        """See Engine; audits are among its requests."""
        return self._engine.states()

    def close(self) -> None:
        """See Engine."""
        self._engine.close()

    def _audit(self, request: Request) -> None:
        self._serial += 1
        name = f"cache audit {self._serial} of {request.id}"
        self._found[name] = {}
        for way, of_prompt in zip(_WAYS, (None, 0), strict=True):
            sampling = SamplingParams(
                temperature=0.0, max_tokens=1, logprobs=MAX_LOGPROBS, prompt_logprobs=of_prompt, ignore_eos=True
            )
            request_id = f"{name}, {way}"
            self._audits[request_id] = name, way
            self._engine.add(
                Request(
                    id=request_id, prompt=request.prompt, sampling=sampling, seed=0, stop_ids=(), max_tokens=1,
                    tenant=request.tenant, priority=LAST, salt=request.salt,
                )
            )  # fmt: skip

    def _take(self, output: Output) -> None:
        name, way = self._audits.pop(output.request_id)
        found = self._found[name]
        found[way] = output
        if len(found) < len(_WAYS):
            return
        del self._found[name]
        cached, computed = (found[each] for each in _WAYS)
        if not cached.cached_tokens:  # evicted meanwhile: there is nothing to compare
            return
        self._done += 1
        if (cached.tokens, cached.logprobs, cached.finish) != (computed.tokens, computed.logprobs, computed.finish):
            self._failed += 1
            log.error("%s: its %d cached tokens give other bits than computing them", name, cached.cached_tokens)
