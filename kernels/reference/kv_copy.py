"""Copying the first tokens of one KV block to another."""

from __future__ import annotations

from dataclasses import dataclass

from ..ops import KVCopyArgs
from .kv import view_of


@dataclass(frozen=True, slots=True)
class KVCopy:
    args: KVCopyArgs

    def __call__(self, source: int, target: int, tokens: int) -> None:
        args = self.args
        layer_bytes = args.num_kv_heads * 2 * args.block_size * args.format.head_bytes(args.head_dim)
        for layer in range(args.num_layers):
            for head in range(args.num_kv_heads):
                view = view_of(
                    args.arena,
                    args.block_stride,
                    args.layer_offset + layer * layer_bytes,
                    head,
                    args.block_size,
                    args.head_dim,
                    args.format,
                )
                view.copy(source, target, tokens)


def build(args: KVCopyArgs) -> KVCopy:
    """A copier for this arena."""
    return KVCopy(args)
