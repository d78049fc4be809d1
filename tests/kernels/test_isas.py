"""Instruction sets side by side: wider columns change no bit of a linear, and each set can be asked for by name."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest

from llmctl.engine import config
from llmctl.kernels import _cpu, registry
from llmctl.kernels.cpu import register as cpu
from llmctl.kernels.device import read_machine
from llmctl.kernels.entry import Entry
from llmctl.kernels.errors import UsageError
from llmctl.kernels.formats import parse_weight_format
from llmctl.kernels.ops import CACHE_LINE, ActMulArgs, make_act, make_rows

from . import cases
from .cases import MAX_ROWS, Case, act_mul_case, all_cases, linear_case

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
        for rows in (13, 14, 15, 16, 17, 31, 32, 33, 40)
        for wide in (False, True)
    ),
    # Groups in several blocks, and in several spans; several panels for a thread.
    *(linear_case(parse_weight_format("int4g64"), 40, 33, k, wide=True) for k in (9216, 32768)),
    *(
        linear_case(parse_weight_format("int4g32"), 32, 65, k, wide=wide)
        for k in (416, 32768)
        for wide in (False, True)
    ),
    linear_case(parse_weight_format("int4g32min"), 31, 65, 32768, add=True),
    linear_case(parse_weight_format("int4g32"), 16, 112, 22016, wide=True),
    linear_case(parse_weight_format("int4g32"), 32, 560, 416, wide=True),
    linear_case(parse_weight_format("int4g32"), 32, 560, 16384, wide=True),
    # One that is too large for its sums to be biased.
    *(linear_case(parse_weight_format(name), 40, 33, 2048) for name in ("int4g2048", "int4g2048int", "int4g2048min")),
    *(linear_case(parse_weight_format(f"int4g{k}"), 40, 33, k, wide=wide) for k in (96, 320) for wide in (False, True)),
    linear_case(parse_weight_format("int4g128min"), 40, 33, 8192, ordered=True),
    # Outputs that are written past the caches.
    linear_case(parse_weight_format("int4g64"), 40, 13121, 64, wide=True),
    linear_case(parse_weight_format("int4g32"), 32, 16401, 64, bias=True),
]


@pytest.mark.parametrize("case", [*LINEAR, *TILED], ids=[case.name for case in [*LINEAR, *TILED]])
def test_tile_registers_have_the_bits_of_avx512(case: Case) -> None:
    if "amx" not in _cpu.isas():
        pytest.skip("no AMX here")
    assert bits_on("amx", case) == bits_on("avx512", case)


@pytest.mark.parametrize("name", ["int4g32", "int4g64min"])
@pytest.mark.parametrize(("rows", "n"), [(130, 1280), (130, 2560), (128, 2560)])
def test_tall_chunks_have_the_bits_of_avx512(name: str, rows: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if "amx" not in _cpu.isas():
        pytest.skip("no AMX here")
    monkeypatch.setattr(cases, "MAX_ROWS", rows)
    case = linear_case(parse_weight_format(name), rows, n, 192, wide=True)
    assert bits_on("amx", case) == bits_on("avx512", case)


# Groups that fill blocks, that leave some of a block empty, and of forms of every size.
WIDTHS = (16, 32, 96, 512, 544, 576, 1056, 1280)


@pytest.mark.parametrize("k", WIDTHS)
def test_activations_have_the_same_forms_on_avx512_as_on_avx2(k: int) -> None:
    if "avx512" not in _cpu.isas():
        pytest.skip("no AVX-512 here")
    case = act_mul_case(7, k, "silu")
    assert bits_on("avx512", case) == bits_on("avx2", case)


@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("seed", range(3))
def test_groups_of_any_size_have_the_same_forms_on_avx512_as_on_avx2(k: int, seed: int) -> None:
    if "avx512" not in _cpu.isas():
        pytest.skip("no AVX-512 here")
    rng = np.random.default_rng(seed)
    group = 16
    size = 10.0 ** rng.integers(-44, 39, (MAX_ROWS, k // group))
    near_one = rng.random(size.shape) < 0.7  # else no block of 16 groups would be of numbers that all are ordinary
    size[near_one] = 10.0 ** rng.integers(-3, 3, near_one.sum())
    size[rng.random(size.shape) < 0.02] = 0
    size[rng.random(size.shape) < 0.01] = np.nan
    size[rng.random(size.shape) < 0.01] = np.inf
    ties = (rng.integers(-254, 255, (MAX_ROWS, k)) + 0.5 * rng.integers(0, 2, (MAX_ROWS, k))) / 127
    with np.errstate(over="ignore", invalid="ignore"):
        up = (ties * np.repeat(size, group, axis=1)).astype(np.float32)
    args = {}
    for isa in ("avx2", "avx512"):
        args[isa] = act_mul_case(MAX_ROWS, k, "silu").make()
        args[isa].gate[:] = 100  # silu leaves it as it is
        args[isa].up[:, :k] = up
        for op in entry_on(isa, "act_mul").build(args[isa]):
            op.run()
    found, expected = (act_mul_case(MAX_ROWS, k, "silu").outputs(args[isa]) for isa in ("avx512", "avx2"))
    for name, values in expected.items():
        assert found[name].tobytes() == values.tobytes(), name


def test_row_buffers_begin_with_a_cache_line() -> None:
    act = make_act(576, 7, 2, [parse_weight_format("int4g32"), parse_weight_format("int8g64")])
    arrays = [make_rows(100, 3), act.values]
    for form in act.forms:
        arrays += [array for array in (form.codes, form.scales, form.sums, form.high) if array is not None]
    assert [array.ctypes.data % CACHE_LINE for array in arrays] == [0] * len(arrays)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("name", ["int4g64", "int4g64min", "int4g64int", "int4g32", "int8g32", "int16g32"])
def test_what_is_no_number_makes_its_row_nan_in_every_batch_and_on_every_set(name: str, value: float) -> None:
    for rows in (1, 16, 24):
        for isa in _cpu.isas():
            args = linear_case(parse_weight_format(name), rows, 33, 192, wide=name.startswith("int4")).make()
            rng = np.random.default_rng(rows)
            gate, up = (rng.standard_normal((MAX_ROWS, 192)).astype(np.float32) for _ in range(2))
            gate[0, 70], up[0, 70] = 1, value
            for op in entry_on(isa, "act_mul").build(ActMulArgs(args.batch, gate, up, "silu", args.act)):
                op.run()
            for op in entry_on(isa, "linear").build(args):
                op.run()
            assert np.isnan(args.out[0, :33]).all() and np.isfinite(args.out[1:rows, :33]).all(), (rows, isa)


@pytest.mark.parametrize("name", ["int4g32", "int4g64", "int4g32min", "int4g32int", "int8g32", "int16g32", "f32"])
def test_a_step_that_wants_no_logits_leaves_the_head_alone_on_every_set(name: str) -> None:
    for isa in _cpu.isas():
        args = linear_case(parse_weight_format(name), 16, 33, 192, logits=True).make()
        args.batch.counts[2] = 0
        before = args.out.copy()
        for op in entry_on(isa, "linear").build(args):
            op.run()
        assert np.array_equal(args.out, before), isa


def test_tile_registers_need_no_room_on_the_stack() -> None:
    if "amx" not in _cpu.isas():
        pytest.skip("no AMX here")
    case = linear_case(parse_weight_format("int4g64"), 40, 17, 16384, wide=True)
    expected, found = bits_on("avx512", case), []
    before = threading.stack_size(256 << 10)
    try:
        thread = threading.Thread(target=lambda: found.extend(bits_on("amx", case)))
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert found == expected


def entry_on(isa: str, op: str) -> Entry:
    (entry,) = (entry for entry in registry.entries() if entry.op == op and entry.isa == isa)
    return entry


def bits_on(isa: str, case: Case) -> list[bytes]:
    args = case.make()
    for op in entry_on(isa, case.op).build(args):
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
