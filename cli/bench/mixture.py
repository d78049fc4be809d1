"""What a soak asks: an endless mixture of what users do, the same for a seed.

New prompts, long ones, prompts that go on from an earlier one (the prefix cache's case), and clients that leave before
their answer is complete, some before it begins. Greedy and sampled answers take turns.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from .workload import Item, Prompt

LONG = 4  # times the length of an ordinary prompt
KEPT = 64  # earlier prompts that later ones may go on from
_KINDS = {"new": 45, "long": 10, "again": 30, "left": 15}  # of 100


@dataclass(frozen=True, slots=True)
class Task:
    """One request of a mixture.

    kind         "new", "long", "again" or "left"
    sampled      whether the answer is sampled, not greedy
    leaves_after pieces of the answer after which the client leaves; None: it stays
    """

    kind: str
    item: Item
    sampled: bool
    leaves_after: int | None


class Mixture:
    """Tasks without end, of about these lengths; no prompt is longer than `most`.

    `units` are what prompts are made of: token ids, or words where nobody here knows the model's tokens.
    """

    def __init__(
        self, seed: int, units: Sequence[int | str], prompt_length: int, output_tokens: int, most: int
    ) -> None:
        self._rng = random.Random(f"soak {seed}")
        self._units, self._prompt, self._output, self._most = units, prompt_length, output_tokens, most
        self._earlier: deque[list[int | str]] = deque(maxlen=KEPT)

    def next(self) -> Task:
        """The next task."""
        rng = self._rng
        kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
        around = self._prompt * (LONG if kind == "long" else 1)
        length = min(self._most, rng.randint(max(1, around // 2), around * 3 // 2))
        begun: list[int | str] = []
        if kind == "again" and self._earlier:
            begun = rng.choice(self._earlier)
            length = min(self._most, len(begun) + max(1, length // 4))
        parts = begun[:length]
        while len(parts) < length:
            parts.append(rng.choice(self._units))
        self._earlier.append(parts)
        answer = rng.randint(max(1, self._output // 2), self._output)
        leaves = rng.randint(0, max(0, answer - 1)) if kind == "left" else None
        return Task(kind, Item(_prompt(parts), answer), rng.random() < 0.5, leaves)


def _prompt(parts: Sequence[int | str]) -> Prompt:
    ids = tuple(part for part in parts if isinstance(part, int))
    return ids or " ".join(str(part) for part in parts)
