"""The ops of torch_ops.py in plain torch, for tensors of a CPU: what the kernels mean, not how fast they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..formats import FP8_LARGEST, KVFormat, parse_weight_format
from . import pack

_KV = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8,
}  # fmt: skip


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _normed(x, weight, eps).to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    residual.copy_(residual.float() + x.float())
    return rms_norm(residual, weight, eps)


def rms_norm_quantize(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    normed, top = _normed(x, weight, eps), 127.0 if dtype == torch.int8 else 448.0
    scales = normed.abs().amax(-1).clamp(min=1e-30) / top
    codes = normed / scales[..., None]
    if dtype == torch.int8:
        codes = codes.round()
    return codes.clamp(-top, top).to(dtype), scales


def act_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = x.float().chunk(2, -1)
    if activation == "relu2":
        active = torch.relu(gate).square()
    elif activation == "silu":
        active = torch.nn.functional.silu(gate)
    else:
        active = torch.nn.functional.gelu(gate, approximate="tanh")
    return (active * up).to(x.dtype)


def linear(x: torch.Tensor, weight: torch.Tensor, format: str, outputs: int, bias: torch.Tensor | None) -> torch.Tensor:
    values = pack.values(parse_weight_format(format), weight.numpy(), outputs, x.shape[-1])
    y = x.float() @ torch.from_numpy(values).T
    return (y if bias is None else y + bias[:outputs].float()).to(x.dtype)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    arena: torch.Tensor,
    tables: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    kv_format: str,
    block_size: int,
    layer_offset: int,
) -> None:
    rows, heads, dim = k.shape
    format = KVFormat(kv_format)
    for which, x in enumerate((k, v)):
        codes, scales = _stored(kv_format, x.float())
        raw = codes.view(torch.uint8).reshape(rows, heads, -1)
        for row in range(rows):
            block, inside = divmod(int(positions[row]), block_size)
            bytes_of = arena[int(tables[slots[row], block])]
            for head in range(heads):
                start = layer_offset + (2 * head + which) * block_size * format.head_bytes(dim)
                at = start + inside * raw.shape[2]
                bytes_of[at : at + raw.shape[2]] = raw[row, head]
                if scales is not None:
                    at = start + block_size * raw.shape[2] + 2 * inside
                    bytes_of[at : at + 2] = scales[row, head : head + 1].view(torch.uint8)


def paged_attention(
    q: torch.Tensor,
    arena: torch.Tensor,
    tables: torch.Tensor,
    queries: Sequence[int],
    contexts: Sequence[int],
    kv_format: str,
    kv_heads: int,
    block_size: int,
    scale: float,
    layer_offset: int = 0,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    out, first = torch.empty_like(q), 0
    for slot, (count, before) in enumerate(zip(queries, contexts, strict=True)):
        length = count + before
        blocks = arena[tables[slot, : -(-length // block_size)].long()]
        k, v = (
            _read(blocks, which, kv_format, kv_heads, q.shape[2], block_size, layer_offset)[:, :length]
            for which in (0, 1)
        )
        if value_scales is not None:
            v = v * value_scales[:, None, None]
        group = q.shape[1] // kv_heads
        k, v = (x.repeat_interleave(group, 0) for x in (k, v))
        scores = torch.einsum("qhd,hkd->hqk", q[first : first + count].float(), k) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        position, token = before + torch.arange(count)[:, None], torch.arange(length)[None]
        seen = (token <= position) & (token > position - window if window else token >= 0)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, count, 1)), -1)
        weights = torch.softmax(scores, -1)[..., :length]
        out[first : first + count] = torch.einsum("hqk,hkd->qhd", weights, v).to(q.dtype)
        first += count
    return out


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float32, not rounded yet."""
    values = x.float()
    return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight.float()


def _stored(kind: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(codes, bfloat16 scales if the format has any) of float32 [rows, heads, head_dim]."""
    if kind in FP8_LARGEST:
        return x.clamp(-FP8_LARGEST[kind], FP8_LARGEST[kind]).to(_KV[kind]), None
    if kind != "int8":
        return x.to(_KV[kind]), None
    exact = x.abs().amax(-1).clamp(min=1e-30) / 127
    scales = (exact.view(torch.int32) + 0xFFFF >> 16).to(torch.int16).view(torch.bfloat16)
    return torch.round(x / scales.float()[..., None]).clamp(-127, 127).to(torch.int8), scales


def _read(
    blocks: torch.Tensor, which: int, kind: str, heads: int, dim: int, block_size: int, layer_offset: int
) -> torch.Tensor:
    """K (0) or V (1) of the blocks, float32 [heads, tokens, head_dim]."""
    half, codes = block_size * KVFormat(kind).head_bytes(dim), block_size * dim * KVFormat(kind).bytes_per_value
    every = []
    for head in range(heads):
        part = blocks[:, layer_offset + (2 * head + which) * half :][:, :half].contiguous()
        values = part[:, :codes].contiguous().view(_KV[kind]).float().reshape(-1, block_size, dim)
        if kind == "int8":
            values = values * part[:, codes:].contiguous().view(torch.bfloat16).float()[..., None]
        every.append(values.reshape(-1, dim))
    return torch.stack(every)
