"""Checkpoints of every tool become one layout, and its kernels compute what the checkpoint means."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmctl.kernels.cuda import linear_tiles as tiles
from llmctl.kernels.cuda.emulate import Emulation, build
from llmctl.kernels.cuda.linear import Addresses, Linear, gather_call, mma_calls
from llmctl.kernels.cuda.pack import interleave, pack, parts
from llmctl.kernels.errors import UsageError
from llmctl.kernels.formats import WeightFormat
from llmctl.quant.formats import awq, gptq
from llmctl.quant.tensor import WeightTensor

from .linear_worlds import LIMITS, ended, exact, stored

INT4 = WeightFormat("int4", 32, "int")
STORE, SILU = Linear("f16", INT4, 48, 128), Linear("f16", INT4, 96, 128, "silu")
TILE = tiles.TILES[0]


@pytest.fixture(scope="module")
def emulation(builds: Path) -> Emulation:
    at = Addresses(0, 0, 0)
    calls = [*mma_calls(STORE, 1, at, TILE, 1, 2), *mma_calls(SILU, 1, at, TILE, 1, 2)]
    return build([call.kernel for call in (*calls, gather_call("f16", 1, 2, out=0, x=0, order=0))], "checked", builds)


def random_weight(seed: int) -> WeightTensor:
    rng = np.random.default_rng(seed)
    codes, zeros = (rng.integers(0, 16, (48, k), dtype=np.uint8) for k in (128, 4))
    scales = rng.uniform(0.01, 0.05, (48, 4)).astype(np.float16)
    return WeightTensor(INT4, codes, scales, zeros)


def packed(weight: WeightTensor) -> np.ndarray:
    return pack(weight.format, weight.data, weight.scales, weight.zeros)


def decoded(tool: str, weight: WeightTensor) -> WeightTensor:
    """The weight after a way through the files of this tool."""
    if tool == "awq":
        format = awq.detect(awq.config_of(32))
        tensors = awq.encode(weight)
    else:
        version = int(tool[-1])
        format = gptq.detect(gptq.config_of(version, 32, symmetric=False))
        tensors = gptq.encode(weight, version)
    assert format is not None
    return format.decode("m", tensors).weight


def multiply(emulation: Emulation, layer: Linear, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    y = np.zeros((len(x), layer.width), np.float16)
    for name, array in (("y", y), ("x", x), ("weight", weight)):
        emulation.register(array.ctypes.data, array.nbytes, name, read_only=name != "y")
    for call in mma_calls(layer, len(x), Addresses(y.ctypes.data, x.ctypes.data, weight.ctypes.data), TILE, 1, 2):
        emulation.launch(call.kernel, call.grid, call.threads, call.shared_bytes, call.arguments)
    assert emulation.reports() == ()
    emulation.forget()
    return y


def test_awq_and_gptq_files_of_one_weight_are_packed_to_the_same_bytes() -> None:
    weight = random_weight(1)
    expected = packed(weight).tobytes()
    for tool in ("awq", "gptq1", "gptq2"):
        assert packed(decoded(tool, weight)).tobytes() == expected, tool


def test_act_order_is_a_permutation_of_the_inputs(emulation: Emulation) -> None:
    weight, rng = random_weight(2), np.random.default_rng(5)
    order = rng.permutation(128).astype(np.int32)
    scattered = WeightTensor(INT4, weight.data, weight.scales, weight.zeros, order)
    read = decoded("gptq2", scattered)
    assert read.order is not None
    x = stored(rng.standard_normal((5, 128)), "f16")
    ordered = np.zeros_like(x)
    call = gather_call("f16", 5, 128, out=ordered.ctypes.data, x=x.ctypes.data, order=read.order.ctypes.data)
    for name, array in (("ordered", ordered), ("x", x), ("order", read.order)):
        emulation.register(array.ctypes.data, array.nbytes, name, read_only=name != "ordered")
    emulation.launch(call.kernel, call.grid, call.threads, call.shared_bytes, call.arguments)
    emulation.forget()
    y = multiply(emulation, STORE, packed(read), ordered)
    values, x64 = read.dequantize().astype(np.float64), exact(x, "f16")
    size = (np.abs(x64) @ np.abs(values.T)).max()
    assert np.abs(y - x64 @ values.T).max() <= LIMITS["f16"] * size


def test_gate_and_up_share_a_weight_and_a_kernel(emulation: Emulation) -> None:
    gate, up = random_weight(3), random_weight(4)
    both = [
        interleave(a, b)
        for a, b in ((gate.data, up.data), (gate.scales, up.scales), (gate.zeros, up.zeros))
        if a is not None and b is not None
    ]
    x = stored(np.random.default_rng(6).standard_normal((4, 128)), "f16")
    y = multiply(emulation, SILU, pack(INT4, *both), x)
    values = interleave(gate.dequantize(), up.dequantize()).astype(np.float64)
    expected = ended(SILU, exact(x, "f16") @ values.T, None)
    assert np.abs(y - expected).max() <= LIMITS["f16"] * np.abs(expected).max()


@pytest.mark.parametrize("name", ["int4", "nf4", "int8", "fp8_e4m3", "f16", "bf16", "f32"])
def test_parts_are_whole_vectors_for_any_sizes(name: str) -> None:
    for n, k in ((1, 32), (16, 64), (50, 96), (17, 160)):
        format = WeightFormat(name) if name in ("f16", "bf16", "f32") else WeightFormat(name, 32)
        found = parts(format, n, k)
        assert found.codes.start == 0
        assert (found.codes.stop, found.scales.stop) == (found.scales.start, found.zeros.start)
        assert all(part.stop % 16 == 0 for part in (found.codes, found.scales, found.zeros))


def test_what_has_no_layout_is_refused_with_what_has() -> None:
    with pytest.raises(UsageError, match="group 48 has no CUDA layout"):
        parts(WeightFormat("int4", 48), 16, 96)
    with pytest.raises(UsageError, match="100 inputs are no multiple of group 32"):
        parts(WeightFormat("int4", 32), 16, 100)
    with pytest.raises(UsageError, match="no CUDA layout for weight format int8g32min"):
        parts(WeightFormat("int8", 32, "min"), 16, 64)
    with pytest.raises(UsageError, match="cannot share a weight"):
        interleave(np.zeros((12, 4)), np.zeros((12, 4)))


def test_a_nan_in_float8_is_refused() -> None:
    with pytest.raises(UsageError, match="holds a NaN"):
        pack(WeightFormat("fp8_e4m3", 32), np.full((1, 32), 0xFF, np.uint8), np.ones((1, 1), np.float16))
