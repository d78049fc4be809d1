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
from ..kv_groups import KVGroup
from ..models.arch import DecoderSpec


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What a block holds of one layer: K and V of every head, or the latents, which are a head without values."""

    block_size: int
    num_kv_heads: int
    head_dim: int
    formats: tuple[KVFormat, ...]  # of each layer
    latent: bool = False

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each layer begins in a block, in bytes, and where the last one ends."""
        values = (1 if self.latent else 2) * self.num_kv_heads * self.block_size
        return tuple(itertools.accumulate((values * kv.head_bytes(self.head_dim) for kv in self.formats), initial=0))


@dataclass(frozen=True, slots=True, eq=False)
class GroupCache:
    """The arena of group `index`, each layer's view of it, and the block copy bound to it."""

    index: int
    group: KVGroup
    block_size: int
    bytes_per_block: int
    arena: U8Array
    layers: dict[int, KVLayer]
    copy: KVCopy


def allocate(index: int, group: KVGroup, shape: BlockShape, kernels: str) -> GroupCache:
    """The arena of KV group `index`, whose layers have the formats of `shape`."""
    stride = shape.offsets[-1]
    size = group.num_blocks * stride
    if kernels == registry.CUDA:
        arena = registry.reserve(size)
    else:
        arena = np.frombuffer(_zero_pages(size), np.uint8) if stride else np.zeros(0, np.uint8)
    layers = {
        layer: KVLayer(
            arena, stride, offset, shape.block_size, shape.num_kv_heads, shape.head_dim, form, index
        )
        for layer, form, offset in zip(group.layers, shape.formats, shape.offsets[:-1], strict=True)
    }  # fmt: skip
    return GroupCache(index, group, shape.block_size, stride, arena, layers, _block_copy(arena, shape, kernels))


def block_shape(spec: DecoderSpec, group: KVGroup, block_size: int, kinds: tuple[str, ...]) -> BlockShape:
    """What a block of this group holds; `kinds` are the KV formats of all of the model's layers."""
    formats = tuple(KVFormat(kinds[layer]) for layer in group.layers)
    if spec.latent is not None:
        return BlockShape(block_size, 1, spec.latent.kv_rank + spec.latent.rope_dim, formats, latent=True)
    return BlockShape(block_size, spec.num_kv_heads, spec.head_dim, formats)


def _block_copy(arena: U8Array, shape: BlockShape, kernels: str) -> KVCopy:
    """One copy for each run of layers of the same format, together."""
    copies: list[KVCopy] = []
    place, stride = 0, shape.offsets[-1]
    for form, run in itertools.groupby(shape.formats):
        count = len(tuple(run))
        first, end = shape.offsets[place], shape.offsets[place + count]
        if shape.latent and kernels != registry.CUDA:
            part = arena.reshape(-1, stride)[:, first:end]
            copies.append(_LatentCopy(part, count, shape.block_size))
        else:
            args = KVCopyArgs(
                arena, stride, count, shape.block_size, shape.num_kv_heads, shape.head_dim, form, first,
                shape.latent,
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


@dataclass(frozen=True, slots=True, eq=False)
class _LatentCopy:
    """The copy for layers of latents, whose tokens are rows. `blocks` [blocks, bytes of these layers]."""

    blocks: U8Array
    num_layers: int
    block_size: int

    def __call__(self, source: int, target: int, tokens: int) -> None:
        size = self.blocks.shape[1] // self.num_layers
        used = size // self.block_size * tokens
        for start in range(0, self.blocks.shape[1], size):
            self.blocks[target, start : start + used] = self.blocks[source, start : start + used]


def _zero_pages(size: int) -> mmap.mmap:
    """Anonymous zero pages, taken from the system when first written; large ones where it has them.

    Attention reads a few KiB here and there: with small pages it waits for address translation.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
