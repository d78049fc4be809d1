"""Beam search as a pure function of logprobs: which hypotheses go on, which are finished, and when it is enough.

The rules are those of transformers' `generate` with num_beams, so that scores and sequences can be held against it: of
all continuations of all beams, those among the best `width` that end a sequence are finished; the best `width` of those
that do not end go on; a finished score is the sum of logprobs / generated tokens ** length_penalty, the stop token
counted. Ties go to the better beam, then to the lower token id, and among finished ones to the earlier.

Sums are Python floats over float32 logprobs, added in the order of the tokens. A beam's logprobs have the same bits in
any company, and so has the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..request import FinishReason, Request, TokenLogprobs


class Hypothesis(NamedTuple):
    """Generated tokens with their logprobs. `total` is the sum of these, `score` what finished ones are ranked by."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0
    score: float = 0.0
    finish: FinishReason | None = None


class Continuation(NamedTuple):
    """A beam that goes on: the place of the one it continues, and the token that it adds."""

    parent: int
    token: int


class BeamSearch:
    """The state of one search: `beams`, best first, and those that are finished."""

    def __init__(self, request: Request, max_new: int) -> None:
        sampling = request.sampling
        self.width = sampling.beam_width
        self.beams: tuple[Hypothesis, ...] = (Hypothesis(),)
        self._finished: list[Hypothesis] = []
        self._stop_ids = frozenset(request.stop_ids)
        self._min_new, self._max_new = sampling.min_tokens, max_new
        self._penalty, self._early = sampling.length_penalty, sampling.early_stopping
        self._shown = sampling.logprobs or 0

    def advance(self, tops: Sequence[tuple[tuple[int, ...], tuple[float, ...]]]) -> tuple[Continuation, ...]:
        """The beams that go on after each beam's most likely next tokens (ids and logprobs, best first) are known.

        Each needs at least width + stop ids of them. Nothing goes on when the search is over.
        """
        length = len(self.beams[0].tokens) + 1
        banned = self._stop_ids if length <= self._min_new else frozenset()
        ranked = sorted(
            (-(beam.total + logprob), place, token, logprob)
            for place, (beam, top) in enumerate(zip(self.beams, tops, strict=True))
            for token, logprob in zip(*top, strict=True)
            if token not in banned
        )
        going: list[tuple[Hypothesis, Continuation]] = []
        for rank, (total, place, token, logprob) in enumerate(ranked):
            if rank >= self.width and (len(going) == self.width or length == self._max_new):
                break
            stops = token in self._stop_ids
            if stops or length == self._max_new:
                if rank < self.width:
                    finish = FinishReason.STOP if stops else FinishReason.LENGTH
                    grown = self._grown(place, token, logprob, -total, tops[place])
                    self._finished.append(grown._replace(score=-total / length**self._penalty, finish=finish))
            elif len(going) < self.width:
                going.append((self._grown(place, token, logprob, -total, tops[place]), Continuation(place, token)))
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[self.width :]
        if not going or self._enough(going[0][0].total, length):
            return ()
        self.beams = tuple(hypothesis for hypothesis, _ in going)
        return tuple(continuation for _, continuation in going)

    def best(self, count: int) -> tuple[Hypothesis, ...]:
        """The `count` best finished hypotheses, best first."""
        return tuple(self._finished[:count])

    def _grown(
        self, place: int, token: int, logprob: float, total: float, top: tuple[tuple[int, ...], tuple[float, ...]]
    ) -> Hypothesis:
        beam = self.beams[place]
        entry = TokenLogprobs(logprob, top[0][: self._shown], top[1][: self._shown])
        return Hypothesis((*beam.tokens, token), (*beam.logprobs, entry), total)

    def _enough(self, best_total: float, length: int) -> bool:
        """Whether the finished ones are all there, and the best beam will not get better than the worst of them."""
        if len(self._finished) < self.width:
            return False
        if self._early is True:
            return True
        longest = self._max_new if self._early == "never" and self._penalty > 0 else length
        best: float = best_total / longest**self._penalty
        return best <= self._finished[-1].score
