"""Views of a paged KV arena: K transposed and V of one layer and KV head, in every block."""

from __future__ import annotations

import numpy as np
import torch

from ..formats import KVFormat
from ..ops import AnyArray, KVLayer, U8Array

_STORED: dict[str, type[np.generic]] = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}


def head_views(kv: KVLayer, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(K [blocks, head_dim, block_size], V [blocks, block_size, head_dim]) of one KV head: views of the arena."""
    return block_views(kv.arena, kv.block_stride, kv.layer_offset, head, kv.block_size, kv.head_dim, kv.format)


def block_views(
    arena: U8Array, stride: int, layer_offset: int, head: int, block_size: int, head_dim: int, format: KVFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `head_views`, from plain sizes."""
    blocks = arena[: arena.size // stride * stride].reshape(-1, stride)
    size = head_dim * block_size * format.bytes_per_value
    first = layer_offset + head * 2 * size
    k: AnyArray = blocks[:, first : first + size].view(_STORED[format.kind])
    v: AnyArray = blocks[:, first + size : first + 2 * size].view(_STORED[format.kind])
    k = k.reshape(-1, head_dim, block_size)
    v = v.reshape(-1, block_size, head_dim)
    assert np.shares_memory(k, arena) and np.shares_memory(v, arena)
    return _tensor(k, format), _tensor(v, format)


def _tensor(values: AnyArray, format: KVFormat) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    return tensor.view(torch.bfloat16) if format.kind == "bf16" else tensor
