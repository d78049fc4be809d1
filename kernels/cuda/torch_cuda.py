"""The ops of torch_ops.py as launches of our kernels on tensors of a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..errors import UsageError
from ..formats import parse_weight_format
from ..ops import ATTEND_SPLIT
from . import linear as linears
from . import rows
from .arguments import Argument, f32, i32, i64, ptr
from .attend import (
    MERGE_ROWS,
    MERGE_THREADS,
    Queries,
    choose_split,
    compute_of,
    plan_attention,
    table_of_counts,
)
from .linear import Addresses, Linear
from .source import Kernel
from .tiles import choose_attend
from .types import block_bits, refuse_heads

ACTS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
CODES = {torch.float8_e4m3fn: "fp8_e4m3", torch.int8: "int8"}
_THREADS = 128


class Launches(Protocol):
    """What starts kernels: a `Launcher`, or an `Emulation` for tensors of a CPU."""

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        arguments: Sequence[Argument],
        /,
    ) -> object: ...


@dataclass(frozen=True, slots=True)
class CudaOps:
    """The ops on one GPU. Tensors have to be contiguous; each method is its op's implementation."""

    launcher: Launches
    arch: str
    processors: int

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        self._norm(out, x, None, weight, eps)
        return out

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out = torch.empty_like(x)
        self._norm(out, x, residual, weight, eps)
        return out

    def rms_norm_quantize(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (count, width), counts = _rows(x), _counts(x)
        codes = torch.empty_like(x, dtype=dtype)
        scales = x.new_empty(x.shape[:-1], dtype=torch.float32)
        kernel, threads = rows.rms_norm_quantize(ACTS[x.dtype], CODES[dtype], width, residual=False)
        arguments = (
            _p(codes), _p(scales), _p(x), _p(None), _p(weight), _p(counts), i32(width), f32(eps)
        )  # fmt: skip
        self.launcher.launch(kernel, (count, 1, 1), threads, threads // 16 * 4, arguments)
        return codes, scales

    def act_mul(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        (count, both), counts = _rows(x), _counts(x)
        width = both // 2
        out = x.new_empty((*x.shape[:-1], width))
        across = -(-width // (_THREADS * (16 // x.element_size())))
        arguments = _p(out), _p(x), _p(counts), i32(width)
        self.launcher.launch(rows.act_mul(ACTS[x.dtype], activation), (count, across, 1), _THREADS, 0, arguments)
        return out

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, format: str, outputs: int, bias: torch.Tensor | None
    ) -> torch.Tensor:
        count, inputs = _rows(x)
        layer = Linear(ACTS[x.dtype], parse_weight_format(format), outputs, inputs)
        reason = linears.refusal(layer)
        if reason is not None:
            raise UsageError(f"llmctl::linear: {reason}")
        # Rows of an even number of values, so that they can be written in pairs.
        y = x.new_empty((count, layer.width))
        deterministic = torch.are_deterministic_algorithms_enabled()
        sums = linears.linear_workspace(layer, count, self.processors, deterministic=deterministic)
        work = x.new_empty(max(sums, 1), dtype=torch.uint8)
        at = Addresses(
            y.data_ptr(), x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), 0, work.data_ptr()
        )
        for call in linears.linear_calls(layer, count, at, self.processors, deterministic=deterministic):
            self.launcher.launch(call.kernel, call.grid, call.threads, call.shared_bytes, call.arguments)
        return y[:, :outputs].reshape(*x.shape[:-1], outputs)

    def store_kv(
        self,
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
        (count, heads, dim), counts = k.shape, _counts(k[..., 0, :])
        _check_heads("store_kv", dim, block_size)
        kernel = rows.rope_store(ACTS[k.dtype], kv_format, dim)
        nothing = _p(None)
        arguments = (
            nothing, _p(k), _p(v), _p(arena), _p(tables), _p(slots), _p(positions), _p(counts),
            *(nothing,) * 9, i64(arena.stride(0)), i64(layer_offset), i32(tables.shape[1]), i32(0), i32(heads),
            i32(0), i32(heads * dim), i32(0), i32(0), f32(0.0), f32(1.0), i32(block_bits(block_size)),
        )  # fmt: skip
        self.launcher.launch(kernel, (count, -(-heads // rows.HEADS_PER_BLOCK), 1), _THREADS, 0, arguments)

    def paged_attention(
        self,
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
        _, heads, dim = q.shape
        _check_heads("paged_attention", dim, block_size)
        act, group = ACTS[q.dtype], heads // kv_heads
        deterministic = torch.are_deterministic_algorithms_enabled()
        shape = choose_attend(
            self.arch, act, compute_of(act, kv_format), kv_format, dim, soft_cap=soft_cap != 0,
            prefill=not deterministic and max(queries) > 1,
        )  # fmt: skip
        firsts = [sum(queries[:i]) for i in range(len(queries))]
        sequences = [Queries(slot, *one) for slot, one in enumerate(zip(firsts, queries, contexts, strict=True))]
        sizes = {"group": group, "rows": shape.rows, "tile": shape.tile, "window": window}
        split = ATTEND_SPLIT
        if not deterministic:
            split = choose_split(sequences, kv_heads=kv_heads, processors=self.processors, **sizes)
        plan = plan_attention(sequences, split=split, **sizes)
        out, parts = torch.empty_like(q), max(plan.parts, 1) * kv_heads * shape.rows
        part_values, part_scales = (q.new_empty(parts * n, dtype=torch.float32) for n in (dim, 2))
        work, merge, counts = (
            torch.from_numpy(x.view("int32").copy()).to(q.device)
            for x in (plan.work, plan.merge, table_of_counts(plan))
        )
        arguments = (
            _p(out), _p(part_values), _p(part_scales), _p(q), _p(arena), _p(tables), _p(work), _p(counts), _p(sinks),
            i64(arena.stride(0)), i64(layer_offset), i32(tables.shape[1]), i32(heads * dim), i32(heads * dim),
            i32(group), i32(window), f32(scale), f32(soft_cap), _p(value_scales), i32(shape.act_code),
            i32(block_bits(block_size)),
        )  # fmt: skip
        self.launcher.launch(shape.kernel, (len(plan.work), kv_heads, 1), shape.threads, shape.shared_bytes, arguments)
        if plan.parts:
            merging = (
                _p(out), _p(part_values), _p(part_scales), _p(merge), _p(counts[1:]), _p(sinks), i32(heads * dim),
                i32(group), _p(value_scales),
            )  # fmt: skip
            grid = (len(plan.merge), kv_heads, MERGE_ROWS)
            self.launcher.launch(shape.merge_kernel, grid, MERGE_THREADS, shape.merge_shared_bytes, merging)
        return out

    def _norm(
        self, out: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> None:
        (count, width), counts = _rows(x), _counts(x)
        kernel, threads = rows.rms_norm(ACTS[x.dtype], width, residual=residual is not None)
        arguments = (
            _p(out), _p(x), _p(residual), _p(weight), _p(None), _p(counts), i32(width), f32(eps)
        )  # fmt: skip
        self.launcher.launch(kernel, (count, 1, 1), threads, threads // 32 * 4, arguments)


def _check_heads(name: str, head_dim: int, block_size: int) -> None:
    if (reason := refuse_heads(head_dim, block_size)) is not None:
        raise UsageError(f"llmctl::{name}: {reason}")


def _rows(x: torch.Tensor) -> tuple[int, int]:
    """(rows, width) of [..., width]."""
    return x.numel() // x.shape[-1], x.shape[-1]


def _counts(x: torch.Tensor) -> torch.Tensor:
    """How many rows there are, where kernels read it: to be held until they are launched."""
    return torch.full((1,), _rows(x)[0], dtype=torch.int32, device=x.device)


def _p(tensor: torch.Tensor | None) -> ptr:
    return ptr(0 if tensor is None else tensor.data_ptr())
