"""`Sequence`: all that changes about a request while it lives. Only the scheduler writes it.

A Request with n samples makes n sequences, which share the prompt's blocks. Positions count from 0: position p holds
token p, and computing it may sample token p + 1. With several steps in flight a sequence has tokens that are being
sampled and not known yet (`pending`): they may be scheduled, since the runner feeds its own.
"""

from __future__ import annotations

import enum

from ..request import Request, TokenLogprobs
from .blocks import IllegalTransition
from .node import Column, Node
from .step import SlotSampling


class Phase(enum.Enum):
    """What a sequence is doing."""

    WAITING = "waiting"
    RUNNING = "running"  # has a runner slot and blocks
    PREEMPTED = "preempted"  # had them, and waits for its turn again
    FINISHED = "finished"


_NEXT: dict[Phase, tuple[Phase, ...]] = {
    Phase.WAITING: (Phase.RUNNING, Phase.FINISHED),
    Phase.RUNNING: (Phase.PREEMPTED, Phase.FINISHED),
    Phase.PREEMPTED: (Phase.RUNNING, Phase.FINISHED),
    Phase.FINISHED: (),
}


class WindowTable:
    """The blocks that a sequence holds in a group with a window; the first of them stands at `first` of its table."""

    __slots__ = ("blocks", "first")

    def __init__(self, first: int, blocks: list[int]) -> None:
        self.first = first
        self.blocks = blocks

    @property
    def end(self) -> int:
        """The length of the table, with what is gone of it."""
        return self.first + len(self.blocks)

    def entries(self, start: int, end: int) -> tuple[int, ...]:
        """What stands at start .. end - 1 of the table; 0 for what is gone, which nobody reads."""
        gone = max(0, min(self.first, end) - start)
        return (0,) * gone + tuple(self.blocks[start + gone - self.first : end - self.first])


class Sequence:
    """One sample of a request.

    order      arrival number, unique; a lower one came first
    leader     the request's sequence 0, whose prompt the others share (itself for sequence 0)
    tokens     the prompt and every token accepted so far
    goal       positions to compute in a whole life: the last token allowed needs no KV
    blocks     per logical block, one physical block of every KV group
    windows    the table of every KV group with a window
    borrowed   how many leading entries of `blocks` were another's when this sequence was admitted
    announced  how many entries of `blocks` the runner knows; -1: it must be told all of the sequence again
    scheduled  positions scheduled since admission, those of steps in flight included; drafts too, which are taken
               back when they are rejected
    computed   positions whose step's result was seen: their KV is final
    pending    tokens being sampled by steps in flight, those that depend on drafts not counted
    in_flight  steps in flight that have a chunk of this sequence
    published  full blocks known to the prefix tree, the last of them as `cursor`
    probed     prompt positions that were scheduled with logits, for `prompt_logprobs`, which has those that came back
    charged    positions that were ever scheduled: recomputing is not the tenant's fault
    is_beam    one of a beam search: which token follows depends on the other beams
    plain      tokens are all that is wanted of it: no beam, no logprobs
    woken      blocks that tier 2 was asked for since the sequence was last queued
    trace      every phase it entered, with the steps that had been made then
    """

    __slots__ = (
        "announced",
        "blocks",
        "borrowed",
        "cached_tokens",
        "charged",
        "computed",
        "cursor",
        "goal",
        "in_flight",
        "index",
        "is_beam",
        "leader",
        "max_new",
        "order",
        "pending",
        "phase",
        "plain",
        "probed",
        "prompt_len",
        "prompt_logprobs",
        "published",
        "request",
        "scheduled",
        "slot",
        "tokens",
        "trace",
        "windows",
        "woken",
    )

    def __init__(
        self, request: Request, index: int, order: int, limit: int, leader: Sequence | None = None, step: int = 0
    ) -> None:
        self.request = request
        self.index = index
        self.order = order
        self.leader = self if leader is None else leader
        self.is_beam = request.sampling.use_beam_search
        self.plain = not self.is_beam and request.sampling.logprobs is None
        self.phase = Phase.WAITING
        self.trace = [(Phase.WAITING, step)]
        self.tokens = list(request.prompt)
        self.prompt_len = len(request.prompt)
        self.max_new = max(0, min(request.max_tokens, limit - self.prompt_len))
        self.goal = self.prompt_len + max(self.max_new - 1, 0)
        if self.wants_prompt and self.max_new == 0:
            self.goal = max(self.prompt_len - 1, 1)  # logits after the last token are of no use
        self.slot = -1
        self.blocks: list[Column] = []
        self.windows: list[WindowTable] = []
        self.borrowed = 0
        self.announced = 0
        self.scheduled = 0
        self.computed = 0
        self.pending = 0
        self.in_flight = 0
        self.published = 0
        self.cursor: Node | None = None
        self.probed = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.charged = 0
        self.woken = 0
        self.cached_tokens = 0

    @property
    def generated(self) -> int:
        """Tokens accepted so far beyond the prompt."""
        return len(self.tokens) - self.prompt_len

    @property
    def todo(self) -> int:
        """Positions that can be computed now: their tokens are known, or are sampled by a step in flight.

        Not above 0 while drafts are being verified, since what comes after them is not known.
        """
        ahead = 0 if self.is_beam else self.pending
        return min(len(self.tokens) + ahead, self.goal) - self.scheduled

    @property
    def wants_prompt(self) -> bool:
        """Whether this sequence gives the request's prompt logprobs."""
        return self is self.leader and self.request.sampling.prompt_logprobs is not None

    @property
    def reusable(self) -> int:
        """Known tokens whose positions a cache may give: not the last, and none whose logits are still wanted."""
        return min(len(self.tokens) - 1, self.probed) if self._unprobed else len(self.tokens) - 1

    def known_in(self, start: int, end: int) -> int:
        """How many of the positions start .. end - 1, the last ones, have to give logprobs of the next prompt token."""
        return max(0, min(end, self.prompt_len - 1) - max(start, self.probed)) if self._unprobed else 0

    @property
    def _unprobed(self) -> bool:
        return self.wants_prompt and self.probed < self.prompt_len - 1

    @property
    def unit(self) -> int:
        """What is preempted as one: the order of this sequence, or of its leader for the beams of one search."""
        return self.leader.order if self.is_beam else self.order

    @property
    def wants_token(self) -> bool:
        """Whether computing the last position scheduled samples a token that may be accepted."""
        return self.generated + self.pending < self.max_new

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: the more important request (a lower number), then the earlier one."""
        return self.request.priority, self.order

    def move(self, phase: Phase, step: int) -> None:
        """Enter `phase` when `step` steps have been made, or raise IllegalTransition."""
        if phase not in _NEXT[self.phase]:
            raise IllegalTransition(
                f"sequence {self.index} of `{self.request.id}` cannot go from {self.phase.value} to {phase.value}"
            )
        self.phase = phase
        self.trace.append((phase, step))


def slot_sampling(request: Request, index: int) -> SlotSampling:
    """What the sampler needs for sequence `index`, every default resolved."""
    asked = request.sampling
    wanted = -1 if asked.logprobs is None else asked.logprobs
    if index == 0 and asked.prompt_logprobs is not None:
        wanted = max(wanted, asked.prompt_logprobs)
    bias = sorted(asked.logit_bias.items())
    return SlotSampling(
        temperature=0.0 if asked.use_beam_search else asked.temperature,
        top_k=max(asked.top_k, 0),
        top_p=asked.top_p,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        seed=mix_seed(request.seed, index),
        logprobs=max(wanted, asked.beam_width + len(request.stop_ids)) if asked.use_beam_search else wanted,
        bias_ids=tuple(token for token, _ in bias),
        bias_values=tuple(value for _, value in bias),
        banned_until=asked.min_tokens if request.stop_ids else 0,
        banned_ids=request.stop_ids if asked.min_tokens else (),
    )


def mix_seed(seed: int, index: int) -> int:
    """The 64-bit seed of a request's sequence `index`: splitmix64 (Steele, Lea, Flood 2014) of the seed, then of both.

    Hashing twice keeps (seed, index + 1) apart from (seed + 1, index) and any other simple relation between seeds.
    """
    return _splitmix64(_splitmix64(seed) + index)


_MASK = (1 << 64) - 1


def _splitmix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
