"""A runner without a model, for tests: applies Steps exactly as documented and checks that they are legal.

For every block and offset it keeps the hash of the whole token history whose KV was written there. A chunk may be
computed only if each position it attends to holds the hash of this sequence's own history, so sharing, copying or
reusing a wrong block is caught where it happens. The next token is a pure function of that history and the seed.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from llmctl.engine.request import FinishReason, Output, Request
from llmctl.engine.schedule.limits import SchedulerConfig
from llmctl.engine.schedule.proposer import Proposer
from llmctl.engine.schedule.scheduler import Scheduler
from llmctl.engine.schedule.sequence import mix_seed
from llmctl.engine.schedule.step import Chunk, ChunkResult, SlotSampling, Step, StepResult

START = 0x5EED


@dataclass(frozen=True)
class FakeModel:
    """Chooses tokens below `vocab`. One history in `bad_every` gives NaN (0: none).

    In `repeats` of 8 histories the token before alone decides, so that texts run in circles for a while. One move to or
    from tier 2 in `lost_every` goes wrong, and the disk has room for `disk` blocks. A move
    takes `swap_us`.
    """

    vocab: int = 16
    bad_every: int = 0
    repeats: int = 0
    lost_every: int = 0
    disk: int = 1 << 30
    swap_us: int = 5

    def finite(self, history: int) -> bool:
        return self.bad_every == 0 or hash((history, -7)) % self.bad_every != 0

    def ranked(self, history: int, count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The likeliest tokens after a history, with logprobs that make a distribution."""
        weights = {token: 1.0 + hash((history, token, -9)) % 1000 for token in range(self.vocab)}
        order = sorted(weights, key=lambda token: (-weights[token], token))[:count]
        total = sum(weights.values())
        return tuple(order), tuple(math.log(weights[token] / total) for token in order)

    def sample(self, history: int, last: int, seed: int, banned: Iterable[int] = ()) -> int:
        if hash((history, -8)) % 8 < self.repeats:
            history = last
        order = sorted(range(self.vocab), key=lambda token: hash((history, seed, token)))
        return next(token for token in order if token not in banned)


def known_logprob(history: int) -> float:
    """What the fake runner reports for the token that ends a history."""
    return -(hash((history, -10)) % 1000) / 100


def extend(history: int, token: int) -> int:
    return hash((history, token))


@dataclass
class Slot:
    prompt_len: int
    sampling: SlotSampling
    tokens: list[int]
    tables: list[list[int]]
    computed: int | None = None  # None until the first chunk says how much a cache gave
    histories: list[int] = field(default_factory=list)  # of each position

    def history(self, position: int) -> int:
        while len(self.histories) <= position:
            before = self.histories[-1] if self.histories else START
            self.histories.append(extend(before, self.tokens[len(self.histories)]))
        return self.histories[position]


class FakeRunner:
    """Executes steps at once, in order; a test delivers the results later to try deeper pipelines."""

    def __init__(self, config: SchedulerConfig, model: FakeModel | None = None) -> None:
        self.config = config
        self.model = model or FakeModel()
        self.slots: dict[int, Slot] = {}
        self.pools = (*config.num_blocks, *(each.num_blocks for each in config.windows))
        self.windows = (0,) * len(config.num_blocks) + tuple(each.window for each in config.windows)
        self.kv: list[list[list[int | None]]] = [
            [[None] * config.block_size for _ in range(count)] for count in self.pools
        ]
        self.tier: dict[int, list[list[int | None]]] = {}
        counts = (config.tier_blocks, *(each.tier_blocks for each in config.windows))
        first = len(config.num_blocks)
        groups = (tuple(range(first)), *((first + place,) for place in range(len(config.windows))))
        self.place_groups = [own for own, count in zip(groups, counts) for _ in range(count)]
        self.moves = 0
        self.next_index = 0
        self.copied_tokens = 0
        self.computed_tokens = 0
        self.accepted_drafts = 0

    def submit(self, step: Step) -> StepResult:
        config = self.config
        assert step.index == self.next_index
        self.next_index += 1
        for slot in step.drop:
            del self.slots[slot]
        for admit in step.admit:
            assert 0 <= admit.slot < config.max_num_seqs and admit.slot not in self.slots
            tokens = array("i")
            tokens.frombytes(admit.tokens)
            assert 0 < admit.prompt_len <= len(tokens)
            self.slots[admit.slot] = Slot(admit.prompt_len, admit.sampling, list(tokens), [[] for _ in self.pools])
        assert len(self.slots) <= config.max_num_seqs
        for delta in step.tables:
            assert delta.blocks
            assert all(0 <= block < self.pools[delta.group] for block in delta.blocks)
            self.slots[delta.slot].tables[delta.group].extend(delta.blocks)
        failed = self._swap(step)
        self._copy(step)
        assert step.chunks or step.swaps, "an empty step"
        assert len({chunk.slot for chunk in step.chunks}) == len(step.chunks)
        assert sum(chunk.count for chunk in step.chunks) <= config.max_num_batched_tokens
        assert sum(chunk.count - chunk.logits_from for chunk in step.chunks) <= config.logit_rows
        for chunk in step.chunks:
            self._draft(chunk)
            self._check_reads(self.slots[chunk.slot], chunk.start, chunk.start)
            self._write(self.slots[chunk.slot], chunk.start, chunk.count)
        for chunk in step.chunks:  # again: has one chunk written over what another reads?
            self._check_reads(self.slots[chunk.slot], chunk.start, chunk.start + chunk.count)
        chunks = tuple(self._result(chunk) for chunk in step.chunks)
        return StepResult(
            step.index, chunks, failed, self.model.swap_us * len(step.swaps), sum(chunk.count for chunk in step.chunks)
        )

    def _swap(self, step: Step) -> tuple[int, ...]:
        failed = []
        for swap in step.swaps:
            assert 0 <= swap.place < len(self.place_groups)
            groups = self.place_groups[swap.place]
            assert len(swap.blocks) == len(groups)
            arenas = [self.kv[group] for group in groups]
            self.moves += 1
            lost = self.model.lost_every and hash((self.moves, -11)) % self.model.lost_every == 0
            if swap.out:
                self.tier.pop(swap.place, None)
                if lost or len(self.tier) >= self.model.disk:
                    failed.append(swap.place)
                else:
                    self.tier[swap.place] = [list(kv[block]) for kv, block in zip(arenas, swap.blocks)]
            elif lost or swap.place not in self.tier:
                assert lost or self.model.lost_every or self.model.disk < 1 << 30, "nothing was written there"
                self.tier.pop(swap.place, None)
                failed.append(swap.place)
                for kv, block in zip(arenas, swap.blocks):
                    kv[block] = [None] * self.config.block_size
            else:
                for kv, block, content in zip(arenas, swap.blocks, self.tier[swap.place]):
                    kv[block] = list(content)
        return tuple(dict.fromkeys(failed))

    def _copy(self, step: Step) -> None:
        targets = {(copy.group, copy.target) for copy in step.copies}
        assert len(targets) == len(step.copies)
        new = {(delta.group, block) for delta in step.tables for block in delta.blocks}
        assert targets <= new, "a copy into a block that is nobody's new one"
        for copy in step.copies:
            assert (copy.group, copy.source) not in targets
            assert 0 < copy.tokens < self.config.block_size
            source = self.kv[copy.group][copy.source]
            assert None not in source[: copy.tokens], "a copy of positions never written"
            rest = self.config.block_size - copy.tokens
            self.kv[copy.group][copy.target] = source[: copy.tokens] + [None] * rest
            self.copied_tokens += copy.tokens

    def _draft(self, chunk: Chunk) -> None:
        if chunk.drafts:
            tokens = self.slots[chunk.slot].tokens
            assert chunk.start + chunk.count - len(chunk.drafts) == len(tokens), "drafts after tokens not known"
            tokens.extend(chunk.drafts)

    def _check_reads(self, slot: Slot, start: int, end: int) -> None:
        """What the positions from `start` on see before `end` is the sequence's own."""
        size = self.config.block_size
        for position in range(end):
            history = slot.history(position)
            for group, table in enumerate(slot.tables):
                if self.windows[group] and position < start + 1 - self.windows[group]:
                    continue
                assert self.kv[group][table[position // size]][position % size] == history, (
                    f"position {position} reads another history"
                )

    def _write(self, slot: Slot, start: int, count: int) -> None:
        size = self.config.block_size
        assert slot.computed in (None, start), f"chunk starts at {start}, {slot.computed} are computed"
        assert count > 0 and start + count <= len(slot.tokens), "a chunk past the known tokens"
        for position in range(start, start + count):
            for group, table in enumerate(slot.tables):
                self.kv[group][table[position // size]][position % size] = slot.history(position)
        slot.computed = start + count
        self.computed_tokens += count

    def _result(self, chunk: Chunk) -> ChunkResult:
        slot = self.slots[chunk.slot]
        end = chunk.start + chunk.count
        if chunk.logits_from == chunk.count:
            assert not chunk.drafts
            return ChunkResult(chunk.slot)
        samples = chunk.count - chunk.logits_from - chunk.known - len(chunk.drafts)
        assert samples in (0, 1) and not (chunk.known and chunk.drafts)
        known = range(end - samples - chunk.known + 1, end - samples + 1)  # places of the known tokens
        if not samples:
            return self._with_known(chunk, slot, known, ChunkResult(chunk.slot))
        assert end == len(slot.tokens)
        first = end - len(chunk.drafts)  # of the tokens sampled here
        tokens: list[int] = []
        finite = True
        for place in range(first, end + 1):
            history = slot.history(place - 1)
            finite = self.model.finite(history)
            if not finite:
                break
            banned = slot.sampling.banned_ids if place - slot.prompt_len < slot.sampling.banned_until else ()
            tokens.append(self.model.sample(history, slot.tokens[place - 1], slot.sampling.seed, banned))
            if place < end and tokens[-1] != slot.tokens[place]:
                break
        self.accepted_drafts += max(len(tokens) - 1, 0)
        slot.tokens[first:] = tokens
        if chunk.drafts:
            slot.computed = first + len(tokens) - 1
            del slot.histories[slot.computed :]
        elif not finite:
            slot.tokens.append(0)  # whatever was sampled: a step in flight may feed it
        logprobs = tuple(float(-token) for token in tokens) if slot.sampling.logprobs >= 0 else ()
        count = slot.sampling.logprobs
        if count <= 0 or not finite or chunk.drafts:
            return self._with_known(chunk, slot, known, ChunkResult(chunk.slot, tuple(tokens), finite, logprobs))
        ids, values = self.model.ranked(slot.history(end - 1), count)
        result = ChunkResult(chunk.slot, tuple(tokens), finite, logprobs, (ids,), (values,))
        return self._with_known(chunk, slot, known, result)

    def _with_known(self, chunk: Chunk, slot: Slot, known: range, result: ChunkResult) -> ChunkResult:
        """The result with the logprobs of known tokens in front: each is the hash of its history."""
        if not known:
            return result
        assert known[-1] < slot.prompt_len
        assert known.start >= chunk.start + chunk.logits_from + 1 == known.start
        empty = slot.sampling.logprobs > 0
        return ChunkResult(
            chunk.slot,
            (*(slot.tokens[place] for place in known), *result.tokens),
            result.finite,
            (*(known_logprob(slot.history(place)) for place in known), *result.logprobs),
            (*(() for _ in known), *result.top_ids) if empty else (),
            (*(() for _ in known), *result.top_logprobs) if empty else (),
        )


@dataclass
class Received:
    """All that came for one sequence."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    cached_tokens: int = 0
    error: str = ""
    prompt_logprobs: tuple[float, ...] = ()


class Loop:
    """Scheduler and fake runner joined, with `depth` steps in flight. `on_step` sees each Step."""

    def __init__(
        self, config: SchedulerConfig, model: FakeModel | None = None, proposer: Proposer | None = None
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config, proposer)
        self.runner = FakeRunner(config, model)
        self.results: list[StepResult] = []
        self.steps: list[Step] = []
        self.received: dict[tuple[str, int], Received] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)

    def abort(self, request_id: str) -> None:
        self.take(self.scheduler.abort(request_id))

    def launch(self) -> Step | None:
        """Schedule and execute one step if there is one; its result waits."""
        step = self.scheduler.schedule()
        if step is not None:
            self.results.append(self.runner.submit(step))
            self.steps.append(step)
        return step

    def deliver(self) -> tuple[Output, ...]:
        """Hand the oldest waiting result to the scheduler."""
        outputs = self.scheduler.update(self.results.pop(0))
        self.take(outputs)
        return outputs

    def step(self) -> tuple[Output, ...]:
        """Fill the pipeline, then take one result out."""
        while self.launch() is not None:
            pass
        return self.deliver() if self.results else ()

    def run(self, max_steps: int = 10_000) -> dict[tuple[str, int], Received]:
        """Step until everything has ended."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return self.received
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps")

    def take(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            got = self.received.setdefault((output.request_id, output.index), Received())
            assert got.finish is None, "an output after the end"
            assert output.first == len(got.tokens), "tokens lost or repeated"
            assert output.epoch == self.config.epoch
            got.tokens.extend(output.tokens)
            got.finish = output.finish
            got.cached_tokens = output.cached_tokens
            got.error = output.error
            got.prompt_logprobs += tuple(entry.logprob for entry in output.prompt_logprobs)


def calm_run(request: Request, index: int, limit: int, model: FakeModel) -> tuple[list[int], FinishReason]:
    """What the sequence must give whatever its company: its tokens, and how it ends."""
    history = START
    for token in request.prompt:
        history = extend(history, token)
    tokens: list[int] = []
    most = min(request.max_tokens, limit - len(request.prompt))
    seed = mix_seed(request.seed, index)
    while len(tokens) < most:
        if not model.finite(history):
            return tokens, FinishReason.ERROR
        banned = request.stop_ids if len(tokens) < request.sampling.min_tokens else ()
        token = model.sample(history, tokens[-1] if tokens else request.prompt[-1], seed, banned)
        tokens.append(token)
        history = extend(history, token)
        if token in request.stop_ids:
            return tokens, FinishReason.STOP
    return tokens, FinishReason.LENGTH
