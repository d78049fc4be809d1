from __future__ import annotations

import json

import numpy as np
import pytest

from llmctl.kernels.errors import CheckpointError, UnsupportedModel
from llmctl.kernels.formats import NF4_VALUES
from llmctl.quant.formats.bitsandbytes import decode_nf4

STATE = "weight.quant_state.bitsandbytes__nf4"


def stored(n: int, k: int, *, nested: bool, blocksize: int = 64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(n + k)
    blocks = n * k // blocksize
    state = {"quant_type": "nf4", "blocksize": blocksize, "dtype": "bfloat16", "shape": [n, k]}
    tensors = {
        "weight": rng.integers(0, 256, (n * k // 2, 1), dtype=np.uint8),
        "weight.quant_map": np.array(NF4_VALUES, np.float32),
        "weight.absmax": rng.uniform(0.01, 0.1, blocks).astype(np.float32),
    }
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.05}
        tensors["weight.absmax"] = rng.integers(0, 256, blocks, dtype=np.uint8)
        tensors["weight.nested_quant_map"] = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
        tensors["weight.nested_absmax"] = rng.uniform(0.01, 0.04, -(-blocks // 256)).astype(np.float32)
    tensors[STATE] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return tensors


def values_of(tensors: dict[str, np.ndarray], shape: tuple[int, int]) -> np.ndarray:
    """As bitsandbytes reads it, value by value."""
    scales = tensors["weight.absmax"]
    if "weight.nested_absmax" in tensors:
        nested = tensors["weight.nested_absmax"]
        codes = tensors["weight.nested_quant_map"][scales]
        scales = np.array([c * nested[i // 256] + np.float32(0.05) for i, c in enumerate(codes)], np.float32)
    flat = []
    for i, byte in enumerate(tensors["weight"].reshape(-1)):
        flat += [np.float32(NF4_VALUES[code]) * scales[2 * i // 64] for code in (byte >> 4, byte & 15)]
    return np.array(flat, np.float32).reshape(shape)


@pytest.mark.parametrize("nested", [False, True])
def test_linears_have_the_values_that_bitsandbytes_gives_them(nested: bool) -> None:
    tensors = stored(24, 768, nested=nested)
    weight = decode_nf4("m", tensors).weight
    assert weight.format.name == "nf4g64-f32"
    np.testing.assert_array_equal(weight.dequantize(), values_of(tensors, (24, 768)))


def test_blocks_across_rows_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="blocks of 64 values across its rows of 96 inputs"):
        decode_nf4("m", stored(2, 96, nested=False))


def test_a_table_of_its_own_is_refused() -> None:
    tensors = stored(2, 64, nested=False)
    tensors["weight.quant_map"] = tensors["weight.quant_map"] * np.float32(2)
    with pytest.raises(UnsupportedModel, match="a table of its own"):
        decode_nf4("m", tensors)


def test_a_state_that_cannot_be_read_is_an_error() -> None:
    tensors = stored(2, 64, nested=False)
    tensors[STATE] = np.frombuffer(b"{}", np.uint8)
    with pytest.raises(CheckpointError, match="cannot be read"):
        decode_nf4("m", tensors)
