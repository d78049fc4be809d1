"""`Proposer`: whoever guesses the next tokens of sequences. The sampler checks every guess, so none can do harm."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

from .sequence import Sequence

Wanted = tuple[Sequence, int]  # a sequence all of whose tokens are known, and how many more are to be guessed


class Proposer(Protocol):
    """Guesses tokens.

    cost     what one guess takes, as a share of the time of a step of one row
    seconds  what guessing has taken since the start, if that is no part of scheduling
    """

    @property
    def cost(self) -> float: ...

    @property
    def seconds(self) -> float: ...

    def foresees(self, seq: Sequence) -> bool:
        """Whether `propose` is worth asking for this sequence now. Asked often, so it is cheap."""
        ...

    def propose(self, wanted: Items[Wanted]) -> list[tuple[int, ...]]:
        """For each sequence at most as many tokens as are wanted, perhaps none.

        The sequence's blocks hold the positions of its tokens and of those wanted.
        """
        ...

    def forget(self, seq: Sequence) -> None:
        """The sequence has ended."""
        ...
