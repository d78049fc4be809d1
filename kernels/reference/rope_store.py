"""Query and key norm, rotation, and storing K and V into the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..ops import ROWS, F32Array, KeySteering, RopeStoreArgs
from .kv import as_stored, head_view, key_and_value_scales, token_scale, within_range
from .norm import rms_norm

_STEER_BELOW = 1e18  # no sum of steering can overflow below it


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
        k_scale, v_scale = key_and_value_scales(args.kv)
        per_query = k_scale.repeat_interleave(args.num_heads // args.kv.num_kv_heads)
        q.copy_(self._rotate(q, positions) * (args.q_scale * per_query)[:, None])
        k.copy_(self._rotate(k, positions) / k_scale[:, None])
        if args.kv.steering is not None and args.kv.format.bytes_per_value == 1:
            self._level(q, k, args.kv.steering)
        self._store(k, v if args.kv.scales is None else v * (1 / v_scale)[:, None], rows)

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

    def _level(self, q: torch.Tensor, k: torch.Tensor, steering: KeySteering) -> None:
        """The centre off K, and levels from K to queries; in float32, as every kernel has to do it."""
        if steering.centre is not None:
            k -= torch.from_numpy(steering.centre)
        if steering.level is not None:
            level = torch.from_numpy(steering.level).repeat(1, 2)
            k /= level
            q *= level.repeat_interleave(self.args.num_heads // self.args.kv.num_kv_heads, dim=0)

    def _store(self, k: torch.Tensor, v: torch.Tensor, rows: int) -> None:
        batch, kv = self.args.batch, self.args.kv
        near = k
        if kv.steering is not None and kv.format.bytes_per_value == 1:
            near = self._steered(k, kv.steering, torch.from_numpy(batch.position[:rows]).long())
        for head in range(kv.num_kv_heads):
            view = head_view(kv, head)
            for row in range(rows):
                index, inside = divmod(int(batch.position[row]), kv.block_size)
                block = int(batch.tables[kv.group][batch.slot[row], index])
                view.write(block, inside, k[row, head], v[row, head], near[row, head])

    def _steered(self, k: torch.Tensor, steering: KeySteering, positions: torch.Tensor) -> torch.Tensor:
        """K as it is to be stored, values of the format where it is steered; in float32, operation by operation."""
        kind, half, steered = self.args.kv.format.kind, self.args.kv.head_dim // 2, k.clone()
        shape = len(k), half
        turns = (
            (torch.ones(shape), torch.zeros(shape))
            if self.args.cos is None or self.args.sin is None
            else (torch.from_numpy(self.args.cos)[positions], torch.from_numpy(self.args.sin)[positions])
        )
        for head in range(self.args.kv.num_kv_heads):
            key = within_range(kind, k[:, head])
            scale = token_scale(key)
            made_good = torch.zeros(2, half, len(key))  # of each pair, turned back: what earlier errors want
            for place, d in enumerate(steering.order[head].tolist()):
                cos, sin = (turn[:, d] for turn in turns)
                a, b = key[:, d], key[:, d + half]
                first, second = made_good[:, place]
                stored_a = as_stored(kind, a - (first * cos - second * sin), scale)
                stored_b = as_stored(kind, b - (second * cos + first * sin), scale)
                steered[:, head, d], steered[:, head, d + half] = stored_a, stored_b
                off_a, off_b = stored_a - a, stored_b - b
                off = off_a * cos + off_b * sin, off_b * cos - off_a * sin
                rows = torch.from_numpy(steering.follow[head, place, :, :half])[:, :, None]
                for target in (0, 1):
                    made_good[target] += off[0] * rows[2 * target] + off[1] * rows[2 * target + 1]
        fine = ~k.isnan().any(dim=2) & (k.abs().amax(dim=2) < _STEER_BELOW if kind == "int8" else True)
        return torch.where(fine[:, :, None], steered, k)


def build(args: RopeStoreArgs) -> RopeStore:
    """An op for these buffers."""
    return RopeStore(args)
