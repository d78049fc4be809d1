"""The ops for users of torch: schemas that torch accepts, and a GPU's implementation, emulated, that means the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.library import opcheck

from llmctl.kernels.cuda import pack, torch_cpu, torch_ops
from llmctl.kernels.cuda.arguments import Argument
from llmctl.kernels.cuda.emulate import build
from llmctl.kernels.cuda.source import Kernel
from llmctl.kernels.cuda.torch_cuda import CudaOps
from llmctl.kernels.errors import UsageError
from llmctl.kernels.formats import BF16, F16, F32, KVFormat, WeightFormat
from llmctl.quant.tensor import WeightTensor

from .attend_cases import BOUNDS

OPS = torch.ops.llmctl
FORMATS = (
    WeightFormat("int4", 32, "int"), WeightFormat("int4", 64), WeightFormat("int4", 32, "min"),
    WeightFormat("int4", 160), WeightFormat("nf4", 32, "none", "f32"), WeightFormat("int8", 32),
    WeightFormat("fp8_e4m3", 160, "none", "f32"), F16, F32, BF16,
)  # fmt: skip


@dataclass(frozen=True)
class Emulated:
    """Launches on the emulator, each kernel built when it comes."""

    folder: Path

    def launch(
        self, kernel: Kernel, grid: tuple[int, int, int], threads: int, shared: int, arguments: Sequence[Argument]
    ) -> None:
        emulation = build([kernel], "values", self.folder)
        done = emulation.launch(kernel, grid, threads, shared, arguments)
        assert done and emulation.reports() == ()


@pytest.fixture
def gpu(builds: Path) -> CudaOps:
    return CudaOps(Emulated(builds), "sm_80", 4)


def random(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_of(format: WeightFormat, n: int, k: int) -> WeightTensor:
    rng = np.random.default_rng(k)
    if format.is_float:
        values = rng.standard_normal((n, k)).astype(np.float32)
        if format.kind == "bf16":
            return WeightTensor(format, (values.view(np.uint32) >> 16).astype(np.uint16))
        return WeightTensor(format, values.astype(np.float16) if format.kind == "f16" else values)
    groups = k // format.group
    top = {"int4": 16, "nf4": 16, "int8": 256, "fp8_e4m3": 126}[format.kind]
    codes = rng.integers(0, top, (n, k)).astype(np.uint8)
    scales = rng.uniform(0.01, 0.1, (n, groups)).astype(np.float16 if format.scales == "f16" else np.float32)
    zeros: np.ndarray | None = None
    if format.zero == "int":
        zeros = rng.integers(0, 16, (n, groups)).astype(np.uint8)
    elif format.zero == "min":
        zeros = rng.standard_normal((n, groups)).astype(np.float16)
    return WeightTensor(format, codes.view(np.int8) if format.kind == "int8" else codes, scales, zeros)


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_a_packed_weight_has_its_values_still(format: WeightFormat) -> None:
    weight = weight_of(format, 40, 160 if format.group != 64 else 192)
    packed = pack.pack(format, weight.data, weight.scales, weight.zeros)
    np.testing.assert_array_equal(pack.values(format, packed, *weight.shape), weight.dequantize())


def cache(kind: str, heads: int = 2, dim: int = 64, block: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """(arena, tables): two sequences of at most three blocks."""
    stride = 2 * heads * block * KVFormat(kind).head_bytes(dim)
    return torch.zeros(7, stride, dtype=torch.uint8), torch.tensor([[3, 1, 4], [6, 0, 5]], dtype=torch.int32)


def stores(kind: str, dtype: torch.dtype) -> tuple[object, ...]:
    arena, tables = cache(kind)
    slots, positions = torch.tensor([0] * 40 + [1] * 9).int(), torch.tensor([*range(40), *range(9)]).int()
    k, v = (random(49, 2, 64, dtype=dtype, seed=seed) for seed in (1, 2))
    return k, v, arena, tables, slots, positions, kind, 16, 0


def attention(kind: str, dtype: torch.dtype, **named: object) -> tuple[tuple[object, ...], dict[str, object]]:
    stored = stores(kind, dtype)
    torch_cpu.store_kv(*stored)  # type: ignore[arg-type]
    q = random(5, 8, 64, dtype=dtype, seed=3)
    return (q, stored[2], stored[3], [3, 2], [37, 7], kind, 2, 16, 0.125), named


def packed_int4() -> torch.Tensor:
    weight = weight_of(FORMATS[0], 40, 128)
    return torch.from_numpy(pack.pack(FORMATS[0], weight.data, weight.scales, weight.zeros))


CALLS: dict[str, Callable[[], tuple[tuple[object, ...], dict[str, object]]]] = {
    "rms_norm": lambda: ((random(2, 3, 256), random(256, seed=1), 1e-5), {}),
    "add_rms_norm": lambda: ((random(3, 256), random(3, 256, seed=2), random(256, seed=1), 1e-5), {}),
    "rms_norm_quantize": lambda: ((random(3, 256), random(256, seed=1), 1e-5, torch.int8), {}),
    "act_mul": lambda: ((random(3, 128), "silu"), {}),
    "linear": lambda: ((random(2, 3, 128), packed_int4(), FORMATS[0].name, 40, random(40)), {}),
    "store_kv": lambda: (stores("int8", torch.float16), {}),
    "paged_attention": lambda: attention("fp8_e4m3", torch.float16, window=20, sinks=torch.zeros(8)),
}


@pytest.mark.parametrize("name", CALLS)
def test_torch_finds_nothing_wrong_with_the_op(name: str) -> None:
    arguments, named = CALLS[name]()
    opcheck(getattr(OPS, name).default, arguments, named)


def copied(arguments: tuple[object, ...]) -> list[object]:
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in arguments]


@pytest.mark.parametrize("name", [name for name in CALLS if name != "paged_attention"])
def test_a_gpu_means_what_a_cpu_means(gpu: CudaOps, name: str) -> None:
    arguments, _ = CALLS[name]()
    ours, theirs = copied(arguments), copied(arguments)
    got, expected = getattr(gpu, name)(*ours), getattr(OPS, name)(*theirs)
    pairs = [*zip(ours, theirs, strict=True)] if got is None else []
    pairs += zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
    for a, b in pairs + list(zip(ours, theirs, strict=True)):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            assert a.shape == b.shape and a.dtype == b.dtype
            if a.dtype in (torch.uint8, torch.int8, torch.int32):
                assert (a.int() - b.int()).abs().max() <= (1 if name == "rms_norm_quantize" else 0)
            else:
                assert torch.allclose(a.float(), b.float(), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("kind", "dtype", "named"),
    [
        ("f32", torch.float32, {"soft_cap": 4.0}),
        ("int8", torch.float16, {"window": 20}),
        ("fp8_e4m3", torch.bfloat16, {"sinks": torch.arange(8.0), "value_scales": torch.tensor([0.5, 2.0])}),
    ],
)
def test_attention_of_a_gpu_is_that_of_a_cpu(
    gpu: CudaOps, kind: str, dtype: torch.dtype, named: dict[str, object]
) -> None:
    arguments, _ = attention(kind, dtype)
    asked = {"layer_offset": 0, "window": 0, "soft_cap": 0.0, "sinks": None, "value_scales": None, **named}
    got, expected = gpu.paged_attention(*arguments, *asked.values()), OPS.paged_attention(*arguments, **named)
    bound = BOUNDS[{torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]]
    assert (got.double() - expected.double()).abs().max() <= 2 * bound * expected.abs().max()
    assert not torch.equal(expected, OPS.paged_attention(*arguments))


def test_a_compiled_function_goes_through_the_ops() -> None:
    def feed_forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return OPS.act_mul(OPS.rms_norm(x, weight, 1e-6) * 2, "gelu_tanh")

    x, weight = random(4, 64, dtype=torch.float32), random(64, dtype=torch.float32, seed=1)
    compiled = torch.compile(feed_forward, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, weight), feed_forward(x, weight))


def test_deterministic_torch_gives_a_row_the_same_bits_in_any_company(gpu: CudaOps) -> None:
    weight = weight_of(BF16, 48, 256)
    packed = torch.from_numpy(pack.pack(BF16, weight.data))
    x = random(40, 256, dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(True)
    try:
        alone, beside = (gpu.linear(x[:n].contiguous(), packed, "bf16", 48, None) for n in (1, 40))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(alone, beside[:1])


def test_what_has_no_kernel_is_refused_with_the_reason(gpu: CudaOps) -> None:
    with pytest.raises(UsageError, match="a f16 weight with bf16 activations"):
        gpu.linear(random(1, 64, dtype=torch.bfloat16), torch.zeros(9, dtype=torch.uint8), "f16", 16, None)
    with pytest.raises(UsageError, match="paged_attention: blocks of 24 tokens; powers of two from 16 on are known"):
        (q, *rest), _ = attention("f16", torch.float16)
        rest[6] = 24
        gpu.paged_attention(q, *rest)
    assert torch_ops.CODES.keys() == {torch.float8_e4m3fn, torch.int8}
