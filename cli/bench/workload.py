"""What is asked: the prompts of a run and how long their answers may be, and the salt that keeps caches out of it.

A workload depends on its seed and options alone, so two runs of one seed ask the same. The salt is apart from it: it
changes the first tokens of every prompt in every run, because a server that has seen a prompt before answers it many
times faster, and then the cache is measured and not the engine.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

Message = dict[str, str]
Prompt = tuple[int, ...] | str | tuple[Message, ...]

SALT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Item:
    """One request: a prompt as token ids, as text or as a conversation, and the longest answer to it."""

    prompt: Prompt
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests of a run in order.

    source     where their texts are from, for people
    stand_in   the texts are not those of the dataset that was asked for
    notes      what else a reader of the figures must know
    """

    dataset: str
    source: str
    stand_in: bool
    ignore_eos: bool
    items: tuple[Item, ...]
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """The same for two workloads that ask the same."""
        content = [self.ignore_eos, *([item.prompt, item.max_tokens] for item in self.items)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every token id in prompts that are given as ids, ascending."""
        return tuple(sorted({token for item in self.items for token in ids_of(item.prompt)}))


class Salter:
    """Makes every prompt begin like no other one of this run, nor of runs with another salt.

    In prompts of token ids the first SALT_TOKENS ids are replaced by ids out of `pool`, so lengths stay; texts get a
    short number in front. An empty salt changes nothing.
    """

    def __init__(self, salt: str, pool: Sequence[int]) -> None:
        self._salt, self._pool = salt, pool
        self._serial = 0
        self._first = random.Random(f"first {salt}").randrange(len(pool)) if pool else 0

    def apply(self, item: Item) -> Item:
        """The item with the next salt."""
        if not self._salt:
            return item
        self._serial += 1
        rng = random.Random(f"{self._salt} {self._serial}")
        return replace(item, prompt=self._salted(item.prompt, rng))

    def _salted(self, prompt: Prompt, rng: random.Random) -> Prompt:
        mark = f"[{rng.getrandbits(48):012x}] "
        if isinstance(prompt, str):
            return mark + prompt
        if ids := ids_of(prompt):
            first = self._pool[(self._first + self._serial) % len(self._pool)]  # differs from all others of the run
            head = (first, *(rng.choice(self._pool) for _ in range(SALT_TOKENS - 1)))[: len(ids)]
            return head + ids[len(head) :]
        opening, *rest = messages_of(prompt)
        return (opening | {"content": mark + opening["content"]}, *rest)


def form_of(prompt: Prompt) -> str:
    """ "ids", "text" or "chat"."""
    if isinstance(prompt, str):
        return "text"
    return "ids" if ids_of(prompt) else "chat"


def ids_of(prompt: Prompt) -> tuple[int, ...]:
    """The token ids that a prompt is made of, none for a text or a conversation."""
    return () if isinstance(prompt, str) else tuple(part for part in prompt if isinstance(part, int))


def messages_of(prompt: Prompt) -> tuple[Message, ...]:
    """The messages that a prompt is made of, none for a text or token ids."""
    return () if isinstance(prompt, str) else tuple(part for part in prompt if isinstance(part, dict))
