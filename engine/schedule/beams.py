"""The sequences of beam searches: which of them hold a beam, and from whose blocks the next ones begin.

A search has as many sequences as beams. Each computes its last token like any other sequence, in any company, and when
all of them have, the search decides. A beam's first continuation stays in its sequence; each further one takes a
sequence that has lost its beam and begins with the blocks of the first: full ones shared, the last copied. So beams
share what they have in common, the prompt above all, and the prefix tree is not needed for it.

The sequences of one search are admitted, preempted and ended together, since none goes on without the others: it
enters with one of them, for which `width` places must be free, and the others join when that one is computed. Places
not taken yet are `reserved`, so that two searches cannot wait for each other.
"""

from __future__ import annotations

from typing import NamedTuple

from .beam_search import BeamSearch, Hypothesis
from .sequence import Phase, Sequence
from .step import ChunkResult

Top = tuple[tuple[int, ...], tuple[float, ...]]


class Joining(NamedTuple):
    """A sequence that is to begin with the first `tokens` computed tokens of `source`."""

    seq: Sequence
    source: Sequence
    tokens: int


class Decision(NamedTuple):
    """What follows from a beam's result: `lost` have no beam any more, `over` says that the search has ended."""

    lost: tuple[Sequence, ...] = ()
    over: bool = False


_NOTHING_YET = Decision()


class Group:
    """The sequences of one search. `holders[i]` computes the search's beam i; `idle` ones have no beam."""

    def __init__(self, members: tuple[Sequence, ...]) -> None:
        leader = members[0]
        self.members = members
        self.search = BeamSearch(leader.request, leader.max_new)
        self.holders = [leader]
        self.joining: list[Joining] = []
        self._idle = list(members[:0:-1])
        self._noted: dict[int, Top] = {}  # by order
        self._sampled: dict[int, int] = {}

    @property
    def head(self) -> Sequence:
        """The sequence that enters first."""
        return self.holders[0]

    @property
    def reserved(self) -> int:
        """Places that the running search may still take."""
        running = sum(seq.phase is Phase.RUNNING for seq in self.members)
        return self.search.width - running if running else 0

    def note(self, seq: Sequence, chunk: ChunkResult) -> Decision:
        """Take the logprobs that follow a beam, and decide when those of all are there."""
        self._noted[seq.order] = chunk.top_ids[-1], chunk.top_logprobs[-1]
        self._sampled[seq.order] = chunk.tokens[-1]
        if seq is self.head and not self.joining:  # after a preemption it comes back first
            back = [each for each in self.holders if each.phase is not Phase.RUNNING]
            self.joining = [Joining(each, seq, _common(seq, each)) for each in back]
        if len(self._noted) < len(self.holders):
            return _NOTHING_YET
        return self._advance()

    def restart(self) -> None:
        """All of them were preempted: what they last computed has to be computed again."""
        self._noted.clear()
        self._sampled.clear()
        self.joining.clear()

    def best(self) -> tuple[Hypothesis, ...]:
        """The hypotheses that were asked for, once the search is over."""
        return self.search.best(self.head.request.sampling.n)

    def _advance(self) -> Decision:
        before = self.holders
        going = self.search.advance([self._noted[seq.order] for seq in before])
        if not going:
            return Decision(over=True)
        used = {continuation.parent for continuation in going}
        lost = tuple(seq for place, seq in enumerate(before) if place not in used)
        self._idle.extend(lost)
        self.holders = []
        taken: set[int] = set()
        for (parent, token), beam in zip(going, self.search.beams):
            source = before[parent]
            if parent not in taken:
                taken.add(parent)
                self.holders.append(source)
                source.tokens.append(token)
                if token != self._sampled[source.order]:
                    source.announced = -1  # the runner has another token there: it must be told all again
                continue
            seq = self._idle.pop()
            self.holders.append(seq)
            seq.tokens = [*seq.request.prompt, *beam.tokens]
            self.joining.append(Joining(seq, source, source.computed))
        self._noted.clear()
        self._sampled.clear()
        return Decision(lost)


class Beams:
    """The groups of all searches that have not ended, by the unit of their sequences."""

    def __init__(self) -> None:
        self._groups: dict[int, Group] = {}

    def open(self, members: tuple[Sequence, ...]) -> None:
        """Begin a search with these sequences, its leader first."""
        self._groups[members[0].unit] = Group(members)

    def of(self, seq: Sequence) -> Group:
        """The group that a beam belongs to."""
        return self._groups[seq.unit]

    def close(self, seq: Sequence) -> None:
        """The search that the sequence belongs to has ended; any other sequence's end changes nothing."""
        self._groups.pop(seq.unit, None)

    def joining(self) -> list[Joining]:
        """Beams about to run beside others of their search."""
        return [each for group in self._groups.values() for each in group.joining]

    @property
    def reserved(self) -> int:
        """Places that running searches may still take."""
        return sum(group.reserved for group in self._groups.values())


def places(seq: Sequence) -> int:
    """Places that must be free for the sequence to be admitted."""
    return max(1, seq.request.sampling.beam_width)


def _common(one: Sequence, other: Sequence) -> int:
    """How many leading tokens two beams of a search share, of those that `one` has computed."""
    for place, (left, right) in enumerate(zip(one.tokens[: one.computed], other.tokens)):
        if left != right:
            return place
    return one.computed
