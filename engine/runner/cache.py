"""The KV cache of one device: an arena per KV group, cut into blocks.

A block is one contiguous run of bytes that holds `block_size` positions for all layers of its group, so that copying,
swapping or exporting a block is one stretch of memory. Blocks are zero when the arena is made.
"""

from __future__ import annotations

import contextlib
import itertools
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
    formats: tuple[KVFormat, ...]  # of each layer

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each layer begins in a block, in bytes, and where the last one ends."""
        sizes = (2 * self.num_kv_heads * self.block_size * kv.head_bytes(self.head_dim) for kv in self.formats)
        return tuple(itertools.accumulate(sizes, initial=0))

    @property
    def bytes_per_block(self) -> int:
        return self.offsets[-1]


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
            arena, stride, offset, group.block_size, group.num_kv_heads, group.head_dim, form, index
        )
        for layer, form, offset in zip(group.layers, group.formats, group.offsets[:-1], strict=True)
    }  # fmt: skip
    return GroupCache(group, num_blocks, arena, layers, _block_copy(arena, group, kernels))


def _block_copy(arena: U8Array, group: KVGroup, kernels: str) -> KVCopy:
    """One copy for each run of layers of the same format, together."""
    copies = []
    place = 0
    for form, run in itertools.groupby(group.formats):
        count = len(tuple(run))
        args = KVCopyArgs(
            arena, group.bytes_per_block, count, group.block_size, group.num_kv_heads, group.head_dim, form,
            group.offsets[place],
        )  # fmt: skip
        copies.append(registry.bind("kv_copy", args, kernels=kernels))
        place += count
    return copies[0] if len(copies) == 1 else _Copies(tuple(copies))


@dataclass(frozen=True, slots=True)
class _Copies:
    parts: tuple[KVCopy, ...]

    def __call__(self, source: int, target: int, tokens: int) -> None:
        for part in self.parts:
            part(source, target, tokens)


def _zero_pages(size: int) -> mmap.mmap:
    """Anonymous zero pages, taken from the system when first written; large ones where it has them.

    Attention reads a few KiB here and there: with small pages it waits for address translation.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
