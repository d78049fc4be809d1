"""Layers that a library multiplies: who gets them, what they compute, and how cuBLAS is asked for it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from llmctl.engine.llm import LLM
from llmctl.engine.request import SamplingParams
from llmctl.kernels import registry
from llmctl.kernels.cpu.pack import pack
from llmctl.kernels.cuda import cublas, register
from llmctl.kernels.cuda.devices import open_machine, use_driver
from llmctl.kernels.cuda.emulated_machine import EmulatedMachine
from llmctl.kernels.cuda.gpu import Gpu
from llmctl.kernels.cuda.host_driver import HostDriver
from llmctl.kernels.cuda.library import LibraryLinear, use_library
from llmctl.kernels.formats import F16
from llmctl.kernels.ops import ROWS, LinearArgs, PackedWeight, make_act, make_batch, make_rows

from ...engine.tiny import write_checkpoint

K, N, MOST = 64, 40, 8


class Gemm:
    """cublasGemmEx as its manual has it: C = alpha op(A) op(B) + beta C, all stored by columns; float16 on the host."""

    def __init__(self, wrong: float = 0.0) -> None:
        self.wrong = wrong

    def cublasGemmEx(self, handle: object, op_a: int, op_b: int, m: int, n: int, k: int, alpha: Any, a: Any,
                     a_type: int, lda: int, b: Any, b_type: int, ldb: int, beta: Any, c: Any, c_type: int, ldc: int,
                     compute: int, algorithm: int) -> int:  # fmt: skip
        assert (op_a, op_b, compute, algorithm) == (1, 0, 68, -1) and a_type == b_type == c_type
        left = columns(a, lda, m, a_type)[:k].T
        right, into = columns(b, ldb, n, b_type)[:k], columns(c, ldc, n, c_type)
        scale, before = (pointer._obj.value for pointer in (alpha, beta))
        product = scale * left.astype(np.float32) @ right + before * into[:m] + self.wrong
        stored(c, ldc * n)[:] = bits(np.concatenate((product, into[m:])).T.reshape(-1), c_type)
        return 0


def stored(address: Any, count: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_ushort * count).from_address(address.value), np.uint16)


def columns(address: Any, leading: int, count: int, kind: int) -> np.ndarray:
    """The matrix [leading, count]."""
    raw = stored(address, leading * count).reshape(count, leading)
    values = raw.view(np.float16) if kind == 2 else (raw.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32).T


def bits(values: np.ndarray, kind: int) -> np.ndarray:
    if kind == 2:
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)  # of exact values


def library(wrong: float = 0.0) -> cublas.Cublas:
    return cublas.Cublas(Gemm(wrong), ctypes.c_void_p(1))  # type: ignore[arg-type]


@pytest.fixture
def machine(builds: Path) -> Iterator[EmulatedMachine]:
    found = EmulatedMachine(builds, deterministic=False, mode="checked")
    register.use(found)
    use_library(library())
    yield found
    register.use(None)
    use_library(None)


@dataclass(frozen=True)
class Layer:
    args: LinearArgs
    weight: np.ndarray

    def expected(self, rows: int) -> np.ndarray:
        x, args = self.args.act.values[:rows].astype(np.float64), self.args
        y = x @ self.weight.astype(np.float64).T
        if args.bias is not None:
            y = y + args.bias[:N]
        return y + args.out[:rows, :N] if args.add else y


def layer(*, bias: bool, add: bool) -> Layer:
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((N, K)).astype(np.float16)
    batch = make_batch(MOST, 1, 1, (np.zeros((1, 1), np.int32),))
    act, out = make_act(K, MOST, 1, (), dtype="f16"), make_rows(N, MOST).astype(np.float16)
    act.values[:MOST] = rng.standard_normal((MOST, K))
    out[:] = rng.standard_normal(out.shape)
    batch.counts[ROWS] = 5
    padded = np.pad(rng.standard_normal(N), (0, -N % 16)).astype(np.float32) if bias else None
    args = LinearArgs(batch, act, PackedWeight(F16, N, K, pack(F16, weight)), padded, out, add, False)
    return Layer(args, weight)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_multiplied_with_its_bias_and_what_it_is_added_to(
    machine: EmulatedMachine, bias: bool, add: bool
) -> None:
    made = layer(bias=bias, add=add)
    expected, rest = made.expected(5), made.args.out[5:].copy()
    (op,) = registry.bind("linear", made.args, device="cuda")
    assert isinstance(op, LibraryLinear)
    op.run()
    assert np.abs(made.args.out[:5, :N] - expected).max() <= 2e-3 * np.abs(expected).max()
    assert np.array_equal(made.args.out[5:], rest)


def test_only_16_bit_weights_of_a_machine_that_may_choose_go_there(machine: EmulatedMachine) -> None:
    args = layer(bias=False, add=False).args

    def kinds(of: LinearArgs) -> list[str]:
        return [entry.bits for entry in registry.entries("cuda") if entry.op == "linear" and entry.accepts(of) is None]

    assert kinds(args)[0] == "cuda-library"
    wide = replace(args.act, values=args.act.values.astype(np.float32))
    assert kinds(replace(args, act=wide, out=args.out.astype(np.float32))) == ["cuda-fast", "cuda"]
    register.use(EmulatedMachine(machine.folder, deterministic=True))
    assert kinds(args) == ["cuda"]
    register.use(machine)
    use_library(None)
    assert kinds(args) == ["cuda-fast", "cuda"]


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_a_library_that_is_wrong_in_a_trial_is_found_out(builds: Path, dtype: str) -> None:
    host = HostDriver(builds)
    use_driver(host, host.get)
    try:
        gpu = open_machine(host.devices()[0], builds, deterministic=False, compile=True)
        assert cublas._trial(library(), gpu, dtype)
        assert not cublas._trial(library(wrong=1.0), gpu, dtype)
        gpu.close()
    finally:
        use_driver(None)
        register.use(None)


@dataclass(frozen=True)
class Queued:
    """A library whose products wait on the stream like everything else."""

    host: HostDriver
    gpu: Gpu

    def multiply(self, dtype: str, y: int, x: int, weight: int, **sizes: Any) -> None:
        self.host.compute("multiply", self.gpu.stream, lambda: library().multiply(dtype, y, x, weight, **sizes))


def test_the_engine_gives_the_same_tokens_with_a_library_also_from_graphs(builds: Path, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "qwen3", dtype=torch.float16)
    host, found = HostDriver(builds), []
    prompts, params = [[5, 6, 7], [9] * 20], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for opened in (lambda gpu: None, lambda gpu: Queued(host, gpu)):
        use_driver(host, host.get, opened)
        host.calls.clear()
        try:
            options = {"max_model_len": 64, "num_gpu_blocks_override": 12, "block_size": 16}
            with LLM(str(model), process=False, device="cuda", max_num_batched_tokens=32, **options) as llm:
                found.append([output.outputs[0].token_ids for output in llm.generate(prompts, [params] * 2)])
        finally:
            use_driver(None)
    assert found[0] == found[1]
    names = [call.name for call in host.calls]
    assert "multiply" in names and "replay" in names
    assert not any("linear_" in call.kernel for call in host.launches)
