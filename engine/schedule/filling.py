"""How one step is filled: the positions that each running sequence gets, and who enters with what is left.

Most rows of most steps are decodes that have a block already, so they have a short way of their own (`_decodes`), which
does for them what `_extend` does for any row. What memory was promised to those running is summed up only when a bound
on it, which costs nothing, does not decide: who enters is the same.
"""

from __future__ import annotations

from .admission import rank, victims
from .beams import Joining, places
from .draft import Draft, Row
from .memory import KVMemory, Start
from .pace import Pace
from .roster import Roster
from .sequence import Phase, Sequence
from .speculate import Speculator
from .stats import Counts


class Filler:
    """Puts rows into a Draft: decodes, then prompts under way, then new ones, drafts at last."""

    def __init__(
        self, roster: Roster, memory: KVMemory, speculator: Speculator, counts: Counts, pace: Pace | None
    ) -> None:
        self._roster = roster
        self._memory = memory
        self._speculator = speculator
        self._counts = counts
        self._pace = pace

    def fill(self, draft: Draft) -> None:
        """All that the step's budget and memory allow; rows are none if nothing can run now."""
        roster, budget = self._roster, draft.left
        for victim in victims(roster.running.values(), self._memory, [each.seq for each in roster.beams.joining()]):
            roster.preempt(victim)
        for joining in roster.beams.joining():
            self._join(draft, joining)
        under_way = sorted(self._decodes(draft), key=rank)
        if self._pace is not None and len(under_way) < len(roster.running):
            draft.withhold(self._pace.beside_decodes())
        self._prompts(draft, under_way, budget // 2)
        draft.release()
        self._speculator.extend(draft, roster.running.values())
        self._memory.drop_held()
        self._counts.scheduled_tokens += budget - draft.left

    def _decodes(self, draft: Draft) -> list[Sequence]:
        """Give every decoding sequence its row; those with more than one position to compute are returned.

        This is where a scheduler's time goes when many decode.
        """
        prompts: list[Sequence] = []
        running, size = self._roster.running, self._memory.block_size
        may_wait = self._speculator.may_wait(len(running))
        tenant, fresh, again = "", 0, 0
        rows, left, made, sampling = draft.rows, draft.decodes_left, 0, 0
        for seq in running.values():
            start = seq.scheduled
            if start < seq.prompt_len or seq.is_beam:
                draft.decoded(made, sampling)
                if seq.announced < 0:
                    self._restate(draft, seq)
                if (todo := seq.todo) > 1:
                    prompts.append(seq)
                elif todo == 1 and not (may_wait and self._speculator.waits(seq, len(running))):
                    self._extend(draft, seq, draft.left)
                left, made, sampling = draft.decodes_left, 0, 0
                continue
            known = len(seq.tokens) + seq.pending
            todo = (known if known < seq.goal else seq.goal) - start
            if todo > 1:
                prompts.append(seq)
            if todo != 1 or (may_wait and self._speculator.waits(seq, len(running))):
                continue
            if start == len(seq.blocks) * size or made == left:
                draft.decoded(made, sampling)
                self._extend(draft, seq, draft.left)
                left, made, sampling = draft.decodes_left, 0, 0
                continue
            samples = start + 1 == known
            rows.append(Row(seq, start, 1, samples))
            made += 1
            sampling += samples
            seq.scheduled = start + 1
            seq.in_flight += 1
            seq.pending += samples
            if start < seq.charged:
                again += 1
                continue
            seq.charged = start + 1
            if (name := seq.request.tenant) != tenant:
                self._roster.queue.served(tenant, fresh)
                tenant, fresh = name, 0
            fresh += 1
        draft.decoded(made, sampling)
        self._roster.queue.served(tenant, fresh)
        self._counts.recomputed_tokens += again
        return prompts

    def _prompts(self, draft: Draft, under_way: list[Sequence], short: int) -> None:
        """Give prompts what the decodes left; those `under_way` come in order of rank.

        Where the policy lets short prompts pass a long one, half of it is for them, as long as all that pass have no
        more than `short` tokens together: so they are done soon, and few prompts hold memory half done.
        """
        prompts, rest = list(under_way), under_way
        if under_way and self._roster.queue.ranks:
            least = under_way[0].request.priority
            while (head := self._roster.waiting.head()) is not None and head[1].priority < least:
                if self._admit(draft, prompts, draft.left) == 0:
                    break
        if under_way and self._roster.queue.overtakes:
            share, rest = draft.left // 2, under_way[:1]
            for seq in under_way[1:]:
                todo = seq.todo
                used = self._extend(draft, seq, share) if todo <= short else 0
                if used:
                    share, short = share - used, short - todo
                else:
                    rest.append(seq)
            while (used := self._admit(draft, prompts, share, short)) > 0:
                share, short = share - used, short - used - max(prompts[-1].todo, 0)
        for seq in rest:
            self._extend(draft, seq, draft.left)
        while self._admit(draft, prompts, draft.left) > 0:
            pass

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

    def _extend(self, draft: Draft, seq: Sequence, most: int) -> int:
        """Schedule up to `most` positions of a running sequence, as blocks allow; how many tokens that is."""
        start = seq.scheduled
        end = start + min(seq.todo, most)
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
        seq.scheduled = end
        self._counts.recomputed_tokens += count - self.charge(seq)
        seq.in_flight += 1
        seq.pending += samples
        return count

    def _admit(self, draft: Draft, prompts: list[Sequence], allowed: int, longest: int | None = None) -> int:
        """Admit the head of the queue and schedule up to `allowed` of its tokens; 0 if it cannot enter now.

        `longest`: only if it has no more tokens to compute. It joins `prompts`, which are all sequences that run and do
        not just decode.
        """
        roster = self._roster
        if allowed <= 0 or draft.logits_left == 0 or not roster.may_admit:
            return 0
        head = roster.waiting.head()
        if head is None or (longest is not None and head[1].prompt > longest):
            return 0
        seq = head[0]
        if places(seq) > roster.room:
            return 0
        start = self._affordable(seq, prompts)
        if start is None or self._memory.wake(seq, start):
            return 0
        skipped = self._memory.tokens_of(start)
        if longest is not None and len(seq.tokens) - skipped > longest:
            return 0
        roster.waiting.pop()
        if seq.phase is Phase.WAITING and seq is seq.leader:
            self._memory.tree.tick()
            seq.cached_tokens = skipped
            self._counts.query_tokens += seq.prompt_len
            self._counts.hit_tokens += skipped
        roster.enter(draft, seq, start)
        used = self._extend(draft, seq, allowed)
        assert used > 0, f"sequence {seq.index} of `{seq.request.id}` was admitted without room for a token"
        prompts.append(seq)
        return used

    def _affordable(self, seq: Sequence, prompts: list[Sequence]) -> Start | None:
        """The start of a waiting sequence if memory has what it needs soon besides what those running do."""
        running, admission = self._roster.running, self._roster.admission
        if not running:
            return admission.affordable(seq, 0, alone=True)
        bound = 2 * len(running) + sum(map(admission.missing, prompts))  # who decodes needs two blocks at most
        start = admission.affordable(seq, bound, alone=False)
        if start is not None:
            return start
        return admission.affordable(seq, sum(map(admission.missing, running.values())), alone=False)


def _samples(seq: Sequence, end: int) -> bool:
    """Whether computing up to `end` gives a token that may be accepted."""
    return end == len(seq.tokens) + seq.pending and seq.wants_token
