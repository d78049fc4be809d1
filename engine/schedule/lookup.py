"""Prompt lookup as a Proposer: each sequence's own n-grams say what may follow."""

from __future__ import annotations

from collections.abc import Sequence as Items

from ..config import SpeculativeConfig
from .ngram import NgramIndex
from .proposer import Wanted
from .sequence import Sequence


class PromptLookup:
    """The n-grams of every sequence that was asked about and has not ended."""

    cost = 0.0  # some microseconds
    seconds = 0.0  # they count as scheduling

    def __init__(self, options: SpeculativeConfig) -> None:
        self._longest, self._shortest = options.prompt_lookup_max, options.prompt_lookup_min
        self._indices: dict[int, NgramIndex] = {}

    def foresees(self, seq: Sequence) -> bool:
        """Whether the end of the sequence's known tokens stands somewhere else in them."""
        index = self._indices.get(seq.order)
        if index is None:
            index = self._indices[seq.order] = NgramIndex(self._longest, self._shortest)
        index.extend(seq.tokens)
        return index.matches

    def propose(self, wanted: Items[Wanted]) -> list[tuple[int, ...]]:
        """What followed then; `foresees` was asked for each of the sequences as it is now."""
        return [self._indices[seq.order].propose(seq.tokens, count) for seq, count in wanted]

    def forget(self, seq: Sequence) -> None:
        """Drop the sequence's n-grams."""
        self._indices.pop(seq.order, None)
