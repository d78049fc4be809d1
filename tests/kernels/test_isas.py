"""Instruction sets side by side: wider columns change no bit of a linear, and each set can be asked for by name."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from llmctl.engine import config
from llmctl.kernels import _cpu, registry
from llmctl.kernels.cpu import register as cpu
from llmctl.kernels.device import read_machine
from llmctl.kernels.errors import UsageError
from llmctl.kernels.formats import parse_weight_format

from .cases import Case, all_cases, linear_case

HEIGHTS = [
    linear_case(parse_weight_format(name), rows, 33, 192)
    for name in ("f32", "f16", "bf16", "int16g32", "int8g32", "int4g32", "int4g64", "int4g32min", "int4g64int")
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 17, 24)
]
LINEAR = [*HEIGHTS, *(case for case in all_cases() if case.op == "linear")]


@pytest.mark.parametrize("case", LINEAR, ids=[case.name for case in LINEAR])
def test_avx512_columns_have_the_bits_of_avx2(case: Case) -> None:
    if "avx512" not in _cpu.isas():
        pytest.skip("no AVX-512 here")
    assert bits_on("avx512", case) == bits_on("avx2", case)


TILED = [
    *(
        linear_case(parse_weight_format(name), rows, 33, 384, wide=wide, add=wide, bias=not wide)
        for name in ("int4g32", "int4g32min", "int4g32int", "int4g64", "int4g128min", "int4g128int")
        for rows in (13, 14, 16, 17, 31, 32, 33, 40)
        for wide in (False, True)
    ),
    # Rows in several parts.
    *(linear_case(parse_weight_format("int4g64"), 40, 33, k, wide=True) for k in (9216, 32768)),
    *(linear_case(parse_weight_format(f"int4g{k}"), 40, 33, k, wide=wide) for k in (96, 320) for wide in (False, True)),
    linear_case(parse_weight_format("int4g128min"), 40, 33, 8192, ordered=True),
]


@pytest.mark.parametrize("case", [*LINEAR, *TILED], ids=[case.name for case in [*LINEAR, *TILED]])
def test_tile_registers_have_the_bits_of_avx512(case: Case) -> None:
    if "amx" not in _cpu.isas():
        pytest.skip("no AMX here")
    assert bits_on("amx", case) == bits_on("avx512", case)


def bits_on(isa: str, case: Case) -> list[bytes]:
    args = case.make()
    (entry,) = (entry for entry in registry.entries() if entry.op == case.op and entry.isa == isa)
    for op in entry.build(args):
        op.run()
    return [array.tobytes() for array in case.outputs(args).values()]


def test_every_instruction_set_of_the_table_is_a_choice() -> None:
    assert registry.KERNELS == config.KERNELS
    assert [isa.name for isa in cpu.ISAS if isa.name in _cpu.isas()] == _cpu.isas()[::-1]


def test_an_instruction_set_is_bound_by_name() -> None:
    for name in _cpu.isas():
        assert registry.configure(name, 1) == (name, f"cpu-{name}")
    assert registry.configure("auto", 1)[0] == _cpu.isas()[-1]


def test_what_the_cpu_lacks_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = dataclasses.replace(read_machine(), features=("avx2", "fma", "f16c"))
    monkeypatch.setattr(cpu, "read_machine", lambda: lacking)
    with pytest.raises(UsageError) as refused:
        registry.configure("avx512", 1)
    assert "avx512_vnni" in refused.value.message and "generic" in refused.value.hint


def test_an_op_keeps_the_instruction_set_it_was_built_with() -> None:
    before = _cpu.isa()
    case = HEIGHTS[0]
    expected = np.frombuffer(bits_on("generic", case)[0], np.float32)
    assert _cpu.isa() == before
    assert np.allclose(np.frombuffer(bits_on(_cpu.isas()[-1], case)[0], np.float32), expected, rtol=1e-4, atol=1e-4)
