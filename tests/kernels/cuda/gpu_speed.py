"""Times on a real GPU, for gpu_check.py: each beside what the hardware could do.

A launch is timed in a captured graph that repeats it over copies of its inputs, more of them than the cache holds: what
a GPU takes, without the host. `eager_us` is one launch from Python, after a write that empties the cache.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from llmctl.kernels.cuda import rows
from llmctl.kernels.cuda.attend import (
    MERGE_ROWS,
    MERGE_THREADS,
    AttendShape,
    Queries,
    choose_split,
    compute_of,
    plan_attention,
    table_of_counts,
)
from llmctl.kernels.cuda.launch import Bound, Launcher
from llmctl.kernels.cuda.source import Kernel
from llmctl.kernels.cuda.tiles import choose_attend
from llmctl.kernels.cuda.types import block_bits
from llmctl.kernels.formats import KVFormat

# (KV format, sequences, tokens of each, of them new): 8 KV heads of 128 dimensions, 4 query heads to each.
ATTENTION = (
    ("bf16", 32, 2048, 1),
    ("fp8_e4m3", 32, 2048, 1),
    ("int8", 32, 2048, 1),
    ("bf16", 128, 4096, 1),
    ("fp8_e4m3", 128, 4096, 1),
    ("bf16", 1, 8192, 1),
    ("fp8_e4m3", 1, 8192, 1),
    ("bf16", 1, 8192, 8192),
    ("fp8_e4m3", 1, 8192, 8192),
)
KV_HEADS, GROUP, DIM, BLOCK = 8, 4, 128, 16
NORM_ROWS, NORM_WIDTH = 4096, 4096
ROTATED_BYTES = 400 << 20


@dataclass(frozen=True)
class Hardware:
    """Of a copy, reading and writing counted, and of torch's product of 8192 x 8192 in bfloat16."""

    gb_per_s: float
    tflops: float


def hardware() -> Hardware:
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    bandwidth = 2 * source.nbytes / eager_us(lambda: target.copy_(source)) / 1e3
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return Hardware(bandwidth, 2 * 8192**3 / eager_us(lambda: a @ b) / 1e6)


def eager_us(run_once: Callable[[], object], repeats: int = 20) -> float:
    """Median of single runs, each after a write that leaves nothing of its inputs in the cache."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for _ in range(3):
        run_once()
    found = []
    for _ in range(repeats):
        flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run_once()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e3)
    return statistics.median(found)


def graph_us(runs: Sequence[Callable[[], object]], repeats: int = 7) -> float:
    """Of one of these runs, in a graph of all of them, at least twelve: the median of replays."""
    rounds = -(-12 // len(runs))
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for run in runs:
                run()
    graph.replay()
    found = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e3)
    return statistics.median(found) / rounds / len(runs)


def copies_of(num_bytes: int) -> int:
    """How many inputs of this size the cache holds no part of."""
    return max(1, min(32, -(-ROTATED_BYTES // num_bytes)))


@dataclass(frozen=True)
class Attention:
    """A step's attention, bound: its launches, its output, and the bytes that it must read."""

    launches: list[Bound]
    out: torch.Tensor
    bytes: int
    parts: int
    kept: tuple[torch.Tensor, ...]

    def run(self) -> None:
        for launch in self.launches:
            launch.run()


def shape_of(arch: str, kv: str, new: int) -> AttendShape:
    return choose_attend(arch, "bf16", compute_of("bf16", kv), kv, DIM, soft_cap=False, prefill=new > 1)


def kernels(arch: str) -> list[Kernel]:
    """All that is timed here."""
    shapes = [shape_of(arch, kv, new) for kv, _, _, new in ATTENTION]
    return [
        rows.rms_norm("bf16", NORM_WIDTH, residual=True)[0],
        *(k for s in shapes for k in (s.kernel, s.merge_kernel)),
    ]


def attention(launcher: Launcher, arch: str, kv: str, sequences: int, length: int, new: int = 1) -> Attention:
    shape = shape_of(arch, kv, new)
    queries = [Queries(i, i * new, new, length - new) for i in range(sequences)]
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    sizes = {"group": GROUP, "rows": shape.rows, "tile": shape.tile}
    split = choose_split(queries, kv_heads=KV_HEADS, processors=processors, **sizes) if new == 1 else length
    plan = plan_attention(queries, split=split, **sizes)
    blocks = -(-length // BLOCK)
    stride = KV_HEADS * 2 * BLOCK * KVFormat(kv).head_bytes(DIM)
    # Small positive values in every format: what they are does not matter here.
    arena = torch.randint(0x20, 0x38, (sequences * blocks, stride), dtype=torch.uint8, device="cuda")
    tables = torch.randperm(sequences * blocks, device="cuda").int().view(sequences, blocks)
    q = torch.randn(sequences * new, KV_HEADS * GROUP * DIM, device="cuda").bfloat16()
    out = torch.empty_like(q)
    part_values = torch.empty(max(plan.parts, 1), KV_HEADS, shape.rows, DIM, device="cuda")
    part_scales = torch.empty(max(plan.parts, 1), KV_HEADS, shape.rows, 2, device="cuda")
    work, merge = (torch.from_numpy(x.view("int32").reshape(-1, 8).copy()).cuda() for x in (plan.work, plan.merge))
    counts, nothing = torch.from_numpy(table_of_counts(plan)).cuda(), ctypes.c_void_p(0)

    def at(tensor: torch.Tensor, offset: int = 0) -> ctypes.c_void_p:
        return ctypes.c_void_p(tensor.data_ptr() + offset)

    i32, i64, f32 = ctypes.c_int32, ctypes.c_int64, ctypes.c_float
    launches = [
        launcher.bind(
            shape.kernel, (len(plan.work), KV_HEADS, 1), shape.threads, shape.shared_bytes,
            [at(out), at(part_values), at(part_scales), at(q), at(arena), at(tables), at(work), at(counts), nothing,
             i64(stride), i64(0), i32(blocks), i32(q.shape[1]), i32(q.shape[1]), i32(GROUP), i32(0),
             f32(DIM**-0.5), f32(0.0), nothing, i32(shape.act_code), i32(block_bits(BLOCK))],
        )
    ]  # fmt: skip
    if plan.parts:
        launches.append(
            launcher.bind(
                shape.merge_kernel, (len(plan.merge), KV_HEADS, MERGE_ROWS), MERGE_THREADS, shape.merge_shared_bytes,
                [at(out), at(part_values), at(part_scales), at(merge), at(counts, 4), nothing, i32(q.shape[1]),
                 i32(GROUP), nothing],
            )
        )  # fmt: skip
    read = sequences * length * KV_HEADS * 2 * KVFormat(kv).head_bytes(DIM)
    kept = (arena, tables, q, part_values, part_scales, work, merge, counts)
    return Attention(launches, out, read, plan.parts, kept)


def attention_rows(launcher: Launcher, arch: str, speed: Hardware) -> list[dict[str, object]]:
    return [attention_row(launcher, arch, speed, *sizes) for sizes in ATTENTION]


def attention_row(
    launcher: Launcher, arch: str, speed: Hardware, kv: str, sequences: int, length: int, new: int
) -> dict[str, object]:
    first = attention(launcher, arch, kv, sequences, length, new)
    count = copies_of(first.bytes) if new == 1 else 1
    steps = [first, *(attention(launcher, arch, kv, sequences, length, new) for _ in range(count - 1))]
    # Of the causal triangle, two products of a multiplication and an addition each.
    flops = 4 * KV_HEADS * GROUP * DIM * sequences * sum(range(length - new + 1, length + 1))
    floor = max(first.bytes / speed.gb_per_s / 1e3, flops / speed.tflops / 1e6)
    ours, eager = graph_us([step.run for step in steps]), eager_us(first.run)
    only = graph_us([step.launches[0].run for step in steps])
    row: dict[str, object] = {
        "row": f"{'decode' if new == 1 else 'prefill'} B{sequences} L{length} {kv}", "parts": first.parts,
        "floor_us": floor, "graph_us": ours, "times_floor": ours / floor, "without_merge_us": only, "eager_us": eager,
    }  # fmt: skip
    if kv == "bf16":
        del steps
        given = [
            (
                torch.randn(sequences, KV_HEADS * GROUP, new, DIM, device="cuda").bfloat16(),
                *(torch.randn(sequences, KV_HEADS, length, DIM, device="cuda").bfloat16() for _ in range(2)),
            )
            for _ in range(count)
        ]
        attend = torch.nn.functional.scaled_dot_product_attention
        row["torch_sdpa_dense_us"] = graph_us(
            [lambda x=x: attend(*x, enable_gqa=True, is_causal=new > 1) for x in given]
        )
    return row


def norm_row(launcher: Launcher, speed: Hardware) -> dict[str, object]:
    kernel, threads = rows.rms_norm("bf16", NORM_WIDTH, residual=True)
    counts = torch.tensor([NORM_ROWS], dtype=torch.int32).cuda()
    weight, launches, kept = torch.randn(NORM_WIDTH, device="cuda").bfloat16(), [], []
    for _ in range(4):
        x, residual, out = (torch.randn(NORM_ROWS, NORM_WIDTH, device="cuda").bfloat16() for _ in range(3))
        kept += [x, residual, out]
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (out, x, residual, weight)]
        pointers += [ctypes.c_void_p(0), ctypes.c_void_p(counts.data_ptr())]
        launches.append(
            launcher.bind(
                kernel, (NORM_ROWS, 1, 1), threads, threads // 32 * 4,
                [*pointers, ctypes.c_int32(NORM_WIDTH), ctypes.c_float(1e-5)],
            )
        )  # fmt: skip
    floor, ours = 4 * kept[0].nbytes / speed.gb_per_s / 1e3, graph_us([launch.run for launch in launches])
    return {
        "row": f"norm and residual {NORM_ROWS} x {NORM_WIDTH}", "floor_us": floor, "graph_us": ours,
        "times_floor": ours / floor, "eager_us": eager_us(launches[0].run),
    }  # fmt: skip
