"""What storing a weight in another format costs, and that it is said."""

from pathlib import Path

import numpy as np
import pytest

from llmctl.engine.load.convert import convert, roundings, target_format
from llmctl.kernels.cpu.pack import check_layout
from llmctl.kernels.errors import UsageError
from llmctl.kernels.formats import BF16, F16, F32, INT16, WeightFormat
from llmctl.quant.formats.gguf_blocks import TYPES, read_blocks
from llmctl.quant.formats.stored import StoredTensor
from llmctl.quant.tensor import WeightTensor

KINDS = {kind.name: kind for kind in TYPES.values() if kind.take_apart is not None}
EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q3_K", "IQ4_NL")
Q6_K, Q4_K = (KINDS[name].format for name in ("Q6_K", "Q4_K"))


def some_weight(kind, rows=16, seed=0):
    """Random blocks with scales as trained models have them: about 2**-12 for the float16 of a block."""
    raw = np.random.default_rng(seed).integers(0, 256, (rows, 1024 // kind.block, kind.size), dtype=np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind.name)
    for at in halves or ((0, 2) if kind.format.zero == "min" else (0,)):
        scales = np.random.default_rng(at + 1).uniform(1e-4, 4e-4, raw.shape[:2]).astype(np.float16)
        raw[:, :, at : at + 2] = scales[:, :, None].view(np.uint8)
    return read_blocks(kind, raw.reshape(-1), (rows, 1024))


def stored(kind, shape=(8, 1024)):
    return StoredTensor("w", kind.name, kind.format, shape, Path("x"), 0, 0)


def relative_error(weight, kept):
    exact = weight.dequantize().astype(np.float64)
    return float(np.sqrt(((kept.dequantize() - exact) ** 2).mean() / (exact**2).mean()))


@pytest.mark.parametrize("name", KINDS)
def test_every_type_becomes_a_format_that_kernels_read(name):
    target = target_format(KINDS[name].format, "auto", 1024)
    check_layout(target, 1024)
    assert (target == KINDS[name].format) == (name in EXACT)


@pytest.mark.parametrize("name", KINDS)
def test_float32_keeps_every_value(name):
    weight = some_weight(KINDS[name])
    assert target_format(weight.format, "float32", 1024) == F32
    np.testing.assert_array_equal(convert("w", weight, F32).data, weight.dequantize())
    assert roundings([stored(KINDS[name])], "float32") == ()


@pytest.mark.parametrize(
    ("name", "most"),
    [("Q4_K", 3e-4), ("IQ4_XS", 3e-4), ("Q6_K", 8e-3), ("Q5_K", 8e-3), ("Q5_1", 8e-3), ("Q2_K", 8e-3)],
)
def test_what_is_rounded_moves_little(name, most):
    weight = some_weight(KINDS[name])
    target = target_format(weight.format, "auto", 1024)
    assert 0 < relative_error(weight, convert("w", weight, target)) < most


def test_of_two_q6_k_groups_the_larger_keeps_its_codes():
    codes = np.random.default_rng(0).integers(-32, 32, (4, 64), dtype=np.int8)
    scales = np.float32([[2.0, 1.5, -1.0, 4.0]] * 4) / 1024
    kept = convert("w", WeightTensor(Q6_K, codes, scales), WeightFormat("int8", 32))
    values, exact = kept.dequantize(), WeightTensor(Q6_K, codes, scales).dequantize()
    larger = np.r_[0:16, 48:64]
    np.testing.assert_array_equal(values[:, larger], exact[:, larger])
    assert (np.abs(values - exact).max(1) <= 4 / 1024 / 4).all()


def test_a_group_of_zeros_stays_zero():
    weight = WeightTensor(Q6_K, np.zeros((1, 32), np.int8), np.float32([[0, 3]]))
    assert (convert("w", weight, WeightFormat("int8", 32)).dequantize() == 0).all()


def test_floats_of_16_bits_keep_14_bits_of_the_largest_of_their_group_and_exactly_what_is_a_quarter_of_it():
    rng = np.random.default_rng(3)
    exact = (rng.standard_normal((64, 96)) * 10.0 ** rng.uniform(-6, 3, (64, 96))).astype(np.float16)
    kept = convert("w", WeightTensor(F16, exact), INT16)
    grouped, values = (x.astype(np.float64).reshape(64, 3, 32) for x in (exact, kept.dequantize()))
    largest = np.abs(grouped).max(2, keepdims=True)
    assert np.abs(kept.data.astype(int)).max() <= 8192
    assert (np.abs(values - grouped) <= largest * 2.0**-13).all()
    is_large = np.abs(grouped) >= largest / 4
    np.testing.assert_array_equal(values[is_large], grouped[is_large])


def test_the_smallest_and_the_largest_bfloat16_are_kept():
    values = np.float32([[2.0**127 * 1.5] + [1.0] * 31, [2.0**-120] * 32, [2.0**-133] * 32, [0.0] * 32])
    kept = convert("w", WeightTensor(BF16, (values.view(np.uint32) >> 16).astype(np.uint16)), INT16).dequantize()
    assert kept[0, 0] == values[0, 0] and (kept[0, 1:] == 0).all()
    np.testing.assert_array_equal(kept[1:], values[1:] * [[1], [0], [1]])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_none_and_harms_its_own_group_alone(bad):
    values = np.ones((2, 64), np.float16)
    values[1, 40] = bad
    kept = convert("w", WeightTensor(F16, values), INT16).dequantize()
    assert not np.isfinite(kept[1, 40]) and (kept[0] == 1).all() and (kept[1, :32] == 1).all()


def test_a_width_that_is_no_multiple_of_a_group_stays_as_it_is():
    assert target_format(F16, "auto", 48) == F16
    assert target_format(F16, "auto", 64) == target_format(BF16, "auto", 64) == INT16
    assert target_format(F16, "float16", 64) == F16 and target_format(BF16, "native", 64) == BF16


def test_a_scale_that_float16_cannot_hold_is_an_error_with_a_way_out():
    weight = WeightTensor(Q4_K, np.ones((1, 32), np.uint8), np.float32([[7e4]]), np.float32([[0]]))
    with pytest.raises(UsageError, match="tensor `w` has scale 70000") as caught:
        convert("w", weight, target_format(Q4_K, "auto", 32))
    assert "float32" in caught.value.hint


def test_what_is_not_kept_is_said_once_per_type():
    tensors = [stored(KINDS[name]) for name in ("Q6_K", "Q4_K", "Q4_K", "Q8_0")]
    assert roundings(tensors, "auto") == (
        "Q4_K stored as int4g32min: scales rounded to float16",
        "Q6_K stored as int8g32: values rounded to 8 bits",
    )
    assert roundings([stored(KINDS[name]) for name in EXACT], "auto") == ()
