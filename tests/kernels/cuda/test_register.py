"""Linear layers bound by the registry for a GPU, run on the emulator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from llmctl.kernels import registry
from llmctl.kernels.cuda import register
from llmctl.kernels.cuda.emulated_machine import EmulatedMachine
from llmctl.kernels.cuda.linear_tiles import choose_tile
from llmctl.kernels.cuda.tiles import choose_attend
from llmctl.kernels.device import read_machine
from llmctl.kernels.entry import Entry
from llmctl.kernels.errors import NoKernel
from llmctl.kernels.formats import F32, WeightFormat
from llmctl.kernels.reference.weight import dequantize

from ..cases import Case, linear_case

INT4 = WeightFormat("int4", 32, "int")
CASES = [
    linear_case(F32, 7, 50, 104, bias=True),
    linear_case(F32, 33, 33, 104, bias=True, add=True, logits=True),
    linear_case(INT4, 3, 40, 96, ordered=True),
    linear_case(WeightFormat("int8", 32), 2, 17, 64, bias=True),
]


@pytest.fixture(scope="module")
def use(builds: Path) -> Iterator[Callable[..., EmulatedMachine]]:
    """Puts a machine in use, for this module only."""

    def set_machine(**changes: object) -> EmulatedMachine:
        machine = EmulatedMachine(builds, **changes)  # type: ignore[arg-type]
        register.use(machine)
        return machine

    yield set_machine
    register.use(None)


def run(case: Case, device: str, kernels: str = "auto") -> dict[str, np.ndarray]:
    args = case.make()
    for op in registry.bind("linear", args, device=device, kernels=kernels):
        op.run()
    return {name: array.copy() for name, array in case.outputs(args).items()}


def linear_entries() -> list[Entry]:
    return [entry for entry in registry.entries("cuda") if entry.op == "linear"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bound_layer_computes_what_its_weight_means(use: Callable[..., EmulatedMachine], case: Case) -> None:
    use()
    args, found = case.make(), run(case, "cuda")
    rows = len(found["out"])
    x = args.act.values[:rows].astype(np.float64)
    values = dequantize(args.weight).double().numpy()
    if args.weight.order is not None:
        x = x[:, args.weight.order]
    expected, sizes = x @ values.T, np.abs(x) @ np.abs(values.T)
    if args.bias is not None:
        expected += args.bias[: args.weight.n]
    if args.add:
        expected += args.out[:rows, : args.weight.n]
    assert np.abs(found["out"] - expected).max() <= 1e-6 * (sizes.max() + np.abs(expected).max())
    assert np.array_equal(found["rest"], args.out[rows:, : args.weight.n])


@pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.name)
def test_float32_layers_have_the_bits_of_the_cpu(use: Callable[..., EmulatedMachine], case: Case) -> None:
    if not read_machine().features.count("fma"):
        pytest.skip("this CPU's kernels round products")
    use()
    assert run(case, "cuda")["out"].tobytes() == run(case, "cpu")["out"].tobytes()


def test_what_depends_on_the_number_of_rows_is_refused_where_bits_must_not(
    use: Callable[..., EmulatedMachine],
) -> None:
    args = CASES[0].make()
    for deterministic, expected in ((True, ["cuda"]), (False, ["cuda-fast", "cuda"])):
        use(deterministic=deterministic)
        assert [entry.bits for entry in linear_entries() if entry.accepts(args) is None] == expected


def test_one_row_has_a_kernel_of_its_own_unless_bits_must_be_equal(use: Callable[..., EmulatedMachine]) -> None:
    for deterministic, expected in ((True, "linear_fma"), (False, "linear_vector")):
        use(deterministic=deterministic)
        args = linear_case(F32, 1, 50, 104, bias=True).make()
        (op,) = registry.bind("linear", args, device="cuda")
        op.run()
        assert isinstance(op, register.LinearOp)
        assert [call.kernel.template for call in op.calls[1]] == [expected]


def test_a_gpu_that_is_too_old_or_not_there_is_named(use: Callable[..., EmulatedMachine]) -> None:
    use(capability=(7, 0))
    args = CASES[0].make()
    reasons = {entry.accepts(args) for entry in linear_entries()}
    assert reasons == {"the GPU has compute capability 7.0, 7.5 is needed"}
    register.use(None)
    assert {entry.accepts(args) for entry in linear_entries()} == {"no GPU is in use"}


def test_a_gpu_without_bfloat16_computes_in_float16_and_says_so(use: Callable[..., EmulatedMachine]) -> None:
    use(capability=(7, 5))
    args = CASES[0].make()
    as_bits = dataclasses.replace(args, act=dataclasses.replace(args.act, values=args.act.values.astype(np.uint16)))
    assert {entry.accepts(as_bits) for entry in linear_entries()} == {
        "a GPU of compute capability 7.5 has no tensor cores for bf16, only for f16"
    }
    assert None in {entry.accepts(args) for entry in linear_entries()}
    with pytest.raises(NoKernel, match="no tensor cores for f32"):
        choose_attend("sm_75", "f32", "f32", "f32", 64, soft_cap=False, prefill=False)
    shape = choose_attend("sm_75", "f16", "f16", "int8", 128, soft_cap=False, prefill=False)
    assert shape.shared_bytes <= 64 << 10
    assert choose_tile(500, WeightFormat("int8", 128), 64 << 10).rows < choose_tile(500, WeightFormat("int8", 128)).rows


def test_sizes_without_a_kernel_are_refused_with_the_reason(use: Callable[..., EmulatedMachine]) -> None:
    use()
    args = linear_case(F32, 5, 20, 9).make()
    (reason,) = {entry.accepts(args) for entry in linear_entries() if entry.bits == "cuda"}
    assert reason == "9 inputs are no multiple of 8"
    with pytest.raises(NoKernel, match="no kernel for linear on cuda: .*9 inputs are no multiple of 8"):
        registry.bind("linear", args, device="cuda")
