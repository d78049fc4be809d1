"""The KV cache of one device: an arena per KV group, cut into blocks.

A block is one contiguous run of bytes that holds `block_size` positions for all layers of its group, so that copying,
swapping or exporting a block is one stretch of memory. Blocks are zero when the arena is made.
"""

from __future__ import annotations

import contextlib
import mmap
from dataclasses import dataclass

import numpy as np

from ...kernels import registry
from ...kernels.formats import KVFormat
from ...kernels.ops import KVCopy, KVCopyArgs, KVLayer, U8Array


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table. `kind` says which positions a sequence keeps: full (all of them)."""

    kind: str
    layers: tuple[int, ...]
    block_size: int
    num_kv_heads: int
    head_dim: int
    format: KVFormat

    @property
    def bytes_per_layer(self) -> int:
        return 2 * self.num_kv_heads * self.block_size * self.format.head_bytes(self.head_dim)

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_layer * len(self.layers)


@dataclass(frozen=True, slots=True, eq=False)
class GroupCache:
    """One group's arena of `num_blocks` blocks, each layer's view of it, and the block copy bound to it."""

    group: KVGroup
    num_blocks: int
    arena: U8Array
    layers: dict[int, KVLayer]
    copy: KVCopy


def allocate(index: int, group: KVGroup, num_blocks: int, kernels: str) -> GroupCache:
    """The arena of KV group `index`."""
    stride = group.bytes_per_block
    arena = np.frombuffer(_zero_pages(num_blocks * stride), np.uint8)
    layers = {
        layer: KVLayer(
            arena, stride, place * group.bytes_per_layer, group.block_size, group.num_kv_heads, group.head_dim,
            group.format, index,
        )
        for place, layer in enumerate(group.layers)
    }  # fmt: skip
    copy = registry.bind(
        "kv_copy",
        KVCopyArgs(
            arena, stride, len(group.layers), group.block_size, group.num_kv_heads, group.head_dim, group.format
        ),
        kernels=kernels,
    )
    return GroupCache(group, num_blocks, arena, layers, copy)


def _zero_pages(size: int) -> mmap.mmap:
    """Anonymous zero pages, taken from the system when first written; large ones where it has them.

    Attention reads a few KiB here and there: with small pages it waits for address translation.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
