"""`WorkList`: what attention does in a step, planned once and shared by all layers that do the same.

It lies in buffers at fixed addresses, so that launches which were captured serve every step whose work fits into the
grid that they were captured with. Sums over parts of a context need memory for each part: a step that would need more
than there is goes in rounds, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..ops import SEQS, Batch, I32Array
from .attend import MERGE, WORK, AttendPlan, choose_split_of, plan_rows
from .machine import Machine

PARTS_BYTES = 256 << 20  # of memory for parts of one launch
MOST_ITEMS = 8192  # of one launch
ITEM_BYTES = WORK.itemsize + MERGE.itemsize


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a specialization of attention cuts its work: see `plan_attention`, and AttendShape for `rows` and `tile`."""

    group: int
    rows: int
    tile: int
    window: int
    kv_heads: int
    head_dim: int

    @property
    def part_bytes(self) -> int:
        """Memory for one part of a context: a tile's rows of every KV head, each with its largest score and its sum."""
        return 4 * self.rows * self.kv_heads * (self.head_dim + 2)


@dataclass(slots=True, eq=False)
class WorkList:
    """The work of those sequences of a batch that have more than `above` packed rows, and at most `most`.

    split   where contexts are cut, 0: as suits the step, so that bits depend on the company
    rounds  of the step, as `plan` found them;  held: they are those of the batch as it is
    grid    (items of work, of merging) that launches have room for, (0, 0): as many as there are
    """

    batch: Batch
    tiles: Tiles
    split: int
    processors: int
    above: int
    most: int
    work: npt.NDArray[np.void]
    merge: npt.NDArray[np.void]
    counts: I32Array
    max_parts: int
    rounds: tuple[AttendPlan, ...] = ()
    held: bool = False
    grid: tuple[int, int] = (0, 0)
    _brought: int = field(default=-1)

    def plan(self) -> None:
        """Find the step's rounds from the batch."""
        batch, tiles = self.batch, self.tiles
        count = int(batch.counts[SEQS])
        first, rows = batch.seq_first[:count], batch.seq_rows[:count]
        packed = rows * tiles.group
        mine = np.flatnonzero((packed > self.above) & (packed <= self.most))
        self._brought = -1
        if not len(mine):
            self.rounds = ()
            return
        first, rows = first[mine], rows[mine]
        slot, position = batch.slot[first], batch.position[first]
        split = self.split or choose_split_of(
            position + rows, rows,
            group=tiles.group, rows=tiles.rows, tile=tiles.tile, kv_heads=tiles.kv_heads,
            processors=self.processors, window=tiles.window,
        )  # fmt: skip
        self.rounds = plan_rows(
            slot, first, rows, position,
            group=tiles.group, rows=tiles.rows, tile=tiles.tile, split=split, window=tiles.window,
            max_items=len(self.work), max_parts=self.max_parts,
        )  # fmt: skip

    def bring(self, machine: Machine, number: int) -> tuple[int, int]:
        """Let the buffers hold this round. What a launch needs room for: items of work, and of merging."""
        found = self.rounds[number]
        if self._brought != number:
            self.work[: len(found.work)] = found.work
            self.merge[: len(found.merge)] = found.merge
            self.counts[:] = len(found.work), len(found.merge)
            machine.bring(self.work, len(found.work))
            if len(found.merge):
                machine.bring(self.merge, len(found.merge))
            machine.bring(self.counts, 2)
            self._brought = number
        return len(found.work), len(found.merge)


def make_work_list(
    machine: Machine, batch: Batch, tiles: Tiles, split: int, *, above: int, most: int, max_positions: int
) -> WorkList:
    """An empty list with its buffers, for contexts of at most `max_positions`."""
    rows, seqs = len(batch.token), len(batch.seq_first)
    each = max_positions // (split or 2 * tiles.tile) + 2
    bound = (seqs + -(-min(rows, most // tiles.group) * tiles.group // tiles.rows)) * each
    items = max(each, min(MOST_ITEMS, bound))
    parts = max(each, min(items, PARTS_BYTES // tiles.part_bytes))
    machine.workspace(parts * tiles.part_bytes)
    return WorkList(
        batch, tiles, split, machine.processors, above, most,
        np.zeros(items, WORK), np.zeros(items, MERGE), np.zeros(2, np.int32), parts,
    )  # fmt: skip
