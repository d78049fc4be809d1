"""Multi-head latent attention: the store of latents, and attention on them as they are stored.

Where a key would be `up` times a latent, its product with a query is the latent's with `up` transposed times the query;
and so for values. Nothing is expanded for each position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..ops import ROWS, LatentArgs
from .act import write_act
from .kv import latent_view
from .norm import rms_norm
from .weight import dequantize


@dataclass(frozen=True, slots=True, eq=False)
class Latent:
    """`up_keys` [heads, nope_dim, rank] and `up_values` [heads, value_dim, rank] are the parts of `up`, in float64."""

    args: LatentArgs
    up_keys: torch.Tensor
    up_values: torch.Tensor

    def run(self) -> None:
        args, kv, batch = self.args, self.args.kv, self.args.batch
        rows = int(batch.counts[ROWS])
        rank, heads = args.up.k, args.num_heads
        rope_dim = kv.head_dim - rank
        stored = latent_view(kv)
        positions = torch.from_numpy(batch.position[:rows]).long()
        given = torch.from_numpy(args.latent)[:rows, : kv.head_dim]
        latents = rms_norm(given[:, :rank], torch.tensor(args.kv_norm), args.norm_eps)
        keys = self._rotate(given[:, rank:], positions).float()
        q = torch.from_numpy(args.q)[:rows, : heads * (args.nope_dim + rope_dim)].double().view(rows, heads, -1)
        turned = self._rotate(q[:, :, args.nope_dim :], positions[:, None])
        for row in range(rows):
            index, inside = divmod(int(positions[row]), kv.block_size)
            block = int(batch.tables[kv.group][batch.slot[row], index])
            stored[block, inside] = torch.cat((latents[row], keys[row])).to(stored.dtype)
        out = torch.empty((rows, heads, args.value_dim), dtype=torch.float64)
        for row in range(rows):
            last = int(positions[row])
            table = torch.from_numpy(batch.tables[kv.group])[int(batch.slot[row]), : last // kv.block_size + 1].long()
            seen = stored[table].reshape(-1, kv.head_dim)[: last + 1].double()
            for head in range(heads):
                query = torch.cat((q[row, head, : args.nope_dim] @ self.up_keys[head], turned[row, head]))
                weights = torch.softmax(seen @ query * args.q_scale, dim=0)
                out[row, head] = self.up_values[head] @ (weights @ seen[:, :rank])
        write_act(args.act, out.reshape(rows, -1).float())

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[..., rope_dim] rotated, in float64; pairs stand apart afterwards, however they stood before."""
        x = x.double()
        a, b = (x[..., 0::2], x[..., 1::2]) if self.args.interleaved else x.chunk(2, dim=-1)
        cos, sin = (torch.from_numpy(table)[positions].double() for table in (self.args.cos, self.args.sin))
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def build(args: LatentArgs) -> Latent:
    """An op for these buffers. It keeps the values of `up` in float64."""
    values = dequantize(args.up).double()
    if args.up.order is not None:
        packed, values = values, torch.empty_like(values)
        values[:, torch.from_numpy(args.up.order).long()] = packed
    parts = values.view(args.num_heads, args.nope_dim + args.value_dim, args.up.k)
    return Latent(args, parts[:, : args.nope_dim], parts[:, args.nope_dim :])
