"""The panel layout holds every bit of a weight, at the places that the kernels read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmctl.kernels.cpu.pack import check_layout, pack, packed_bytes, unpack
from llmctl.kernels.errors import UsageError
from llmctl.kernels.formats import INT16, WeightFormat, parse_weight_format
from llmctl.kernels.ops import PackedWeight

NAMES = ("f32", "f16", "bf16", "int16g32", "int8g32", "int8g64", "int4g32", "int4g64min", "int4g32int", "int4g128")


def random_weight(format: WeightFormat, n: int, k: int, seed: int):
    """(data, scales, zeros) with every bit pattern that the format allows."""
    rng = np.random.default_rng(seed)
    if format.is_float:
        bits = rng.integers(0, 1 << (32 if format.kind == "f32" else 16), (n, k))
        if format.kind == "f32":
            return bits.astype(np.uint32).view(np.float32), None, None
        return bits.astype(np.uint16).view(np.float16 if format.kind == "f16" else np.uint16), None, None
    groups = k // format.group
    if format == INT16:
        return rng.integers(-(2**15), 2**15, (n, k)).astype(np.int16), rng.integers(0, 256, (n, groups), np.uint8), None
    if format.kind == "int8":
        data = rng.integers(-128, 128, (n, k)).astype(np.int8)
    else:
        data = rng.integers(0, 16, (n, k)).astype(np.uint8)
    scales = rng.standard_normal((n, groups)).astype(np.float16)
    zeros = None
    if format.zero == "min":
        zeros = rng.standard_normal((n, groups)).astype(np.float16)
    elif format.zero == "int":
        zeros = rng.integers(0, 16, (n, groups)).astype(np.uint8)
    return data, scales, zeros


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(NAMES), n=st.integers(1, 70), groups=st.integers(1, 5), seed=st.integers(0, 1 << 16))
def test_unpacking_gives_every_bit_back(name, n, groups, seed):
    format = parse_weight_format(name)
    k = groups * format.group if format.group else groups * 7
    given_arrays = random_weight(format, n, k, seed)
    packed = pack(format, *given_arrays)
    assert packed.dtype == np.uint8 and packed.size == packed_bytes(format, n, k)
    for before, after in zip(given_arrays, unpack(PackedWeight(format, n, k, packed))):
        if before is None:
            assert after is None
        else:
            assert after.dtype == before.dtype and after.tobytes() == before.tobytes()


def test_one_group_may_span_all_inputs():
    format = WeightFormat("int4", 96)
    data, scales, zeros = random_weight(format, 5, 96, 0)
    packed = PackedWeight(format, 5, 96, pack(format, data, scales, zeros))
    assert np.array_equal(unpack(packed)[0], data)


def test_a_tensor_larger_than_one_chunk_survives():
    format = WeightFormat("int4", 32, "int")
    arrays = random_weight(format, 4100, 2048, 3)
    after = unpack(PackedWeight(format, 4100, 2048, pack(format, *arrays)))
    assert all(np.array_equal(a, b) for a, b in zip(arrays, after))


def test_strided_input_is_packed_by_value():
    format = WeightFormat("f32")
    data = np.arange(64 * 6, dtype=np.float32).reshape(6, 64).T
    assert np.array_equal(pack(format, data), pack(format, np.ascontiguousarray(data)))


def test_floats_run_along_inputs_with_16_outputs_side_by_side():
    data = np.arange(20 * 3, dtype=np.float32).reshape(20, 3)
    words = pack(WeightFormat("f32"), data).view(np.float32).reshape(2, 3, 16)
    assert words[0, 2, 5] == data[5, 2] and words[1, 1, 3] == data[19, 1]
    assert not words[1, :, 4:].any()


def test_bfloat16_pairs_column_j_with_j_plus_8():
    data = np.arange(16 * 2, dtype=np.uint16).reshape(16, 2)
    words = pack(WeightFormat("bf16"), data).view(np.uint16).reshape(2, 16)
    assert list(words[1, :4]) == [data[0, 1], data[8, 1], data[1, 1], data[9, 1]]


def test_int8_groups_hold_scales_then_pairs_of_inputs():
    data, scales, _ = random_weight(WeightFormat("int8", 32), 16, 64, 1)
    packed = pack(WeightFormat("int8", 32), data, scales).reshape(2, 32 + 32 * 16)
    assert packed[1, :32].view(np.float16)[7] == scales[7, 1]
    codes = packed[1, 32:].view(np.int8).reshape(16, 16, 2)
    assert codes[4, 9, 1] == data[9, 32 + 2 * 4 + 1]


@pytest.mark.parametrize("zero", ["none", "min", "int"])
def test_int4_bytes_hold_input_i_and_i_plus_4(zero):
    format = WeightFormat("int4", 32, zero)
    data, scales, zeros = random_weight(format, 16, 64, 2)
    head = 32 if zero == "none" else 64
    packed = pack(format, data, scales, zeros).reshape(2, head + 4 * 64)
    assert packed[1, :32].view(np.float16)[3] == scales[3, 1]
    if zero != "none":
        assert packed[1, 32:64].view(np.float16)[3] == zeros[3, 1]
    vectors = packed[1, head:].reshape(4, 2, 32)
    for step, half, column, i in ((0, 0, 0, 0), (3, 1, 5, 2), (2, 0, 7, 3)):
        byte = vectors[step, half, column * 4 + i]
        row, first = half * 8 + column, 32 + step * 8
        assert byte & 15 == data[row, first + i] and byte >> 4 == data[row, first + 4 + i]


@pytest.mark.parametrize(
    ("format", "k"),
    [(WeightFormat("int4", 32), 48), (WeightFormat("int4", 48), 96), (WeightFormat("int8", 32, "min"), 64)],
)
def test_what_has_no_layout_is_refused_with_its_numbers(format, k):
    with pytest.raises(UsageError) as refused:
        check_layout(format, k)
    assert refused.value.hint
