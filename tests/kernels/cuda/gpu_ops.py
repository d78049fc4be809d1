"""The ops for users of torch, and the library of matrix products, on a real GPU, for gpu_check.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from llmctl.kernels.cuda import pack, torch_ops
from llmctl.kernels.cuda.cublas import open_cublas
from llmctl.kernels.cuda.gpu import open_gpu
from llmctl.kernels.cuda.jit import Jit
from llmctl.kernels.cuda.libcuda import load_driver
from llmctl.kernels.formats import KVFormat, WeightFormat

INT4 = WeightFormat("int4", 128, "int")
BOUND = 2e-2  # of the largest value: bfloat16 against bfloat16, each rounded once or twice


def library(jit: Jit) -> dict[str, object]:
    """Whether cuBLAS is found and multiplies as it should; without it our own kernels do."""
    driver = load_driver()
    gpu = open_gpu(driver, driver.devices()[torch.cuda.current_device()], jit.get, deterministic=False)
    try:
        return {"multiplies": open_cublas(gpu) is not None}
    finally:
        gpu.close()


def as_on_a_cpu(cubins: Path) -> dict[str, object]:
    """How far each op of the GPU is from the same in plain torch, and which are too far."""
    torch_ops.keep_cubins_in(cubins)
    found = {name: _difference(name, make) for name, make in CALLS.items()}
    return {"off": found, "failed": [name for name, off in found.items() if not off <= BOUND]}


def _difference(name: str, make: Callable[[], tuple[object, ...]]) -> float:
    """The largest difference of what the op gives or changes, over the largest value."""
    op, there = getattr(torch.ops.llmctl, name.partition(" ")[0]), make()
    here = [value.cuda() if isinstance(value, torch.Tensor) else value for value in there]
    expected, got = op(*there), op(*here)
    pairs = list(zip(there, here, strict=True))
    if got is not None:
        pairs += zip(expected, got, strict=True) if isinstance(got, tuple) else [(expected, got)]
    off = 0.0
    for a, b in pairs:
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            a, b = a.double(), b.cpu().double()
            off = max(off, float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)))
    return off


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _packed() -> torch.Tensor:
    rng = np.random.default_rng(1)
    codes, zeros = (rng.integers(0, 16, (384, k), dtype=np.uint8) for k in (512, 4))
    scales = rng.uniform(0.01, 0.05, (384, 4)).astype(np.float16)
    return torch.from_numpy(pack.pack(INT4, codes, scales, zeros))


def _stores(kind: str) -> tuple[object, ...]:
    stride = 2 * 2 * 16 * KVFormat(kind).head_bytes(128)
    tables = torch.tensor([[3, 1, 4], [6, 0, 5]], dtype=torch.int32)
    slots, positions = torch.tensor([0] * 40 + [1] * 9).int(), torch.tensor([*range(40), *range(9)]).int()
    k, v = (_random(49, 2, 128, seed=seed) for seed in (1, 2))
    return k, v, torch.zeros(7, stride, dtype=torch.uint8), tables, slots, positions, kind, 16, 0


def _attends(kind: str) -> tuple[object, ...]:
    stored = _stores(kind)
    torch.ops.llmctl.store_kv(*stored)
    q = _random(5, 8, 128, seed=3)
    return q, stored[2], stored[3], [3, 2], [37, 7], kind, 2, 16, 128**-0.5, 0, 20, 30.0, torch.zeros(8), None


CALLS: dict[str, Callable[[], tuple[object, ...]]] = {
    "rms_norm": lambda: (_random(5, 4096), _random(4096, seed=1), 1e-5),
    "add_rms_norm": lambda: (_random(5, 4096), _random(5, 4096, seed=2), _random(4096, seed=1), 1e-5),
    "rms_norm_quantize int8": lambda: (_random(5, 4096), _random(4096, seed=1), 1e-5, torch.int8),
    "act_mul": lambda: (_random(5, 2048), "silu"),
    "linear few": lambda: (_random(3, 512), _packed(), INT4.name, 384, None),
    "linear many": lambda: (_random(200, 512), _packed(), INT4.name, 384, _random(384)),
    "store_kv": lambda: _stores("bf16"),
    "paged_attention bf16": lambda: _attends("bf16"),
    "paged_attention int8": lambda: _attends("int8"),
    "paged_attention fp8": lambda: _attends("fp8_e4m3"),
}
