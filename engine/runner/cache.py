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
from ..kv_groups import KVGroup
from ..models.arch import DecoderSpec


@dataclass(frozen=True, slots=True)
class BlockShape:
    """What a block holds of one layer: K and V of every head, or the latents, which are a head without values."""

    block_size: int
    num_kv_heads: int
    head_dim: int
    format: KVFormat
    latent: bool = False

    @property
    def bytes(self) -> int:
        return (1 if self.latent else 2) * self.num_kv_heads * self.block_size * self.format.head_bytes(self.head_dim)


@dataclass(frozen=True, slots=True, eq=False)
class GroupCache:
    """One group's arena, each layer's view of it, and the block copy bound to it."""

    group: KVGroup
    block_size: int
    bytes_per_block: int
    arena: U8Array
    layers: dict[int, KVLayer]
    copy: KVCopy


def allocate(index: int, group: KVGroup, shape: BlockShape, kernels: str) -> GroupCache:
    """The arena of KV group `index`."""
    stride = shape.bytes * len(group.layers)
    arena = np.frombuffer(_zero_pages(group.num_blocks * stride), np.uint8) if stride else np.zeros(0, np.uint8)
    sizes = shape.block_size, shape.num_kv_heads, shape.head_dim, shape.format
    layers = {
        layer: KVLayer(arena, stride, place * shape.bytes, *sizes, index) for place, layer in enumerate(group.layers)
    }
    if not stride:
        return GroupCache(group, shape.block_size, stride, arena, layers, _copy_nothing)
    if shape.latent:
        return GroupCache(group, shape.block_size, stride, arena, layers, _latent_copy(arena, stride, shape))
    copy = registry.bind("kv_copy", KVCopyArgs(arena, stride, len(group.layers), *sizes), kernels=kernels)
    return GroupCache(group, shape.block_size, stride, arena, layers, copy)


def block_shape(spec: DecoderSpec, block_size: int, format: KVFormat) -> BlockShape:
    """What a block of this model holds of a layer."""
    if spec.latent is not None:
        return BlockShape(block_size, 1, spec.latent.kv_rank + spec.latent.rope_dim, format, latent=True)
    return BlockShape(block_size, spec.num_kv_heads, spec.head_dim, format)


def _latent_copy(arena: U8Array, stride: int, shape: BlockShape) -> KVCopy:
    """The block copy of a group of latents, whose tokens are rows in all of its layers."""
    token = shape.head_dim * shape.format.bytes_per_value
    blocks = arena.reshape(-1, stride // shape.bytes, shape.block_size, token)

    def copy(source: int, target: int, tokens: int) -> None:
        blocks[target, :, :tokens] = blocks[source, :, :tokens]

    return copy


def _copy_nothing(source: int, target: int, tokens: int) -> None:
    """The block copy of a group without layers."""


def _zero_pages(size: int) -> mmap.mmap:
    """Anonymous zero pages, taken from the system when first written; large ones where it has them.

    Attention reads a few KiB here and there: with small pages it waits for address translation.
    """
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
