"""The kernels on a real GPU, in one command: `make gpu-check`. JSON to stdout and $OUT, progress to stderr.

Correctness first, with the problems that emulation runs, against float64; then equality of a captured graph with eager
launches; then times, each beside the time that reading its bytes once must take at the bandwidth measured on the same
GPU. Needs torch for CUDA, numpy, msgspec and NVIDIA's compiler or a filled cache; nothing is fetched.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

SANITIZED = "--under-sanitizer"


def import_checkout() -> None:
    """Make `llmctl` this checkout where it is not installed: an import of its root folder under that name."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
    if importlib.util.find_spec("llmctl") is None:
        spec = importlib.util.spec_from_file_location(
            "llmctl", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["llmctl"] = module
        spec.loader.exec_module(module)
    sys.path.insert(0, str(Path(__file__).parent))


import_checkout()

import gpu_linear  # noqa: E402
import torch  # noqa: E402
from attend_cases import Problem, bound, error, make, run  # noqa: E402

from llmctl.kernels.cuda import nvrtc, rows  # noqa: E402
from llmctl.kernels.cuda.attend import (  # noqa: E402
    MERGE_ROWS,
    MERGE_THREADS,
    SINKS,
    SOFT_CAP,
    WINDOW,
    Queries,
    choose_split,
    plan_attention,
    refusal,
    table_of_counts,
)
from llmctl.kernels.cuda.jit import Jit, architecture  # noqa: E402
from llmctl.kernels.cuda.launch import Launcher, load_driver  # noqa: E402
from llmctl.kernels.cuda.tiles import blocks_per_sm, choose_attend  # noqa: E402
from llmctl.kernels.formats import KVFormat  # noqa: E402

FLAGS = (0, WINDOW, SOFT_CAP, SINKS, WINDOW | SOFT_CAP | SINKS)
SEQUENCES = {False: ((1, 100), (1, 0), (3, 700)), True: ((45, 0), (1, 70), (200, 130))}
# (name, KV format, sequences, tokens of context each): 8 KV heads of 128 dimensions, 4 query heads to each.
DECODE_ROWS = (
    ("decode B32 L2048", "bf16", 32, 2048),
    ("decode B32 L2048", "fp8_e4m3", 32, 2048),
    ("decode B128 L4096", "fp8_e4m3", 128, 4096),
    ("decode B1 L8192", "fp8_e4m3", 1, 8192),
)
KV_HEADS, GROUP, DIM, BLOCK = 8, 4, 128, 16


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was checked", file=sys.stderr)
        return 2
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    arch = architecture(*torch.cuda.get_device_capability())
    jit = Jit(ROOT / "build" / "cubins", arch)
    launcher = Launcher(jit, load_driver(), lambda: torch.cuda.current_stream().cuda_stream)
    if SANITIZED in sys.argv:
        return sum(not row["ok"] for row in sweep(launcher, arch, dims=(64,), kinds=("bf16", "fp8_e4m3")))
    result: dict[str, object] = {"versions": versions(arch)}
    show(result["versions"])
    found = sweep(launcher, arch)
    result["sweep"] = {
        "cases": len(found),
        "failed": [row for row in found if not row["ok"]],
        "worst": {
            key: max(row["error"] for row in found if row["compute"] == key) for key in {r["compute"] for r in found}
        },
    }
    show(result["sweep"])
    linear = result["linear"] = gpu_linear.sweep(launcher)
    result["linear has the same bits"] = gpu_linear.same_bits(launcher)
    show({"linear": linear, "linear has the same bits": result["linear has the same bits"]})
    result["graph"] = graph_equals_eager(launcher, arch)
    show({"graph equals eager": result["graph"]})
    result["sanitizer"] = sanitizer()
    show({"compute-sanitizer": result["sanitizer"]})
    bandwidth, tflops = copy_bandwidth(), matmul_speed()
    result["bandwidth_gb_per_s"], result["bf16_tflops"] = bandwidth, tflops
    result["rows"] = [decode_row(launcher, arch, bandwidth, *row) for row in DECODE_ROWS]
    result["rows"].append(norm_row(launcher, bandwidth))  # type: ignore[attr-defined]
    result["rows"] += gpu_linear.rows(launcher, bandwidth, tflops, times_us)  # type: ignore[operator]
    show(result["rows"])
    text = json.dumps(result, indent=1)
    if out := os.environ.get("OUT"):
        Path(out, "gpu_check.json").write_text(text)
    print(text)
    if linear["failed"] or not result["linear has the same bits"]:
        return 1
    return 0 if not result["sweep"]["failed"] and result["graph"] and result["sanitizer"] in ("clean", "absent") else 1  # type: ignore[index]


def show(value: object) -> None:
    print(json.dumps(value, indent=1), file=sys.stderr, flush=True)


def versions(arch: str) -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "arch": arch,
        "torch": torch.__version__,
        "cuda of torch": str(torch.version.cuda),
        "nvrtc": nvrtc.version(),
        "python": platform.python_version(),
        "flashinfer": "installed" if importlib.util.find_spec("flashinfer") else "absent",
    }


def sweep(
    launcher: Launcher, arch: str, dims: tuple[int, ...] = (64, 128, 256), kinds: tuple[str, ...] = ()
) -> list[dict]:
    """Every combination of types, by seed over sizes, flags and distributions, against float64."""
    found = []
    for act, compute in (("f16", "f16"), ("bf16", "bf16"), ("f32", "f32"), ("f32", "tf32")):
        for kv in kinds or ("f16", "bf16", "f32", "fp8_e4m3", "fp8_e5m2", "int8"):
            if refusal(act, compute, kv) is not None:
                continue
            for seed, dim in enumerate(dims):
                for prefill in (False, True):
                    flags = FLAGS[(seed + prefill) % len(FLAGS)] if not kinds else 0
                    shape = choose_attend(arch, act, compute, kv, dim, BLOCK, flags, prefill=prefill)
                    for distribution in ("normal", "outliers", "tiny"):
                        problem = Problem(
                            shape, SEQUENCES[prefill], 2, (1, 3, 4, 8)[(seed + prefill) % 4], 256,
                            90 if flags & WINDOW else 0, 20.0, distribution, seed,
                        )  # fmt: skip
                        case = make(problem)
                        off = error(case, run(case, launcher, "cuda"))
                        found.append(
                            {
                                "name": problem.name,
                                "compute": compute,
                                "error": off,
                                "bound": bound(shape),
                                "ok": off <= bound(shape),
                            }
                        )
    return found


@dataclasses.dataclass
class Decode:
    """One decode step's attention of many sequences, bound: its launches, its output, the bytes that it must read."""

    launches: list
    out: torch.Tensor
    bytes: int
    kept: list[torch.Tensor]

    def run(self) -> None:
        for launch in self.launches:
            launch.run()


def decode(launcher: Launcher, arch: str, kv: str, sequences: int, length: int) -> Decode:
    shape = choose_attend(arch, "bf16", "bf16", kv, DIM, BLOCK, 0, prefill=False)
    queries = [Queries(i, i, 1, length - 1) for i in range(sequences)]
    registers = launcher.jit.get(shape.kernel).resources.registers
    places = torch.cuda.get_device_properties(0).multi_processor_count * blocks_per_sm(
        arch, shape.threads, registers, shape.shared_bytes
    )
    split = choose_split(queries, group=GROUP, rows=shape.rows, tile=shape.tile, kv_heads=KV_HEADS, places=places)
    plan = plan_attention(queries, group=GROUP, rows=shape.rows, tile=shape.tile, split=split)
    blocks = -(-length // BLOCK)
    stride = KV_HEADS * 2 * BLOCK * KVFormat(kv).head_bytes(DIM)
    # Small values of either sign in every format: what they are does not matter here.
    arena = torch.randint(0x20, 0x38, (sequences * blocks, stride), dtype=torch.uint8, device="cuda")
    tables = torch.randperm(sequences * blocks, device="cuda").int().view(sequences, blocks)
    q = torch.randn(sequences, KV_HEADS * GROUP * DIM, device="cuda").bfloat16()
    out = torch.empty_like(q)
    part_values = torch.empty(max(plan.parts, 1), KV_HEADS, shape.rows, DIM, device="cuda")
    part_scales = torch.empty(max(plan.parts, 1), KV_HEADS, shape.rows, 2, device="cuda")
    work, merge = (torch.from_numpy(x.view("int32").reshape(-1, 8).copy()).cuda() for x in (plan.work, plan.merge))
    counts, sinks = torch.from_numpy(table_of_counts(plan)).cuda(), torch.zeros(1, device="cuda")

    def at(tensor: torch.Tensor, offset: int = 0) -> ctypes.c_void_p:
        return ctypes.c_void_p(tensor.data_ptr() + offset)

    i32, i64, f32 = ctypes.c_int32, ctypes.c_int64, ctypes.c_float
    launches = [
        launcher.bind(
            shape.kernel, (len(plan.work), KV_HEADS, 1), shape.threads, shape.shared_bytes,
            [at(out), at(part_values), at(part_scales), at(q), at(arena), at(tables), at(work), at(counts), at(sinks),
             i64(stride), i64(0), i32(blocks), i32(q.shape[1]), i32(q.shape[1]), i32(GROUP), i32(0),
             f32(DIM**-0.5), f32(0.0)],
        )
    ]  # fmt: skip
    if plan.parts:
        launches.append(
            launcher.bind(
                shape.merge_kernel, (len(plan.merge), KV_HEADS, MERGE_ROWS), MERGE_THREADS, shape.merge_shared_bytes,
                [at(out), at(part_values), at(part_scales), at(merge), at(counts, 4), at(sinks), i32(q.shape[1]),
                 i32(GROUP)],
            )
        )  # fmt: skip
    read = sequences * length * KV_HEADS * 2 * KVFormat(kv).head_bytes(DIM)
    kept = [arena, tables, q, part_values, part_scales, work, merge, counts, sinks]
    return Decode(launches, out, read, kept)


def graph_equals_eager(launcher: Launcher, arch: str) -> bool:
    step = decode(launcher, arch, "bf16", 4, 3000)
    step.run()
    torch.cuda.synchronize()
    eager = step.out.clone()
    step.out.fill_(math.nan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    graph.replay()
    torch.cuda.synchronize()
    return bool(torch.equal(step.out, eager))


def sanitizer() -> str:
    """memcheck and racecheck on the small sweep: clean, absent, or what they said."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return "absent"
    for tool in ("memcheck", "racecheck"):
        done = subprocess.run(
            [program, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, SANITIZED],
            capture_output=True, text=True, timeout=240,
        )  # fmt: skip
        if done.returncode != 0:
            return f"{tool}: {done.stdout[-2000:]}{done.stderr[-500:]}"
    return "clean"


def times_us(run_once, repeats: int = 30) -> float:
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


def copy_bandwidth() -> float:
    """GB/s, reading and writing counted."""
    source, target = (torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * source.nbytes / times_us(lambda: target.copy_(source)) / 1e3


def matmul_speed() -> float:
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return 2 * 8192**3 / times_us(lambda: a @ b) / 1e6


def decode_row(
    launcher: Launcher, arch: str, bandwidth: float, name: str, kv: str, sequences: int, length: int
) -> dict:
    step = decode(launcher, arch, kv, sequences, length)
    floor, ours = step.bytes / bandwidth / 1e3, times_us(step.run)
    row: dict = {"row": f"{name} {kv}", "floor_us": floor, "measured_us": ours, "times_floor": ours / floor}
    if kv == "bf16":
        q = torch.randn(sequences, KV_HEADS * GROUP, 1, DIM, device="cuda").bfloat16()
        k, v = (torch.randn(sequences, KV_HEADS, length, DIM, device="cuda").bfloat16() for _ in range(2))
        attend = torch.nn.functional.scaled_dot_product_attention
        row["torch_sdpa_us"] = times_us(lambda: attend(q, k, v, enable_gqa=True))
    return row


def norm_row(launcher: Launcher, bandwidth: float) -> dict:
    width, count = 4096, 4096
    x, residual, out = (torch.randn(count, width, device="cuda").bfloat16() for _ in range(3))
    weight, counts = torch.randn(width, device="cuda").bfloat16(), torch.tensor([count], dtype=torch.int32).cuda()
    kernel, threads = rows.rms_norm("bf16", width, residual=True)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (out, x, residual, weight)]
    pointers += [ctypes.c_void_p(0), ctypes.c_void_p(counts.data_ptr())]
    launch = launcher.bind(
        kernel, (count, 1, 1), threads, threads // 32 * 4, [*pointers, ctypes.c_int32(width), ctypes.c_float(1e-5)]
    )
    floor, ours = 4 * x.nbytes / bandwidth / 1e3, times_us(launch.run)
    return {"row": "norm and residual 4096 x 4096", "floor_us": floor, "measured_us": ours, "times_floor": ours / floor}


if __name__ == "__main__":
    sys.exit(main())
