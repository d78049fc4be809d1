"""Attention of one layer on a machine: its launches for the work that a step's lists hold."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ..ops import ROWS, AttendArgs
from .attend import MERGE_ROWS, MERGE_THREADS, AttendShape
from .call import Argument, Call
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
        out, counts = _p(machine.address(args.act.values)), machine.address(work.counts)
        attending: tuple[Argument, ...] = (
            out, _p(parts), _p(scales), _p(machine.address(args.q)), _p(machine.address(kv.arena)),
            _p(machine.address(table)), _p(machine.address(work.work)), _p(counts), _p(self.sinks),
            _l(kv.block_stride), _l(kv.layer_offset), _i(table.shape[1]), _i(args.q.shape[1]), _i(width), _i(group),
            _i(args.window), ctypes.c_float(1.0), ctypes.c_float(args.soft_cap), _p(self.value_scales),
            _i(shape.act_code), _i(block_bits(kv.block_size)),
        )  # fmt: skip
        calls = [Call(shape.kernel, (items, kv.num_kv_heads, 1), shape.threads, shape.shared_bytes, attending)]
        if merges:
            merging: tuple[Argument, ...] = (
                out, _p(parts), _p(scales), _p(machine.address(work.merge)), _p(counts + 4), _p(self.sinks),
                _i(width), _i(group), _p(self.value_scales),
            )  # fmt: skip
            grid = (merges, kv.num_kv_heads, MERGE_ROWS)
            calls.append(Call(shape.merge_kernel, grid, MERGE_THREADS, shape.merge_shared_bytes, merging))
        return calls


def _p(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def _i(value: int) -> ctypes.c_int32:
    return ctypes.c_int32(value)


def _l(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)
