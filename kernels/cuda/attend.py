"""Attention's specializations, their launches, and the list of work that a step gives them.

Work is planned on the host from the step's lengths: tiles of packed rows (attend.cuh), and the context of each cut at
multiples of `split`. A grid is recorded once for the most work that can come; blocks beyond the list return at once, so
that one recorded launch serves every step.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..ops import I32Array
from .source import Kernel
from .types import ACTIVATIONS, EIGHT_BIT_KV, ELEMENT_BYTES, ELEMENTS

HEADER = "attend.cuh"
WINDOW, SOFT_CAP, SINKS, FINE_WEIGHTS = 1, 2, 4, 8  # as in attend.cuh
MERGE_THREADS, MERGE_ROWS = 256, 4  # kMergeRows of attend.cuh: blocks that share a tile's rows
# Parts of fewer tiles cost more than they bring; what a part costs besides its tokens, and merging, in tokens.
_SHORTEST, _PART_TOKENS, _MERGE_TOKENS = 2, 32, 128
COMPUTE = {"f16": "Half", "bf16": "Bf16", "tf32": "Tf32", "f32": "Fp32"}


@dataclass(frozen=True, slots=True)
class AttendShape:
    """One specialization of `attend`.

    act      f32 | f16 | bf16: queries and outputs
    compute  what the tensor cores multiply: f16 | bf16 | tf32 | f32 (float32 as sums of two tf32)
    kv       format of the cache
    warps_m, warps_n  how warps divide rows and the tokens of a step;  tile: tokens per step;  stages: steps in flight
    flags    WINDOW | SOFT_CAP | SINKS | FINE_WEIGHTS: the last lets the result have no error but its own rounding
    """

    act: str
    compute: str
    kv: str
    head_dim: int
    block_size: int
    warps_m: int
    warps_n: int
    tile: int
    stages: int
    flags: int = 0

    @property
    def kernel(self) -> Kernel:
        return Kernel(
            HEADER,
            f"attend<{ELEMENTS[self.act]}, {COMPUTE[self.compute]}, {ELEMENTS[self.kv]}, {self.head_dim}, "
            f"{self.block_size}, {self.warps_m}, {self.warps_n}, {self.tile}, {self.stages}, {self.flags}>",
        )

    @property
    def merge_kernel(self) -> Kernel:
        sinks = "true" if self.flags & SINKS else "false"
        return Kernel(HEADER, f"attend_merge<{ELEMENTS[self.act]}, {self.head_dim}, {self.rows}, {sinks}>")

    @property
    def merge_shared_bytes(self) -> int:
        """Dynamic shared memory of `attend_merge`: a row of each warp, and the sum of its weights."""
        return (self.head_dim + 1) * 4 * (MERGE_THREADS // 32)

    @property
    def rows(self) -> int:
        return 16 * self.warps_m

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: queries, then the steps in flight or the warps' parts, whichever is more."""
        parts = self.warps_n * self.rows * (self.head_dim + 8 + 2) * 4
        return self._query_bytes + max(self.stages * self.stage_bytes, parts)

    @property
    def stage_bytes(self) -> int:
        """Of one step: K, V with its rows padded, and scales."""
        row = self.head_dim * ELEMENT_BYTES[self.kv]
        padded = row + (16 if row // 16 % 2 == 0 else 0)
        return self.tile * (row + padded + (4 if self.kv == "int8" else 0))

    @property
    def _query_bytes(self) -> int:
        operand = 16 if self.compute in ("f16", "bf16") else 32
        steps = self.head_dim // 16
        return self.warps_m * steps * 32 * operand if steps * operand > 128 else 0


def compute_of(act: str, kv: str) -> str:
    """What attention multiplies in if nothing else is asked for.

    Codes of 8 bits are exact in float16, and cost least there; queries, which may be out of its range, are scaled.
    """
    return "f16" if act == "bf16" and kv in EIGHT_BIT_KV else act


def refusal(act: str, compute: str, kv: str) -> str | None:
    """Why there is no `attend` for these, None if there is."""
    if act not in ACTIVATIONS:
        return f"activations are {act}; known are {', '.join(ACTIVATIONS)}"
    if kv in EIGHT_BIT_KV:
        return None
    multiplied = {"f16": ("f16",), "bf16": ("bf16",), "f32": ("f32", "tf32")}[kv]
    if compute not in multiplied:
        return f"a {kv} cache is multiplied in {' or '.join(multiplied)}, not in {compute}"
    return None


# As AttendWork and MergeWork of attend.cuh.
WORK = np.dtype(
    [(name, np.int32) for name in ("slot", "first_row", "queries", "first_position", "tile", "begin", "end", "partial")]
)
MERGE = np.dtype(
    [(name, np.int32) for name in ("first_row", "queries", "tile", "first", "count")] + [("reserved", np.int32, 3)]
)


@dataclass(frozen=True, slots=True, eq=False)
class AttendPlan:
    """What a step's attention consists of: items of WORK, items of MERGE, and how many parts the latter join."""

    work: np.ndarray[tuple[int], np.dtype[np.void]]
    merge: np.ndarray[tuple[int], np.dtype[np.void]]
    parts: int


@dataclass(frozen=True, slots=True)
class Queries:
    """One sequence of a step: `count` queries from row `first_row` on, the first at `first_position`."""

    slot: int
    first_row: int
    count: int
    first_position: int


def plan_attention(
    sequences: Sequence[Queries], *, group: int, rows: int, tile: int, split: int, window: int = 0
) -> AttendPlan:
    """The work of these sequences for tiles of `rows` packed rows, contexts cut at multiples of `split`.

    Cuts, and ends of steps, are at fixed positions whatever else is in the step: that is what keeps bits equal.
    """
    assert split % tile == 0, (split, tile)
    work: list[tuple[int, ...]] = []
    merge: list[tuple[int | tuple[int, int, int], ...]] = []
    parts = 0
    for sequence in sequences:
        packed = sequence.count * group
        for index in range(-(-packed // rows)):
            first = sequence.first_position + index * rows // group
            last = sequence.first_position + (min((index + 1) * rows, packed) - 1) // group
            begin = max(0, first + 1 - window) // tile * tile if window else 0
            cuts = [begin, *range((begin // split + 1) * split, last + 1, split), last + 1]
            whole = len(cuts) == 2
            row = (sequence.slot, sequence.first_row, sequence.count, sequence.first_position, index)
            for part, (start, end) in enumerate(itertools.pairwise(cuts)):
                work.append((*row, start, end, -1 if whole else parts + part))
            if not whole:
                merge.append((sequence.first_row, sequence.count, index, parts, len(cuts) - 1, (0, 0, 0)))
                parts += len(cuts) - 1
    # The longest first: a GPU starts them in this order, and short ones fill its last gaps.
    work.sort(key=lambda item: item[5] - item[6])
    return AttendPlan(np.array(work, WORK), np.array(merge, MERGE), parts)


def choose_split(
    sequences: Sequence[Queries], *, group: int, rows: int, tile: int, kv_heads: int, processors: int, window: int = 0
) -> int:
    """The cut that lets a GPU of so many SMs end soonest: a multiple of the tile.

    An SM reads as fast for two blocks as for three, so what counts is how many tokens the busiest has to read.
    Depends on the company that a request has, so not for `--deterministic`, which has one cut for all steps.
    """
    lengths = []
    for sequence in sequences:
        longest = sequence.first_position + sequence.count
        tiles = -(-sequence.count * group // rows)
        lengths += [min(longest, window + rows) if window else longest] * tiles
    if not lengths:
        return tile
    longest = max(lengths)
    even = max(1, sum(lengths) * kv_heads // processors)
    candidates = {-(-longest // parts // tile) * tile for parts in range(1, 9)}
    candidates |= {-(-even // blocks // tile) * tile for blocks in range(1, 9)} | {_SHORTEST * tile}
    counts = Counter(lengths)

    def cost(split: int) -> tuple[int, int]:
        blocks = kv_heads * sum(count * -(-length // split) for length, count in counts.items())
        # One block alone leaves an SM waiting.
        busiest = max(2, -(-blocks // processors)) * (min(split, longest) + _PART_TOKENS)
        return busiest + (0 if split >= longest else _MERGE_TOKENS), -split

    return min((split for split in candidates if split >= _SHORTEST * tile), key=cost)


def table_of_counts(plan: AttendPlan) -> I32Array:
    """int32 [2]: items of work and of merging, as the kernels read them."""
    return np.array([len(plan.work), len(plan.merge)], np.int32)
