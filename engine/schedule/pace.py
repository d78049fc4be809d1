"""How many prompt tokens a step may compute beside decodes, so that those who are read to are not kept waiting.

Every decode in a step waits for the chunks of prompts beside it. So while anybody decodes, chunks are cut to a time:
the target for the pause between two tokens or, where none is set, `SLOWDOWN` times what the decodes alone would take,
though never to less than `USUAL` tokens. Beside few decodes these take longer, but less would keep many prompts waiting
for the sake of a few pauses. Cutting prompts changes no bits.

What steps cost is learnt from the steps themselves: seconds = decodes + token * prompt tokens, both unknown and
drifting with the number of decodes and the length of contexts. A Kalman filter with two states follows them, whose
noise is a share of their size. A step that took much longer than expected (a machine that stood still) counts as twice
as long.
"""

from __future__ import annotations

from dataclasses import dataclass

SLOWDOWN = 3.0
USUAL = 64  # tokens, which beside few decodes may take longer than that
LEAST = 16  # tokens, whatever the target
GRAIN = 8  # chunks are multiples of it

_DRIFT = 0.1  # of a state, in one step
_NOISE = 0.15  # of a step's time


@dataclass(frozen=True, slots=True)
class PaceConfig:
    """`tokens`: so many beside decodes, and nothing is learnt; `target_s`: of a step's time, 0 for `SLOWDOWN` times."""

    tokens: int = 0
    target_s: float = 0.0


class Pace:
    """What steps cost, and what fits the target."""

    def __init__(self, config: PaceConfig) -> None:
        self._fixed = config.tokens
        self._target_s = config.target_s
        self._decodes_s = 0.0  # what a step's decodes take
        self._token_s = 0.0  # what one prompt token beside them takes
        self._variance = (0.0, 0.0, 0.0)  # of the first, of both, of the second

    def beside_decodes(self) -> int:
        """Prompt tokens that a step with decodes may hold."""
        if self._fixed:
            return self._fixed
        if not self._token_s:
            return USUAL
        target_s = self._target_s or SLOWDOWN * self._decodes_s
        fitting = int((target_s - self._decodes_s) / self._token_s)
        return max(LEAST if self._target_s else USUAL, fitting - fitting % GRAIN)

    def learn(self, decodes: int, tokens: int, seconds: float) -> None:
        """A step with so many decodes and prompt tokens took so long."""
        if self._fixed or seconds <= 0 or not (decodes or tokens):
            return
        if not self._token_s and tokens and (self._decodes_s or not decodes):
            self._token_s = max(seconds - self._decodes_s * bool(decodes), seconds / 10) / tokens
            self._variance = (self._variance[0], 0.0, self._token_s**2 / 4)
        elif not self._decodes_s and decodes and (self._token_s or not tokens):
            self._decodes_s = max(seconds - self._token_s * tokens, seconds / 10)
            self._variance = (self._decodes_s**2 / 4, 0.0, self._variance[2])
        elif self._decodes_s and (self._token_s or not tokens):
            self._follow(float(bool(decodes)), float(tokens), seconds)

    def _follow(self, decodes: float, tokens: float, seconds: float) -> None:
        """One step of the filter; `decodes` is 1 or 0."""
        first, both, second = self._variance
        first += (_DRIFT * self._decodes_s * decodes) ** 2  # what a step has none of drifts unseen
        second += (_DRIFT * self._token_s * bool(tokens)) ** 2
        expected = decodes * self._decodes_s + tokens * self._token_s
        error = min(seconds, 2 * expected) - expected
        to_first = first * decodes + both * tokens
        to_second = both * decodes + second * tokens
        spread = decodes * to_first + tokens * to_second + (_NOISE * expected) ** 2
        self._decodes_s = max(self._decodes_s + to_first / spread * error, self._decodes_s / 2)
        self._token_s = max(self._token_s + to_second / spread * error, self._token_s / 2)
        self._variance = (
            max(first - to_first * to_first / spread, 0.0),
            both - to_first * to_second / spread,
            max(second - to_second * to_second / spread, 0.0),
        )
