"""How one step is filled: the positions that each running sequence gets, and who enters with what is left."""

from __future__ import annotations

from .admission import rank, victims
from .beams import Joining, places
from .draft import Draft
from .memory import KVMemory, Start
from .roster import Roster
from .sequence import Phase, Sequence
from .speculate import Speculator
from .stats import Counts


class Filler:
    """Puts rows into a Draft: decodes, then prompts under way, then new ones, drafts at last."""

    def __init__(self, roster: Roster, memory: KVMemory, speculator: Speculator, counts: Counts) -> None:
        self._roster = roster
        self._memory = memory
        self._speculator = speculator
        self._counts = counts

    def fill(self, draft: Draft) -> None:
        """All that the step's budget and memory allow; rows are none if nothing can run now."""
        roster = self._roster
        for victim in victims(roster.running.values(), self._memory, [each.seq for each in roster.beams.joining()]):
            roster.preempt(victim)
        for joining in roster.beams.joining():
            self._join(draft, joining)
        prefills: list[Sequence] = []
        for seq in roster.running.values():
            todo = seq.todo
            if seq.announced < 0:
                self._restate(draft, seq)
            if todo == 1:
                if not self._speculator.waits(seq, len(roster.running)):
                    self._extend(draft, seq)
            elif todo > 1:
                prefills.append(seq)
        prefills.sort(key=rank)
        missing = roster.admission.missing
        if roster.may_admit:
            draft.promised = sum(map(missing, roster.running.values()))
        if prefills and self._roster.queue.overtakes:
            allowed = draft.left // 2
            while (used := self._admit(draft, allowed, whole=True)) > 0:
                allowed -= used
        for seq in prefills:
            draft.promised -= missing(seq)
            self._extend(draft, seq)
            draft.promised += missing(seq)
        while self._admit(draft, draft.left, whole=False) > 0:
            pass
        self._counts.scheduled_tokens += self._speculator.extend(draft, roster.running.values())
        self._memory.drop_held()

    def charge(self, seq: Sequence) -> int:
        """Count the positions that were scheduled for the first time as served to the tenant; how many there were."""
        new = max(seq.scheduled - seq.charged, 0)
        self._roster.queue.served(seq.request.tenant, new)
        seq.charged += new
        return new

    def _join(self, draft: Draft, joining: Joining) -> None:
        """Let a beam run beside others of its search, if a block can be had for it."""
        if draft.left <= 0 or self._memory.available == 0:
            return
        seq = joining.seq
        self._roster.beams.of(seq).joining.remove(joining)
        self._roster.enter(draft, seq, self._memory.fork(seq, joining.source, joining.tokens))

    def _restate(self, draft: Draft, seq: Sequence) -> None:
        """Tell the runner of a running beam again: it goes on with another token than the likeliest."""
        self._roster.slots.restate(seq)
        draft.admit(seq, Start(()), None)
        seq.announced = 0

    def _extend(self, draft: Draft, seq: Sequence) -> int:
        """Schedule as much of a running sequence as tokens and blocks allow; how many tokens that is."""
        start = seq.scheduled
        end = start + min(seq.todo, draft.left)
        if seq.known_in(start, end) > draft.logits_left:
            end = max(start, seq.probed) + draft.logits_left
        if _samples(seq, end) and seq.known_in(start, end) == draft.logits_left:
            end -= 1
        end = min(self._memory.grow(seq, end), end)
        if end <= start:
            return 0
        count = end - start
        samples, known = _samples(seq, end), seq.known_in(start, end)
        draft.row(seq, count, samples, known)
        seq.probed += known
        self._counts.scheduled_tokens += count
        seq.scheduled = end
        self._counts.recomputed_tokens += count - self.charge(seq)
        seq.in_flight += 1
        seq.pending += samples
        return count

    def _admit(self, draft: Draft, allowed: int, whole: bool) -> int:
        """Admit the head of the queue and schedule up to `allowed` of its tokens; 0 if it cannot enter now.

        `whole`: only if all of its known tokens can be computed in this step.
        """
        roster = self._roster
        if allowed <= 0 or draft.logits_left == 0 or not roster.may_admit:
            return 0
        head = roster.waiting.head()
        if head is None or (whole and head[1].prompt > allowed):
            return 0
        seq = head[0]
        if places(seq) > roster.room:
            return 0
        start = roster.admission.affordable(seq, draft.promised, not roster.running)
        if start is None:
            return 0
        skipped = self._memory.tokens_of(start)
        if whole and len(seq.tokens) - skipped > allowed:
            return 0
        roster.waiting.pop()
        if seq.phase is Phase.WAITING and seq is seq.leader:
            self._memory.tree.tick()
            seq.cached_tokens = skipped
            self._counts.query_tokens += seq.prompt_len
            self._counts.hit_tokens += skipped
        roster.enter(draft, seq, start)
        used = self._extend(draft, seq)
        assert used > 0, f"sequence {seq.index} of `{seq.request.id}` was admitted without room for a token"
        draft.promised += roster.admission.missing(seq)
        return used


def _samples(seq: Sequence, end: int) -> bool:
    """Whether computing up to `end` gives a token that may be accepted."""
    return end == len(seq.tokens) + seq.pending and seq.wants_token
