"""Copying the first tokens of one KV block to another."""

from __future__ import annotations

from dataclasses import dataclass

from ..ops import KVCopyArgs
from .kv import block_views


@dataclass(frozen=True, slots=True)
class KVCopy:
    args: KVCopyArgs

    def __call__(self, source: int, target: int, tokens: int) -> None:
        args = self.args
        layer_bytes = args.num_kv_heads * 2 * args.head_dim * args.block_size * args.format.bytes_per_value
        for layer in range(args.num_layers):
            for head in range(args.num_kv_heads):
                k, v = block_views(
                    args.arena,
                    args.block_stride,
                    layer * layer_bytes,
                    head,
                    args.block_size,
                    args.head_dim,
                    args.format,
                )
                k[target, :, :tokens] = k[source, :, :tokens]
                v[target, :tokens] = v[source, :tokens]


def build(args: KVCopyArgs) -> KVCopy:
    """A copier for this arena."""
    return KVCopy(args)
