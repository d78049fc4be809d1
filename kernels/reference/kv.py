"""One KV head of one layer in a paged arena: K transposed, V and their scales in every block, as tensors.

How values are rounded to the formats with scales and to float8 is said here once, for all ops of the reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..formats import FLOAT_BYTES, FP8_LARGEST, KVFormat
from ..ops import AnyArray, KVLayer, U8Array

_STORED: dict[str, type[np.generic]] = {
    "f32": np.float32, "f16": np.float16, "bf16": np.uint16, "fp8_e4m3": np.uint8, "fp8_e5m2": np.uint8,
    "int8": np.int8, "int16": np.int16,
}  # fmt: skip
_TORCH = {"bf16": torch.bfloat16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_TOP_CODES = {"int8": (127, 127), "int16": (8191, 2047)}  # of K and V
_SMALLEST = 1e-30  # as absmax: a scale is never 0
_F32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True, eq=False)
class HeadView:
    """Views of the arena; the scales are None if the format has none.

    keys    [blocks, head_dim / n, n, block_size];  values  [blocks, block_size / n, n, head_dim], where n values lie
            side by side: 2 in a format of pairs, else 1
    key_scales, value_scales  bfloat16 [blocks, block_size]
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    format: KVFormat

    def read(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(K, V), float64 [tokens, head_dim] each, of all positions in the blocks of the table."""
        head_dim = self.values.shape[-1]
        k = _pick(self.keys, table).permute(0, 3, 1, 2).reshape(-1, head_dim)
        v = _pick(self.values, table).reshape(-1, head_dim)
        if self.key_scales is not None and self.value_scales is not None:
            k = k * _pick(self.key_scales, table).reshape(-1, 1)
            v = v * _pick(self.value_scales, table).reshape(-1, 1)
        return k, v

    def write(self, block: int, inside: int, k: torch.Tensor, v: torch.Tensor, near_k: torch.Tensor) -> None:
        """Store K and V, float32 [head_dim] each, of position `inside` of the block.

        An 8-bit format has the values `near_k` in place of K, with the scale of K.
        """
        together = self.keys.shape[2]
        keys, values = self.keys[block, :, :, inside], self.values[block, inside // together, inside % together]
        if self.format.kind in FLOAT_BYTES:
            keys.copy_(k.view(-1, together))
            values.copy_(v)
            return
        broken = bool(k.isnan().any() or v.isnan().any())
        k, v, near_k = (x.where(~x.isnan(), 0.0) for x in (k, v, near_k))
        if self.key_scales is not None and self.value_scales is not None:
            tops = _TOP_CODES[self.format.kind]
            for x, near, codes, scales, top in (
                (k, near_k, keys, self.key_scales, tops[0]),
                (v, v, values, self.value_scales, tops[1]),
            ):
                scale = token_scale(x, top)
                codes.copy_(torch.round(near / scale).clamp(-top, top).view(codes.shape))
                scales[block, inside] = scale.to(torch.bfloat16)
            if broken:
                self.key_scales[block, inside] = torch.nan
            return
        limit = FP8_LARGEST[self.format.kind]
        k = near_k.clamp(-limit, limit)
        if broken:
            k[0] = torch.nan
        keys.copy_(k.view(-1, together))
        values.copy_(v.clamp(-limit, limit))

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the first tokens of one block to another."""
        self.keys[target, ..., :tokens] = self.keys[source, ..., :tokens]
        for inside in range(tokens):
            at = divmod(inside, self.keys.shape[2])
            self.values[(target, *at)] = self.values[(source, *at)]
        for scales in (self.key_scales, self.value_scales):
            if scales is not None:
                scales[target, :tokens] = scales[source, :tokens]


def key_and_value_scales(kv: KVLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer's scales of K and of V, float32 [kv_heads] each."""
    scales = torch.ones(2, kv.num_kv_heads) if kv.scales is None else torch.from_numpy(kv.scales)
    return scales[0], scales[1]


def token_scale(x: torch.Tensor, top: int = 127) -> torch.Tensor:
    """The scale of a K or V, float32 [head_dim] or of many [..., head_dim], up to code `top`: a bfloat16 as float32."""
    return _bfloat16_above(x.abs().amax(dim=-1).clamp(_SMALLEST, _F32_MAX) / top).float()


def within_range(kind: str, x: torch.Tensor) -> torch.Tensor:
    """Values without NaN, in fp8 cut off at the largest."""
    x = x.where(~x.isnan(), 0.0)
    return x if kind == "int8" else x.clamp(-FP8_LARGEST[kind], FP8_LARGEST[kind])


def as_stored(kind: str, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What values without NaN become in an 8-bit format, as float32; `scale` is theirs if the kind has any."""
    if kind == "int8":
        return torch.round(x / scale).clamp(-127, 127) * scale
    return within_range(kind, x).to(_TORCH[kind]).float()


def head_view(kv: KVLayer, head: int) -> HeadView:
    """One KV head of the layer."""
    return view_of(kv.arena, kv.block_stride, kv.layer_offset, head, kv.block_size, kv.head_dim, kv.format)


def view_of(
    arena: U8Array, stride: int, layer_offset: int, head: int, block_size: int, head_dim: int, format: KVFormat
) -> HeadView:
    """As `head_view`, from plain sizes."""
    blocks = arena[: arena.size // stride * stride].reshape(-1, stride)
    codes, half = block_size * head_dim * format.bytes_per_value, block_size * format.head_bytes(head_dim)
    first = layer_offset + head * 2 * half
    parts = [blocks[:, start : start + codes].view(_STORED[format.kind]) for start in (first, first + half)]
    assert all(np.shares_memory(part, arena) for part in parts)
    keys, values = (_tensor(part, format.kind) for part in parts)
    scales: list[torch.Tensor | None] = [None, None]
    if format.scale_bytes:
        ends = (first + half, first + 2 * half)
        scales = [_tensor(blocks[:, end - block_size * 2 : end].view(np.uint16), "bf16") for end in ends]
    together = 2 if format.pairs else 1
    return HeadView(
        keys.view(-1, head_dim // together, block_size, together).transpose(2, 3),
        values.view(-1, block_size // together, head_dim, together).transpose(2, 3),
        scales[0],
        scales[1],
        format,
    )


def latent_view(kv: KVLayer) -> torch.Tensor:
    """What is stored of every token in a layer of latents: [blocks, block_size, head_dim], sharing memory."""
    stride, size = kv.block_stride, kv.block_size * kv.head_dim * kv.format.bytes_per_value
    blocks = kv.arena[: kv.arena.size // stride * stride].reshape(-1, stride)
    part = blocks[:, kv.layer_offset : kv.layer_offset + size].view(_STORED[kv.format.kind])
    assert np.shares_memory(part, kv.arena)
    return _tensor(part, kv.format.kind).view(-1, kv.block_size, kv.head_dim)


def _tensor(values: AnyArray, kind: str) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    return tensor.view(_TORCH[kind]) if kind in _TORCH else tensor


def _pick(stored: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Blocks of the table, in float64; torch cannot index float8."""
    if stored.element_size() > 1:
        return stored[table].double()
    return stored.view(torch.uint8)[table].view(stored.dtype).double()


def _bfloat16_above(value: torch.Tensor) -> torch.Tensor:
    """The smallest bfloat16 not below each positive float32."""
    return ((value.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
