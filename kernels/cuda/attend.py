"""Attention's specializations, their launches, and the list of work that a step gives them.

Work is planned on the host from the step's lengths: tiles of packed rows (attend.cuh), and the context of each cut at
multiples of `split`. A grid is recorded once for the most work that can come; blocks beyond the list return at once, so
that one recorded launch serves every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..ops import I32Array
from .source import Kernel
from .types import ACTIVATIONS, EIGHT_BIT_KV, ELEMENT_BYTES, ELEMENTS

HEADER = "attend.cuh"
ACT_CODES = {"f32": 0, "f16": 1, "bf16": 2}  # as in attend.cuh
MERGE_THREADS, MERGE_ROWS = 256, 4  # kMergeRows of attend.cuh: blocks that share a tile's rows
# Parts of fewer tiles cost more than they bring; what a part costs besides its tokens, and merging, in tokens.
_SHORTEST, _PART_TOKENS, _MERGE_TOKENS = 2, 32, 128
COMPUTE = {"f16": "Half", "bf16": "Bf16", "tf32": "Tf32", "f32": "Fp32"}


@dataclass(frozen=True, slots=True)
class AttendShape:
    """One specialization of `attend`, and the type of the queries that it is used for.

    act      f32 | f16 | bf16: queries and outputs, an argument of `attend`
    compute  what the tensor cores multiply: f16 | bf16 | tf32 | f32 (float32 as sums of two tf32)
    kv       format of the cache
    warps_m, warps_n  how warps divide rows and the tokens of a step;  tile: tokens per step;  stages: steps in flight
    fine     weights of twice the bits, so that the result has no error but its own rounding
    soft_cap scores are capped
    """

    act: str
    compute: str
    kv: str
    head_dim: int
    warps_m: int
    warps_n: int
    tile: int
    stages: int
    fine: bool = False
    soft_cap: bool = False

    @property
    def kernel(self) -> Kernel:
        flags = ", ".join("true" if flag else "false" for flag in (self.fine, self.soft_cap))
        return Kernel(
            HEADER,
            f"attend<{COMPUTE[self.compute]}, {ELEMENTS[self.kv]}, {self.head_dim}, "
            f"{self.warps_m}, {self.warps_n}, {self.tile}, {self.stages}, {flags}>",
        )

    @property
    def merge_kernel(self) -> Kernel:
        return Kernel(HEADER, f"attend_merge<{ELEMENTS[self.act]}, {self.head_dim}, {self.rows}>")

    @property
    def act_code(self) -> int:
        """`act` as `attend` is told it."""
        return ACT_CODES[self.act]

    @property
    def merge_shared_bytes(self) -> int:
        """Dynamic shared memory of `attend_merge`: a row of each warp, and the sum of its weights."""
        return (self.head_dim + 1) * 4 * (MERGE_THREADS // 32)

    @property
    def rows(self) -> int:
        return 16 * self.warps_m

    @property
    def threads(self) -> int:
        over_dims = 2 if self.compute == "f32" and self.head_dim > 160 else 1  # kWarpsOverDims of attend.cuh
        return 32 * self.warps_m * self.warps_n * over_dims

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
        in_registers = 64 if self.compute == "f32" else 128
        return self.warps_m * steps * 32 * operand if steps * operand > in_registers else 0


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
    """The work of these sequences, as `plan_rows` finds it, in one plan."""
    if not sequences:
        return AttendPlan(np.zeros(0, WORK), np.zeros(0, MERGE), 0)
    columns = np.array([(s.slot, s.first_row, s.count, s.first_position) for s in sequences], np.int32).T
    (plan,) = plan_rows(*columns, group=group, rows=rows, tile=tile, split=split, window=window)
    return plan


def plan_rows(
    slot: I32Array,
    first_row: I32Array,
    count: I32Array,
    first_position: I32Array,
    *,
    group: int,
    rows: int,
    tile: int,
    split: int,
    window: int = 0,
    max_items: int = 1 << 31,
    max_parts: int = 1 << 31,
) -> tuple[AttendPlan, ...]:
    """The work of these sequences (see Queries) for tiles of `rows` packed rows, contexts cut at multiples of `split`.

    Cuts, and ends of steps, are at fixed positions whatever else is in the step: that is what keeps bits equal. One
    plan, or several with at most so many items and parts each, of which there is room for one tile's at least.
    """
    assert split % tile == 0, (split, tile)
    packed = count * group
    tiles = -(-packed // rows)
    owner = np.repeat(np.arange(len(count)), tiles)
    index = np.arange(len(owner)) - np.repeat(tiles.cumsum() - tiles, tiles)
    position, size = first_position[owner], packed[owner]
    last = position + (np.minimum((index + 1) * rows, size) - 1) // group
    begin = np.zeros_like(last)
    if window:
        begin = np.maximum(0, position + index * rows // group + 1 - window) // tile * tile
    cuts = last // split - begin // split + 1
    divided = cuts > 1
    columns = slot[owner], first_row[owner], count[owner], position, index
    found, place, needed = [], 0, cuts.cumsum()
    parts = (cuts * divided).cumsum()
    while place < len(owner):
        before = (int(needed[place - 1]), int(parts[place - 1])) if place else (0, 0)
        end = min(
            int(np.searchsorted(needed, before[0] + max_items, "right")),
            int(np.searchsorted(parts, before[1] + max_parts, "right")),
        )
        assert end > place, (cuts[place], max_items, max_parts)
        here = slice(place, end)
        chosen = tuple(column[here] for column in columns)
        found.append(_plan_tiles(chosen, begin[here], last[here], cuts[here], split))
        place = end
    return tuple(found)


def _plan_tiles(
    columns: tuple[npt.NDArray[np.integer], ...],
    begin: npt.NDArray[np.integer],
    last: npt.NDArray[np.integer],
    cuts: npt.NDArray[np.integer],
    split: int,
) -> AttendPlan:
    """The plan of these tiles: slot, first row, queries, first position and index of each, and its context's cuts."""
    divided = cuts > 1
    parts = np.where(divided, cuts, 0)
    first_part = parts.cumsum() - parts
    tile = np.repeat(np.arange(len(cuts)), cuts)
    part = np.arange(len(tile)) - np.repeat(cuts.cumsum() - cuts, cuts)
    cut = begin[tile] // split + part
    start = np.where(part == 0, begin[tile], cut * split)
    end = np.where(part == cuts[tile] - 1, last[tile] + 1, (cut + 1) * split)
    # The longest first: a GPU starts them in this order, and short ones fill its last gaps.
    order = np.argsort(start - end, kind="stable")
    partial = np.where(divided[tile], first_part[tile] + part, -1)
    work = np.zeros(len(tile), WORK)
    values = (*(column[tile] for column in columns), start, end, partial)
    for name, value in zip(WORK.names or (), values, strict=True):
        work[name] = value[order]
    joined = np.flatnonzero(divided)
    merge = np.zeros(len(joined), MERGE)
    _, first_row, queries, _, index = columns
    for name, value in zip(MERGE.names or (), (first_row, queries, index, first_part, cuts), strict=False):
        merge[name] = value[joined]
    return AttendPlan(work, merge, int(parts.sum()))


def choose_split(
    sequences: Sequence[Queries], *, group: int, rows: int, tile: int, kv_heads: int, processors: int, window: int = 0
) -> int:
    """`choose_split_of` for these sequences."""
    lengths = np.array([s.first_position + s.count for s in sequences], np.int32)
    return choose_split_of(
        lengths, np.array([s.count for s in sequences], np.int32),
        group=group, rows=rows, tile=tile, kv_heads=kv_heads, processors=processors, window=window,
    )  # fmt: skip


def choose_split_of(
    lengths: I32Array,
    counts: I32Array,
    *,
    group: int,
    rows: int,
    tile: int,
    kv_heads: int,
    processors: int,
    window: int = 0,
) -> int:
    """The cut that lets a GPU of so many SMs end soonest: a multiple of the tile.

    `lengths` of the contexts of one sequence each, with the queries that `counts` says. An SM reads as fast for two
    blocks as for three, so what counts is how many tokens the busiest has to read. Depends on the company that a
    request has, so not for `--deterministic`, which has one cut for all steps.
    """
    if not len(lengths):
        return tile
    tiles = -(-counts * group // rows)
    read = np.repeat(np.minimum(lengths, window + rows) if window else lengths, tiles).astype(np.int64)
    longest = int(read.max())
    even = max(1, int(read.sum()) * kv_heads // processors)
    candidates = {-(-longest // parts // tile) * tile for parts in range(1, 9)}
    candidates |= {-(-even // blocks // tile) * tile for blocks in range(1, 9)} | {_SHORTEST * tile}

    def cost(split: int) -> tuple[int, int]:
        blocks = kv_heads * int((-(-read // split)).sum())
        # One block alone leaves an SM waiting.
        busiest = max(2, -(-blocks // processors)) * (min(split, longest) + _PART_TOKENS)
        return busiest + (0 if split >= longest else _MERGE_TOKENS), -split

    return min((split for split in candidates if split >= _SHORTEST * tile), key=cost)


def table_of_counts(plan: AttendPlan) -> I32Array:
    """int32 [2]: items of work and of merging, as the kernels read them."""
    return np.array([len(plan.work), len(plan.merge)], np.int32)
