"""Prompt lookup: where a sequence repeats its own tokens, what followed them then is likely to follow now.

The longest n-gram at the end of the sequence that also stands earlier in it is found, for n from `longest` down to
`shortest`, and of its places the most recent. Each n-gram is kept with the place after it in a hash table, so a new
token costs a fixed number of look-ups and nothing is scanned again. A place once found is followed for as long as it
foretells the tokens that come, which makes the match longer than `longest`: a copy stays with its source although parts
of it have stood elsewhere since.

The idea is Saxena's (Prompt Lookup Decoding, 2023). What is proposed here is only ever a guess that the sampler checks.
"""

from __future__ import annotations

from collections.abc import Sequence

_BITS = 32  # of a token id in a key


class NgramIndex:
    """The n-grams of one growing sequence of tokens. `longest` and `shortest` bound n."""

    __slots__ = ("_grams", "_key", "_mask", "_matched", "_seen", "_source", "longest", "shortest")

    def __init__(self, longest: int, shortest: int) -> None:
        assert 1 <= shortest <= longest, (shortest, longest)
        self.longest = longest
        self.shortest = shortest
        # for n from the longest down: the bits that n tokens take in a key, and the place after each n-gram
        self._grams: tuple[tuple[int, int, dict[int, int]], ...] = tuple(
            (n, (1 << _BITS * n) - 1, {}) for n in range(longest, shortest - 1, -1)
        )
        self._mask = (1 << _BITS * longest) - 1
        self._key = 0  # the last `longest` tokens
        self._seen = 0
        self._source = -1  # the place after the match, -1 without one
        self._matched = 0  # tokens of the match

    def extend(self, tokens: Sequence[int]) -> None:
        """Take in what `tokens` has more than at the last call; what it had then must not have changed."""
        mask, tables = self._mask, self._grams
        key, source, matched = self._key, self._source, self._matched
        for place in range(self._seen, len(tokens)):
            token = tokens[place]
            key = (key << _BITS | token) & mask
            if source >= 0 and tokens[source] == token:
                source, matched = source + 1, matched + 1
            else:
                source, matched = -1, 0
            for n, part, grams in tables:
                if n > place + 1:
                    continue
                gram = key & part
                if n > matched:
                    found = grams.get(gram, -1)
                    if found >= 0:
                        source, matched = found, n
                grams[gram] = place + 1
        self._key, self._source, self._matched, self._seen = key, source, matched, len(tokens)

    @property
    def matches(self) -> bool:
        """Whether the end of the tokens stands somewhere else in them."""
        return self._source >= 0

    def propose(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """`count` tokens that may follow `tokens`, which `extend` has seen; none if their end stands nowhere else.

        Where the match reaches into its own continuation, what lies between is taken for a period.
        """
        if self._source < 0:
            return ()
        assert self._seen == len(tokens), (self._seen, len(tokens))
        period = len(tokens) - self._source
        return tuple(tokens[self._source + place % period] for place in range(count))
