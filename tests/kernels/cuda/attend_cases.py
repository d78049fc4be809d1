"""Problems for attention: made from a seed, answered in float64, and run by whatever launches kernels."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field

import torch

from llmctl.kernels.cuda.attend import (
    MERGE_ROWS,
    MERGE_THREADS,
    AttendShape,
    Queries,
    plan_attention,
    table_of_counts,
)
from llmctl.kernels.cuda.types import block_bits

TORCH = {
    "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8,
}  # fmt: skip
# max |y - y64| over the largest sum of |a||b|, a row being one query's outputs of all heads; tf32 rounds operands to 11
# bits, as float16 does.
BOUNDS = {"f16": 5e-4, "bf16": 4e-3, "f32": 1e-6, "tf32": 1e-3}
# Without fine weights they are rounded to what the tensor cores multiply, too: half of its last bit more.
ROUNDED_WEIGHTS = {"f16": 2.0**-11, "bf16": 2.0**-8}
# What rounding does to results near zero: half of the smallest number that an output can hold; in float32, whose
# operands are sums of two tf32, the last bit that those hold of a denormal.
LEAST = {"f16": 2.0**-25, "bf16": 2.0**-134, "f32": 2.0**-136}


@dataclass(frozen=True)
class Problem:
    """sequences: (queries, context before them) of each. A window or a soft cap of 0 is none."""

    shape: AttendShape
    sequences: tuple[tuple[int, int], ...]
    kv_heads: int
    group: int
    split: int
    window: int = 0
    soft_cap: float = 0.0
    distribution: str = "normal"
    seed: int = 0
    block: int = 16
    sinks: bool = False

    @property
    def name(self) -> str:
        shape = self.shape
        words = [
            word
            for has, word in (
                (self.window, "window"), (shape.soft_cap, "cap"), (self.sinks, "sinks"), (shape.fine, "fine")
            )
            if has
        ]  # fmt: skip
        kind = "prefill" if shape.warps_m > 1 else "decode"
        return "-".join(
            (
                kind,
                shape.act,
                shape.compute,
                shape.kv,
                f"d{shape.head_dim}",
                f"g{self.group}",
                self.distribution,
                *words,
            )
        )


@dataclass
class Case:
    """A problem's memory, and its answer: `expected` and the row's largest sum of |weight||v|, both float64."""

    problem: Problem
    q: torch.Tensor
    arena: torch.Tensor
    tables: torch.Tensor
    sinks: torch.Tensor
    block_stride: int
    layer_offset: int
    expected: torch.Tensor
    size: torch.Tensor
    scale: float
    queries: list[Queries] = field(default_factory=list)


def make(problem: Problem) -> Case:
    shape, draw = problem.shape, torch.Generator().manual_seed(problem.seed)
    heads, dim, block = problem.kv_heads * problem.group, shape.head_dim, problem.block
    rows = sum(count for count, _ in problem.sequences)
    lengths = [count + before for count, before in problem.sequences]
    blocks = [-(-length // block) for length in lengths]
    item = torch.empty(0, dtype=TORCH[shape.kv]).element_size()
    half = block * (dim * item + (2 if shape.kv == "int8" else 0))
    layer_offset = 2 * problem.kv_heads * half  # the second of two layers
    block_stride = 2 * layer_offset
    arena = torch.full((sum(blocks) + 2, block_stride), 0xFF, dtype=torch.uint8)  # NaN in every format
    tables = torch.full((len(lengths) + 1, max(blocks) + 1), -1, dtype=torch.int32)
    order = torch.randperm(len(arena), generator=draw)[: sum(blocks)].split(blocks)
    q = torch.empty(rows, heads, dim, dtype=TORCH[shape.act])
    sinks = torch.randn(heads, generator=draw)
    scale = dim**-0.5
    expected = torch.zeros(rows, heads, dim, dtype=torch.float64)
    size = torch.zeros(rows, heads, dtype=torch.float64)
    queries, first_row = [], 0
    for slot, ((count, before), ids) in enumerate(zip(problem.sequences, order)):
        length, draw = count + before, torch.Generator().manual_seed(1000 * problem.seed + slot)
        keys, values = (_values(problem, (length, problem.kv_heads, dim), draw) for _ in range(2))
        keys, values = (
            _store(arena, ids, x, layer_offset + i * half, 2 * half, problem) for i, x in enumerate((keys, values))
        )
        needed = max(0, before + 1 - problem.window) // block if problem.window else 0
        tables[slot, needed : len(ids)] = ids[needed:].int()
        queries.append(Queries(slot, first_row, count, before))
        part = slice(first_row, first_row + count)
        q[part] = _values(problem, (count, heads, dim), draw, query=True).to(q.dtype)
        expected[part], size[part] = _attention(problem, q[part].double(), keys, values, before, scale, sinks.double())
        first_row += count
    return Case(problem, q, arena, tables, sinks, block_stride, layer_offset, expected, size, scale, queries)


def _values(problem: Problem, size: tuple[int, ...], draw: torch.Generator, query: bool = False) -> torch.Tensor:
    x = torch.randn(size, generator=draw)
    if problem.distribution == "outliers":
        x[..., 3] *= 0.05 if query else 20.0
    if problem.distribution == "tiny":
        # K and V among the denormals of what they are stored in.
        least = {"f32": 1e-40, "f16": 3e-7, "bf16": 1e-39, "fp8_e4m3": 0.01, "fp8_e5m2": 3e-5, "int8": 1e-20}
        x = x if query else x * least[problem.shape.kv]
    return x


def _store(
    arena: torch.Tensor, ids: torch.Tensor, x: torch.Tensor, start: int, stride: int, problem: Problem
) -> torch.Tensor:
    """Write x [tokens, KV heads, dim] into its blocks; returns in float64 what was stored."""
    length, heads, dim = x.shape
    shape, block = problem.shape, problem.block
    kind = TORCH[shape.kv]
    if shape.kv == "int8":
        absmax = x.abs().amax(-1).clamp(min=1e-30)
        scales = ((absmax / 127).view(torch.int32) + 0xFFFF >> 16 << 16).view(torch.float32)
        codes = torch.round(x / scales[..., None]).clamp(-127, 127).to(torch.int8)
        stored = codes.double() * scales.double()[..., None]
    else:
        limit = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}.get(shape.kv, math.inf)
        codes = x.clamp(-limit, limit).to(kind)
        stored = codes.double()
    width = dim * codes.element_size()
    raw = codes.contiguous().view(torch.uint8).view(length, heads, width)
    for token in range(length):
        row = arena[ids[token // block]]
        for head in range(heads):
            at = start + head * stride + token % block * width
            row[at : at + width] = raw[token, head]
            if shape.kv == "int8":
                at = start + head * stride + block * width + token % block * 2
                row[at : at + 2] = scales[token, head : head + 1].to(torch.bfloat16).view(torch.uint8)
    return stored


def _attention(
    problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, before: int, scale: float, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = (x.repeat_interleave(problem.group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if problem.shape.soft_cap:
        scores = problem.soft_cap * torch.tanh(scores / problem.soft_cap)
    position, token = before + torch.arange(len(q))[:, None], torch.arange(len(k))[None, :]
    visible = token <= position
    if problem.window:
        visible &= token > position - problem.window
    scores = scores.masked_fill(~visible, -math.inf)
    if problem.sinks:
        scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), dim=-1)
    weights = torch.softmax(scores, -1)[..., : len(k)]
    out = torch.einsum("hqk,khd->qhd", weights, v)
    return out, torch.einsum("hqk,khd->qhd", weights, v.abs()).amax(-1)


def run(case: Case, launcher, device: str = "cpu") -> torch.Tensor:
    """The kernels' answer [rows, heads, dim]. `launcher` is an Emulation or a Launcher."""
    problem, shape = case.problem, case.problem.shape
    plan = plan_attention(
        case.queries, group=problem.group, rows=shape.rows, tile=shape.tile, split=problem.split, window=problem.window
    )
    out = torch.full_like(case.q, math.nan, device=device)
    places = (plan.parts, problem.kv_heads, shape.rows)
    part_values = torch.full((*places, shape.head_dim), math.nan, device=device)
    part_scales = torch.full((*places, 2), math.nan, device=device)
    work, merge = (torch.from_numpy(x.view("int32").reshape(-1, 8).copy()).to(device) for x in (plan.work, plan.merge))
    counts = torch.from_numpy(table_of_counts(plan)).to(device)
    q, arena, tables, sinks = (x.to(device) for x in (case.q, case.arena, case.tables, case.sinks))
    written = {"out": out, "part_values": part_values, "part_scales": part_scales}
    read = {"q": q, "arena": arena, "tables": tables, "work": work, "merge": merge, "counts": counts, "sinks": sinks}
    if device == "cpu":
        for name, tensor in written.items():
            launcher.register(tensor.data_ptr(), tensor.nbytes, name, written=False)
        for name, tensor in read.items():
            launcher.register(tensor.data_ptr(), tensor.nbytes, name, read_only=True)

    def at(tensor: torch.Tensor, offset: int = 0) -> ctypes.c_void_p:
        return ctypes.c_void_p(tensor.data_ptr() + offset)

    sink_row = at(sinks) if problem.sinks else ctypes.c_void_p(0)
    width = problem.kv_heads * problem.group * shape.head_dim
    # One more block of the grid than there is work, as a recorded grid has.
    launcher.launch(
        shape.kernel, (len(plan.work) + 1, problem.kv_heads, 1), shape.threads, shape.shared_bytes,
        [
            at(out), at(part_values), at(part_scales), at(q), at(arena), at(tables), at(work), at(counts), sink_row,
            ctypes.c_int64(case.block_stride), ctypes.c_int64(case.layer_offset), ctypes.c_int32(tables.shape[1]),
            ctypes.c_int32(width), ctypes.c_int32(width), ctypes.c_int32(problem.group), ctypes.c_int32(problem.window),
            ctypes.c_float(case.scale), ctypes.c_float(problem.soft_cap), ctypes.c_void_p(0),
            ctypes.c_int32(shape.act_code), ctypes.c_int32(block_bits(problem.block)),
        ],
    )  # fmt: skip
    if len(plan.merge):
        launcher.launch(
            shape.merge_kernel, (len(plan.merge) + 1, problem.kv_heads, MERGE_ROWS), MERGE_THREADS,
            shape.merge_shared_bytes,
            [
                at(out), at(part_values), at(part_scales), at(merge), at(counts, 4), sink_row,
                ctypes.c_int32(width), ctypes.c_int32(problem.group), ctypes.c_void_p(0),
            ],
        )  # fmt: skip
    return out.cpu()


def bound(shape: AttendShape) -> float:
    """What `error` may be."""
    coarse = 0.0 if shape.fine else ROUNDED_WEIGHTS.get(shape.compute, 0.0)
    return max(BOUNDS[shape.compute], BOUNDS[shape.act]) + coarse


def error(case: Case, out: torch.Tensor) -> float:
    wrong = (out.double() - case.expected).abs() - LEAST[case.problem.shape.act]
    return float((wrong.amax((1, 2)) / case.size.amax(1).clamp(min=1e-300)).max())
