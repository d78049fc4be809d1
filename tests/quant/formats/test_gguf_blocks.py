"""Blocks of every type that is read against the gguf library, value for value."""

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmctl.quant.formats.gguf_blocks import TYPES, read_blocks

KINDS = {kind.name: kind for kind in TYPES.values() if kind.take_apart is not None}


def expected(kind, raw):
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.name])


def read(kind, raw):
    weight = read_blocks(kind, raw.reshape(-1), (len(raw), raw.shape[1] // kind.size * kind.block))
    with np.errstate(all="ignore"):
        return weight, weight.dequantize()


def test_what_is_read_includes_all_k_quants():
    assert {"Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"} <= set(KINDS)


@pytest.mark.parametrize("name", KINDS)
@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), fill=st.sampled_from(["any", 0x00, 0xFF, 0x7B, 0x80, 0x04]))
def test_values_are_those_of_the_gguf_library_for_any_bytes(name, seed, fill):
    kind, rng = KINDS[name], np.random.default_rng(seed)
    raw = rng.integers(0, 256, (3, 2 * kind.size), dtype=np.uint8)
    if fill != "any":
        raw[1] = fill
    weight, values = read(kind, raw)
    wanted = expected(kind, raw)
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(values[finite], wanted[finite])
    assert not np.isfinite(values[~finite]).any()
    assert weight.format == kind.format and weight.shape == (3, 2 * kind.block)


@pytest.mark.parametrize("name", KINDS)
def test_blocks_of_more_than_one_chunk_are_all_read(name, monkeypatch):
    from llmctl.quant.formats import gguf_blocks

    monkeypatch.setattr(gguf_blocks, "_CHUNK_ELEMENTS", 512)
    kind = KINDS[name]
    raw = np.random.default_rng(1).integers(0, 96, (5, 3 * kind.size), dtype=np.uint8)
    np.testing.assert_array_equal(read(kind, raw)[1], expected(kind, raw))


def test_a_q3_k_product_of_128_is_held():
    kind = KINDS["Q3_K"]
    raw = np.zeros((1, kind.size), np.uint8)  # code 0 with its mask bit 0 is -4, scale 0 is -32: 128 times d
    raw[0, 108:110] = np.array([0.5], np.float16).view(np.uint8)
    _, values = read(kind, raw)
    assert (values == 64).all()
    np.testing.assert_array_equal(values, expected(kind, raw))


def test_scales_of_k_quants_are_exact_products():
    kind = KINDS["Q4_K"]
    raw = np.zeros((1, kind.size), np.uint8)
    raw[0, :4] = np.array([1.0009765625, 0.5], np.float16).view(np.uint8)  # 1 + 2**-10: eleven bits
    raw[0, 4:8], raw[0, 8:12] = 61, 3
    weight, _ = read(kind, raw)
    assert weight.scales is not None and weight.zeros is not None
    assert weight.scales.dtype == np.float32 and weight.scales[0, 0] == np.float32(1.0009765625) * 61
    assert weight.scales[0, 0] != np.float16(weight.scales[0, 0]) and weight.zeros[0, 0] == -1.5
