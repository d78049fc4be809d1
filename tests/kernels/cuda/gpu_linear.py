"""Linear layers on a real GPU, for gpu_check.py: the emulator's cases against float64, equal bits, and times."""

from __future__ import annotations

import torch
from gpu_speed import Hardware, copies_of, graph_us
from linear_worlds import EVERY, FEW, LIMITS, Case, make_world

from llmctl.kernels.cuda.launch import Bound, Launcher
from llmctl.kernels.cuda.linear import Addresses, Linear, linear_calls, linear_workspace, workspace_bytes
from llmctl.kernels.cuda.pack import parts
from llmctl.kernels.cuda.source import Kernel
from llmctl.kernels.formats import WeightFormat

# Every fourth: all storages, tiles and types occur; few enough to be compiled in a minute.
CASES = [*FEW, *EVERY[::4]]
OUTPUTS, INPUTS = 14336, 4096
WEIGHTS = (
    WeightFormat("int4", 128, "int"),
    WeightFormat("int8", INPUTS),
    WeightFormat("fp8_e4m3", INPUTS, "none", "f32"),
    WeightFormat("bf16"),
)
ROWS = (1, 16, 32, 64, 128, 256)


def kernels() -> list[Kernel]:
    """All that the cases, the comparison of bits and the times launch."""
    found = [kernel for case in CASES for kernel in case.kernels]
    for weight in WEIGHTS:
        layer = Linear("bf16", weight, OUTPUTS, INPUTS)
        for count in ROWS:
            for deterministic in (False, True):
                calls = linear_calls(layer, count, Addresses(1, 1, 1, sums=1), 132, deterministic=deterministic)
                found += [call.kernel for call in calls]
    return list(dict.fromkeys(found))


def sweep(launcher: Launcher) -> dict[str, object]:
    """How many cases there were, which failed, and the worst error of each type."""
    worst, failed = dict.fromkeys(LIMITS, 0.0), []
    for case in CASES:
        error = run(launcher, case)
        worst[case.layer.dtype] = max(worst[case.layer.dtype], error)
        if not error <= LIMITS[case.layer.dtype]:
            failed.append({"name": case.name, "error": error})
    return {"cases": len(CASES), "failed": failed, "worst": worst}


def run(launcher: Launcher, case: Case) -> float:
    """The error of one case."""
    world = make_world(case.layer, case.rows, seed=case.rows, kind=case.kind, bias=case.bias)
    host = (world.y, world.x, world.weight, world.bias, world.residual)
    there = [None if array is None else torch.from_numpy(array).cuda() for array in host]
    sums = torch.empty(max(4, workspace_bytes(case.layer, case.rows, case.splits)), dtype=torch.uint8, device="cuda")
    at = Addresses(*(0 if tensor is None else tensor.data_ptr() for tensor in (*there, sums)))
    for call in case.calls(at, case.rows):
        launcher.launch(call.kernel, call.grid, call.threads, call.shared_bytes, call.arguments)
    assert there[0] is not None
    world.y[:] = there[0].cpu().numpy()
    return world.error


class Random:
    """A layer of random codes and activations on the GPU, bound for any number of rows."""

    def __init__(self, launcher: Launcher, weight: WeightFormat, *, deterministic: bool, copies: int = 1) -> None:
        self.launcher, self.deterministic = launcher, deterministic
        self.layer = Linear("bf16", weight, OUTPUTS, INPUTS)
        where, draw = parts(weight, OUTPUTS, INPUTS), torch.Generator(device="cuda").manual_seed(1)
        self.weight = torch.randint(0, 256, (where.num_bytes,), dtype=torch.uint8, device="cuda", generator=draw)
        if weight.is_float:
            values = torch.randn(where.num_bytes // 2, device="cuda", generator=draw) / INPUTS**0.5
            self.weight = values.bfloat16().view(torch.uint8)
        else:
            kind = torch.half if weight.scales == "f16" else torch.float
            count = (where.scales.stop - where.scales.start) // kind.itemsize
            scales = torch.rand(count, device="cuda", generator=draw).to(kind) / 500
            if weight.kind == "fp8_e4m3":
                self.weight[where.codes] &= 0xBF  # neither NaN nor large
            self.weight[where.scales] = scales.view(torch.uint8)
            if weight.zero == "int":
                self.weight[where.zeros] &= 15
        self.weights = [self.weight, *(self.weight.clone() for _ in range(copies - 1))]
        self.x = torch.randn(max(ROWS), INPUTS, device="cuda", generator=draw).bfloat16()
        self.y = torch.zeros(max(ROWS), OUTPUTS, device="cuda").bfloat16()
        self.processors = torch.cuda.get_device_properties(0).multi_processor_count
        size = linear_workspace(self.layer, max(ROWS), self.processors, deterministic=deterministic)
        self.sums = torch.empty(size + 16, dtype=torch.uint8, device="cuda")

    def bind(self, rows: int, first: int = 0, copy: int = 0) -> list[Bound]:
        x, y = (tensor[first:].data_ptr() for tensor in (self.x, self.y))
        at = Addresses(y, x, self.weights[copy].data_ptr(), sums=self.sums.data_ptr())
        calls = linear_calls(self.layer, rows, at, self.processors, deterministic=self.deterministic)
        return [self.launcher.bind(c.kernel, c.grid, c.threads, c.shared_bytes, c.arguments) for c in calls]


def same_bits(launcher: Launcher) -> bool:
    """Whether rows have the same bits alone and in company, of any number, where that is promised."""
    for weight in WEIGHTS:
        layer = Random(launcher, weight, deterministic=True)
        for bound in layer.bind(256):
            bound.run()
        together = layer.y.clone()
        for rows, first in ((1, 0), (1, 200), (16, 16), (33, 100), (64, 3), (128, 128)):
            layer.y.zero_()
            for bound in layer.bind(rows, first):
                bound.run()
            if not torch.equal(layer.y[first : first + rows], together[first : first + rows]):
                return False
    return True


def rows(launcher: Launcher, speed: Hardware) -> list[dict[str, object]]:
    """Measured over floor: the weight read once at the copy's bandwidth, or the products at cuBLAS's speed."""
    found: list[dict[str, object]] = []
    count = copies_of(2 * OUTPUTS * INPUTS)
    plain = [torch.randn(OUTPUTS, INPUTS, device="cuda").bfloat16() for _ in range(count)]
    given = torch.randn(max(ROWS), INPUTS, device="cuda").bfloat16()
    torch_us = {m: graph_us([lambda w=w, m=m: given[:m] @ w.T for w in plain]) for m in ROWS}
    for weight in WEIGHTS:
        copies = copies_of(2 * OUTPUTS * INPUTS if weight.is_float else OUTPUTS * INPUTS // 2)
        layer = Random(launcher, weight, deterministic=False, copies=copies)
        for m in ROWS:
            bytes_moved = layer.weight.nbytes + 2 * m * (INPUTS + OUTPUTS)
            floor = max(bytes_moved / speed.gb_per_s / 1e3, 2 * m * INPUTS * OUTPUTS / speed.tflops / 1e6)
            bound = [layer.bind(m, copy=copy) for copy in range(copies)]
            ours = graph_us([lambda one=one: [launch.run() for launch in one] for one in bound])
            found.append(
                {
                    "row": f"linear {weight.name} {INPUTS} x {OUTPUTS} M{m}", "launches": len(bound[0]),
                    "floor_us": floor, "graph_us": ours, "times_floor": ours / floor, "torch_bf16_us": torch_us[m],
                }
            )  # fmt: skip
    return found
