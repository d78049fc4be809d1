"""The kernels on a real GPU, in one command: `make gpu-check`. JSON to stdout and $OUT, progress to stderr.

Correctness first, with the problems that emulation runs, against float64; then equality of a captured graph with eager
launches; then times, each beside the time that reading its bytes once must take at the bandwidth measured on the same
GPU; NVIDIA's sanitizer last. What fails is recorded, and the rest still runs; the JSON is written anew after each
section. Needs torch for CUDA, numpy, msgspec and NVIDIA's compiler or a filled cache; nothing is fetched.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

SANITIZED, COMPILE = "--under-sanitizer", "--compile"


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

import gpu_engine  # noqa: E402
import gpu_linear  # noqa: E402
import gpu_ops  # noqa: E402
import gpu_speed  # noqa: E402
import torch  # noqa: E402
from attend_cases import Problem, bound, error, make, run  # noqa: E402

from llmctl.kernels.cuda import nvrtc  # noqa: E402
from llmctl.kernels.cuda.attend import AttendShape, refusal  # noqa: E402
from llmctl.kernels.cuda.jit import Jit, architecture  # noqa: E402
from llmctl.kernels.cuda.launch import Launcher  # noqa: E402
from llmctl.kernels.cuda.libcuda import load_driver  # noqa: E402
from llmctl.kernels.cuda.source import Kernel  # noqa: E402
from llmctl.kernels.cuda.tiles import choose_attend  # noqa: E402

BLOCK = 16
# Window, soft cap and sinks, by seed.
VARIANTS = ((0, 0.0, False), (90, 0.0, False), (0, 20.0, False), (0, 0.0, True), (90, 20.0, True))
SEQUENCES = {False: ((1, 100), (1, 0), (3, 700)), True: ((45, 0), (1, 70), (200, 130))}
TYPES = (("f16", "f16"), ("bf16", "bf16"), ("bf16", "f16"), ("f32", "f32"), ("f32", "tf32"))
SANITIZER_SECONDS = 50


def main() -> int:
    if COMPILE in sys.argv:
        return compile_share(*sys.argv[sys.argv.index(COMPILE) + 1 :])
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was checked", file=sys.stderr)
        return 2
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    arch = architecture(*torch.cuda.get_device_capability())
    launcher = Launcher(jit_for(arch), load_driver(), lambda: torch.cuda.current_stream().cuda_stream)
    if SANITIZED in sys.argv:
        return small_case(launcher, arch)
    report = Report()
    report.section("versions", lambda: versions(arch))
    report.section("compiled", lambda: compile_all(arch))
    report.section("attention", lambda: judged(sweep(launcher, arch)))
    report.section("linear", lambda: gpu_linear.sweep(launcher))
    report.section("linear has the same bits", lambda: gpu_linear.same_bits(launcher))
    report.section("ops of torch", lambda: gpu_ops.as_on_a_cpu(jit_for(arch).folder))
    report.section("library", lambda: gpu_ops.library(jit_for(arch)))
    report.section("graph equals eager", lambda: graph_equals_eager(launcher, arch))
    speed = report.section("hardware", gpu_speed.hardware)
    if isinstance(speed, gpu_speed.Hardware):
        report.section("attention times", lambda: gpu_speed.attention_rows(launcher, arch, speed))
        report.section("norm times", lambda: [gpu_speed.norm_row(launcher, speed)])
        report.section("linear times", lambda: gpu_linear.rows(launcher, speed))
    os.environ["LLMCTL_CACHE"] = str(ROOT / "build")  # where jit_for keeps its cubins
    report.section("engine", gpu_engine.same_tokens)
    report.section("engine times", gpu_engine.speeds)
    report.section("compute-sanitizer", sanitizer)
    print(report.text)
    return 0 if report.passed else 1


class Report:
    """What was found, by section, written out after each."""

    def __init__(self) -> None:
        self.found: dict[str, object] = {}
        self.seconds: dict[str, float] = {}
        self.passed = True

    @property
    def text(self) -> str:
        return json.dumps({**self.found, "seconds": self.seconds}, indent=1, default=dataclasses.asdict)

    def section(self, name: str, find: Callable[[], object]) -> object:
        """What `find` returned, None if it failed: that is recorded, and ends nothing."""
        start, value = time.monotonic(), None
        try:
            value = self.found[name] = find()
        except Exception:
            self.found[name] = {"failed": traceback.format_exc()[-3000:]}
        self.seconds[name] = round(time.monotonic() - start, 1)
        found = self.found[name]
        if found is False or (isinstance(found, dict) and found.get("failed")):
            self.passed = False
        print(json.dumps({name: found}, indent=1, default=dataclasses.asdict), file=sys.stderr, flush=True)
        if out := os.environ.get("OUT"):
            Path(out, "gpu_check.json").write_text(self.text)
        return value


def jit_for(arch: str) -> Jit:
    return Jit(ROOT / "build" / "cubins", arch)


def every_kernel(arch: str) -> list[Kernel]:
    """All that will be launched."""
    shapes = [shape for shape, *_ in shapes_swept(arch)]
    kernels = [kernel for shape in shapes for kernel in (shape.kernel, shape.merge_kernel)]
    return list(dict.fromkeys((*kernels, *gpu_linear.kernels(), *gpu_speed.kernels(arch), *gpu_engine.kernels(arch))))


def compile_all(arch: str) -> dict[str, object]:
    """Fills the cache, by as many processes as there are cores."""
    kernels = every_kernel(arch)
    missing = sum(not jit_for(arch).has(kernel) for kernel in kernels)
    shares = min(16, os.cpu_count() or 1, missing)
    command = (sys.executable, __file__, COMPILE, arch, str(shares))
    working = [subprocess.Popen((*command, str(share)), stdout=subprocess.DEVNULL) for share in range(shares)]
    failed = [process.args[-1] for process in working if process.wait() != 0]  # type: ignore[index]
    return {"kernels": len(kernels), "compiled now": missing, "failed": failed}


def compile_share(arch: str, shares: str, share: str) -> int:
    jit = jit_for(arch)
    for kernel in every_kernel(arch)[int(share) :: int(shares)]:
        jit.get(kernel)
    return 0


def judged(found: list[dict]) -> dict[str, object]:
    """How many there were, which failed, and the worst of each type."""
    worst = {key: max(row["error"] for row in found if row["compute"] == key) for key in {r["compute"] for r in found}}
    return {"cases": len(found), "failed": [row for row in found if not row["ok"]], "worst": worst}


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


def shapes_swept(
    arch: str, dims: tuple[int, ...] = (64, 128, 256), kinds: tuple[str, ...] = ()
) -> Iterator[tuple[AttendShape, int, int]]:
    """Every combination of types, by seed over sizes and VARIANTS; beside each is which of them."""
    for (act, compute), kv in itertools.product(TYPES, kinds or ("f16", "bf16", "f32", "fp8_e4m3", "fp8_e5m2", "int8")):
        if refusal(act, compute, kv) is not None:
            continue
        for (seed, dim), prefill in itertools.product(enumerate(dims), (False, True)):
            variant = (seed + prefill) % len(VARIANTS) if not kinds else 0
            capped = VARIANTS[variant][1] > 0
            yield choose_attend(arch, act, compute, kv, dim, soft_cap=capped, prefill=prefill), seed, variant


def sweep(
    launcher: Launcher,
    arch: str,
    dims: tuple[int, ...] = (64, 128, 256),
    kinds: tuple[str, ...] = (),
    distributions: tuple[str, ...] = ("normal", "outliers", "tiny"),
) -> list[dict]:
    """Their answers, for each distribution, against float64."""
    found = []
    for (shape, seed, variant), distribution in itertools.product(shapes_swept(arch, dims, kinds), distributions):
        prefill = shape.warps_m > 1
        window, soft_cap, sinks = VARIANTS[variant]
        problem = Problem(
            shape, SEQUENCES[prefill], 2, (1, 3, 4, 8)[(seed + prefill) % 4], 256,
            window, soft_cap, distribution, seed, BLOCK, sinks,
        )  # fmt: skip
        case = make(problem)
        off = error(case, run(case, launcher, "cuda"))
        ok = off <= bound(shape)
        found.append({"name": problem.name, "compute": shape.compute, "error": off, "ok": ok})
    return found


def small_case(launcher: Launcher, arch: str) -> int:
    """A few launches of everything that waits for another thread, for the sanitizer: how many were wrong."""
    wrong = sum(not row["ok"] for row in sweep(launcher, arch, (64,), ("bf16", "fp8_e4m3"), ("normal",)))
    return wrong + sum(gpu_linear.run(launcher, case) > 4e-3 for case in gpu_linear.CASES[:2])


def graph_equals_eager(launcher: Launcher, arch: str) -> bool:
    step = gpu_speed.attention(launcher, arch, "bf16", 4, 3000)
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


def sanitizer() -> dict[str, str]:
    """memcheck and racecheck on a small case: clean, absent, out of time, or what they said."""
    usual = "/usr/local/cuda/bin/compute-sanitizer"
    program = shutil.which("compute-sanitizer") or (usual if Path(usual).exists() else None)
    if program is None:
        return {"said": "absent"}
    found: dict[str, str] = {}
    for tool in ("memcheck", "racecheck"):
        command = (program, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__, SANITIZED)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SANITIZER_SECONDS)
        except subprocess.TimeoutExpired:
            found[tool] = f"not done in {SANITIZER_SECONDS} s"
            continue
        found[tool] = "clean" if done.returncode == 0 else f"{done.stdout[-2500:]}{done.stderr[-800:]}"
        if done.returncode != 0:
            found["failed"] = tool
    return found


if __name__ == "__main__":
    sys.exit(main())
