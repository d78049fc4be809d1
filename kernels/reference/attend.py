"""Attention over the paged cache, one row and head at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..ops import ROWS, AttendArgs
from .act import write_act
from .kv import head_view, key_and_value_scales


@dataclass(frozen=True, slots=True)
class Attend:
    args: AttendArgs

    def run(self) -> None:
        args, kv, batch = self.args, self.args.kv, self.args.batch
        rows = int(batch.counts[ROWS])
        out = torch.empty((rows, args.num_heads, kv.head_dim), dtype=torch.float64)
        q = torch.from_numpy(args.q)[:rows, : args.num_heads * kv.head_dim].double()
        views = [head_view(kv, head) for head in range(kv.num_kv_heads)]
        per_kv, v_scales = args.num_heads // kv.num_kv_heads, key_and_value_scales(kv)[1].double()
        for row in range(rows):
            last = int(batch.position[row])
            first = max(0, last + 1 - args.window) if args.window else 0
            table = torch.from_numpy(batch.tables[kv.group])[int(batch.slot[row]), : last // kv.block_size + 1].long()
            for head in range(args.num_heads):
                k, v = (x[first : last + 1] for x in views[head // per_kv].read(table))
                query = q[row, head * kv.head_dim : (head + 1) * kv.head_dim]
                scores = k @ query
                if args.soft_cap:
                    scores = args.soft_cap * torch.tanh(scores / args.soft_cap)
                if args.sinks is not None:
                    scores = torch.cat((scores, torch.tensor([args.sinks[head]], dtype=torch.float64)))
                weights = torch.softmax(scores, dim=0)[: last + 1 - first]
                out[row, head] = weights @ v * v_scales[head // per_kv]
        write_act(args.act, out.reshape(rows, -1).float())


def build(args: AttendArgs) -> Attend:
    """An op for these buffers."""
    return Attend(args)
