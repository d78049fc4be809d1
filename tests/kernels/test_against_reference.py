"""Every registered kernel computes what the reference computes."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from llmctl.kernels import registry
from llmctl.kernels.ops import NO_QUAD
from llmctl.kernels.reference import ENTRIES as REFERENCE
from llmctl.kernels.reference.act import cut, quantize

from .cases import Case, all_cases

# Largest error allowed, relative to the largest value of the output. Stored keys and values may round the other way.
TOLERANCES = {
    "exact": 0.0,
    "f32": 3e-6,
    "f16": 3e-6,
    "bf16": 3e-6,
    "int8": 3e-6,
    "int16": 3e-6,
    "int4": 3e-6,
    "kv_f32": 1e-6,
    "kv_f16": 2.0**-11,
    "kv_bf16": 2.0**-8,
    "kv_fp8_e4m3": 2.0**-3,
    "kv_fp8_e5m2": 2.0**-2,
    "kv_int8": 2.0**-6,
    "kv_int16": 2.0**-10,
    "attend_int16": 2.0**-9,
    "latent_f32": 3e-6,
    "latent_f16": 2.0**-10,
    "latent_bf16": 2.0**-7,
}

ENTRIES = registry.entries()
CASES = list(all_cases())
PAIRS = [(entry, case) for entry in ENTRIES for case in CASES if case.op == entry.op]


def test_every_op_has_cases():
    assert {entry.op for entry in ENTRIES} == {case.op for case in CASES} | {"sample"}  # test_sampling.py


@pytest.mark.parametrize(("entry", "case"), PAIRS, ids=[f"{e.bits}-{c.op}-{c.name}" for e, c in PAIRS])
def test_a_kernel_computes_what_the_reference_computes(entry, case):
    expected = expected_of(case)
    ours = run(entry, case)
    assert ours.keys() == expected.keys()
    limit = TOLERANCES[case.dtype]
    for name in expected:
        if name.endswith((".codes", ".scales", ".sums", ".high")):
            continue  # of values that may differ in the last bit: test_forms_are_those_of_the_values
        size = np.abs(expected[name]).max(initial=0)
        assert np.isfinite(ours[name]).all(), name
        error = np.abs(ours[name].astype(np.float64) - expected[name]).max(initial=0)
        assert error <= limit * size, (name, error, size)


FORMED = [(e, c) for e, c in PAIRS if c.op in ("norm", "attend", "latent", "act_mul")]


@pytest.mark.parametrize(("entry", "case"), FORMED, ids=[f"{e.bits}-{c.op}-{c.name}" for e, c in FORMED])
def test_forms_are_those_of_the_values(entry, case):
    ours = run(entry, case)
    for name in ours:
        if name.endswith(".codes"):
            form = name.removesuffix(".codes")
            index, kind, group = form.split(".")
            values = torch.from_numpy(ours["values"][:, ours[f"{index}.order"]])
            wide = ours.get(f"{index}.wide")
            codes, scales, sums = quantize(values, kind, int(group), wide)
            if wide is None:
                assert np.array_equal(ours[name], codes.numpy()), name
            else:
                parts, high = cut(codes, wide, int(group))
                assert np.array_equal(ours[name], parts.numpy()), name
                assert np.array_equal(ours[f"{form}.high"], high[:, wide != NO_QUAD].numpy()), name
            assert np.array_equal(ours[f"{form}.scales"], scales.numpy()), name
            assert np.array_equal(ours[f"{form}.sums"], sums.numpy()), name


ALONE = [(e, c) for e, c in PAIRS if c.op != "kv_copy"]


@pytest.mark.parametrize(("entry", "case"), ALONE, ids=[f"{e.bits}-{c.op}-{c.name}" for e, c in ALONE])
def test_a_row_gives_the_same_bits_alone_and_in_company(entry, case):
    together, alone = (run(entry, case, only_one_row=only) for only in (False, True))
    for name in together:
        if name not in ("arena", "other layers", "rest"):
            assert together[name][0].tobytes() == alone[name][0].tobytes(), name


@functools.cache
def expected_of(case: Case) -> dict[str, np.ndarray]:
    return run(next(entry for entry in REFERENCE if entry.op == case.op), case)


def run(entry, case: Case, *, only_one_row: bool = False) -> dict[str, np.ndarray]:
    """Outputs of one run on a world of its own."""
    args = case.make()
    if only_one_row:
        args.batch.counts[:3] = 1
        args.batch.seq_rows[0] = 1
    refusal = entry.accepts(args)
    if refusal is not None and refusal.startswith("this CPU has no"):
        pytest.skip(refusal)
    assert refusal is None, refusal
    built = entry.build(args)
    if case.op == "kv_copy":
        built(4, 1, args.block_size // 2 + 1)
        built(0, 2, args.block_size)
        built(3, 0, 1)
    else:
        for op in built:
            op.run()
    return {name: array.copy() for name, array in case.outputs(args).items()}
