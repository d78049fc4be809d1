"""Attention of one layer on a machine: its launches for the work that a step's lists hold."""

from __future__ import annotations

from dataclasses import dataclass

from ..ops import ROWS, AttendArgs
from .arguments import Argument, f32, i32, i64, ptr
from .attend import MERGE_ROWS, MERGE_THREADS, AttendShape
from .call import Call
from .machine import Machine
from .types import block_bits
from .work_list import WorkList


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """A specialization, and the list of those sequences that it computes."""

    shape: AttendShape
    work: WorkList


@dataclass(frozen=True, slots=True, eq=False)
class AttendOp:
    """Attention, for the rows now in the batch. Lists that are held have been planned for them.

    sinks, value_scales  addresses of those of `args`, 0 for none
    """

    args: AttendArgs
    machine: Machine
    lanes: tuple[Lane, ...]
    sinks: int = 0
    value_scales: int = 0

    def run(self) -> None:
        if int(self.args.batch.counts[ROWS]) == 0:
            return
        for lane in self.lanes:
            if not lane.work.held:
                lane.work.plan()
            for number in range(len(lane.work.rounds)):
                needed = lane.work.bring(self.machine, number)
                self.machine.launch(self._calls(lane, *(lane.work.grid if any(lane.work.grid) else needed)))

    def _calls(self, lane: Lane, items: int, merges: int) -> list[Call]:
        args, machine, kv, shape, work = self.args, self.machine, self.args.kv, lane.shape, lane.work
        table, group = args.batch.tables[kv.group], args.num_heads // kv.num_kv_heads
        width, size = args.num_heads * kv.head_dim, work.max_parts * work.tiles.part_bytes
        parts = machine.workspace(size)
        scales = parts + size // (kv.head_dim + 2) * kv.head_dim
        out, counts = ptr(machine.address(args.act.values)), machine.address(work.counts)
        attending: tuple[Argument, ...] = (
            out, ptr(parts), ptr(scales), ptr(machine.address(args.q)), ptr(machine.address(kv.arena)),
            ptr(machine.address(table)), ptr(machine.address(work.work)), ptr(counts), ptr(self.sinks),
            i64(kv.block_stride), i64(kv.layer_offset), i32(table.shape[1]), i32(args.q.shape[1]), i32(width),
            i32(group), i32(args.window), f32(1.0), f32(args.soft_cap), ptr(self.value_scales),
            i32(shape.act_code), i32(block_bits(kv.block_size)),
        )  # fmt: skip
        calls = [Call(shape.kernel, (items, kv.num_kv_heads, 1), shape.threads, shape.shared_bytes, attending)]
        if merges:
            merging: tuple[Argument, ...] = (
                out, ptr(parts), ptr(scales), ptr(machine.address(work.merge)), ptr(counts + 4), ptr(self.sinks),
                i32(width), i32(group), ptr(self.value_scales),
            )  # fmt: skip
            grid = (merges, kv.num_kv_heads, MERGE_ROWS)
            calls.append(Call(shape.merge_kernel, grid, MERGE_THREADS, shape.merge_shared_bytes, merging))
        return calls
