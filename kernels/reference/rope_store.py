"""Query and key norm, rotation, and storing K and V into the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..ops import ROWS, F32Array, RopeStoreArgs
from .kv import head_view
from .norm import rms_norm


@dataclass(frozen=True, slots=True)
class RopeStore:
    args: RopeStoreArgs

    def run(self) -> None:
        args = self.args
        rows = int(args.batch.counts[ROWS])
        positions = torch.from_numpy(args.batch.position[:rows]).long()
        q = self._heads(args.q, rows, args.num_heads)
        k = self._heads(args.k, rows, args.kv.num_kv_heads)
        v = self._heads(args.v, rows, args.kv.num_kv_heads)
        if args.q_norm is not None:
            q.copy_(rms_norm(q, torch.from_numpy(args.q_norm), args.norm_eps))
        if args.k_norm is not None:
            k.copy_(rms_norm(k, torch.from_numpy(args.k_norm), args.norm_eps))
        q.copy_(self._rotate(q, positions) * args.q_scale)
        k.copy_(self._rotate(k, positions))
        self._store(k, v, rows)

    def _heads(self, rows_of: F32Array, rows: int, heads: int) -> torch.Tensor:
        """The rows in use as [rows, heads, head_dim], sharing memory."""
        width = heads * self.args.kv.head_dim
        return torch.from_numpy(rows_of)[:rows, :width].view(rows, heads, self.args.kv.head_dim)

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.args.cos is None or self.args.sin is None:
            return x.double()
        cos = torch.from_numpy(self.args.cos)[positions].double()[:, None, :]
        sin = torch.from_numpy(self.args.sin)[positions].double()[:, None, :]
        a, b = x.double().chunk(2, dim=2)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=2)

    def _store(self, k: torch.Tensor, v: torch.Tensor, rows: int) -> None:
        batch, kv = self.args.batch, self.args.kv
        for head in range(kv.num_kv_heads):
            view = head_view(kv, head)
            for row in range(rows):
                index, inside = divmod(int(batch.position[row]), kv.block_size)
                block = int(batch.tables[kv.group][batch.slot[row], index])
                view.write(block, inside, k[row, head], v[row, head])


def build(args: RopeStoreArgs) -> RopeStore:
    """An op for these buffers."""
    return RopeStore(args)
