"""What the scheduler counts, for metrics."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from .memory import KVMemory
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts now (sequences, blocks summed over groups, shares of them) and since the start (the rest).

    `scheduler_s` is the time in the scheduler and the prefix tree, `draft_s` that of a draft model, and `step_s` that
    of all steps with them.
    `drafts` are chunks with `draft_tokens` proposed tokens together, of which `accepted_tokens` stood, and of these
    `accepted_per_position[i]` in place i of a draft. `audits` are of prefix hits, see `engine/audit.py`.
    """

    waiting: int
    running: int
    blocks_free: int
    blocks_active: int
    blocks_cached: int
    fragmentation: float  # of the blocks not in use, those that cannot be had in runs of 16
    waste: float  # of the positions in blocks in use, those that hold no token
    steps: int
    scheduled_tokens: int
    recomputed_tokens: int
    preemptions: int
    evictions: int
    evicted_reused: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    tier_blocks: int = 0  # places in tier 2
    tier_blocks_used: int = 0
    tier_writes: int = 0  # blocks that were evicted to it
    tier_clean_drops: int = 0  # evicted without a write, for their copies were there
    tier_hits: int = 0  # read back
    tier_failures: int = 0  # moves that went wrong: not written, or not what was written
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    audits: int = 0
    audit_failures: int = 0
    scheduler_s: float = 0.0
    draft_s: float = 0.0
    step_s: float = 0.0


@dataclass(slots=True)
class Counts:
    """What the scheduler counts since its start."""

    steps: int = 0
    scheduled_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)

    def verified(self, drafted: int, accepted: int) -> None:
        """Of a draft of `drafted` tokens the first `accepted` stood."""
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        stood = self.accepted_per_position
        stood += [0] * (drafted - len(stood))
        for place in range(accepted):
            stood[place] += 1

    def stats(
        self, memory: KVMemory, bytes_per_block: int, waiting: int, running: Collection[Sequence]
    ) -> SchedulerStats:
        """These counts beside how memory stands now."""
        pools, tree = memory.all_pools, memory.tree
        tiers = [tier for tier, _ in memory.tiers]
        sizes = [bytes_per_block if size is None else size for _, size in memory.tiers]
        return SchedulerStats(
            waiting=waiting,
            running=len(running),
            blocks_free=sum(pool.num_free for pool in pools),
            blocks_active=sum(pool.num_active for pool in pools),
            blocks_cached=sum(pool.num_cached for pool in pools),
            fragmentation=memory.fragmentation,
            waste=memory.waste(running),
            steps=self.steps,
            scheduled_tokens=self.scheduled_tokens,
            recomputed_tokens=self.recomputed_tokens,
            preemptions=self.preemptions,
            evictions=tree.evictions,
            evicted_reused=tree.evicted_reused,
            prefix_query_tokens=self.query_tokens,
            prefix_hit_tokens=self.hit_tokens,
            drafts=self.drafts,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
            accepted_per_position=tuple(self.accepted_per_position),
            tier_blocks=sum(tier.num_places for tier in tiers),
            tier_blocks_used=sum(tier.num_used for tier in tiers),
            tier_writes=sum(tier.written for tier in tiers),
            tier_clean_drops=sum(tier.clean_drops for tier in tiers),
            tier_hits=sum(tier.read_back for tier in tiers),
            tier_failures=sum(tier.failed for tier in tiers),
            swapped_out_bytes=sum(tier.written * size for tier, size in zip(tiers, sizes)),
            swapped_in_bytes=sum(tier.read_back * size for tier, size in zip(tiers, sizes)),
        )
