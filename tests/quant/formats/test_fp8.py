from __future__ import annotations

import numpy as np
import pytest

from llmctl.kernels.errors import CheckpointError, UnsupportedModel
from llmctl.quant.formats.compressed_tensors import CompressedFormat
from llmctl.quant.formats.detect import detect_format
from llmctl.quant.formats.fp8 import Fp8Format

BLOCKS = Fp8Format("fp8", "weight_scale_inv", (128, 128))


def codes(n: int, k: int) -> np.ndarray:
    return np.random.default_rng(n + k).integers(0, 120, (n, k), dtype=np.uint8)


def compressed(**weights: object) -> dict[str, object]:
    return {
        "quant_method": "compressed-tensors",
        "format": weights.pop("format", "float-quantized"),
        "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 8, **weights}}},
        "ignore": ["lm_head", "re:.*gate"],
    }


def test_each_tools_config_is_read() -> None:
    assert detect_format({"quant_method": "fp8", "weight_block_size": [128, 128]}) == BLOCKS
    assert detect_format({"quant_method": "fp8"}) == Fp8Format("fp8", "weight_scale")
    found = detect_format(compressed(type="float", strategy="block", block_structure=[128, 64]))
    assert found == Fp8Format("compressed-tensors", "weight_scale", (128, 64), ("lm_head",))
    assert not found.covers("lm_head") and found.covers("model.layers.0.mlp.up_proj")
    assert isinstance(detect_format(compressed(type="int", format="pack-quantized")), CompressedFormat)
    with pytest.raises(UnsupportedModel, match="float weights of several kinds"):
        detect_format(compressed(type="float", num_bits=4))
    with pytest.raises(CheckpointError, match="expected two sizes of a block"):
        detect_format({"quant_method": "fp8", "weight_block_size": 128})


@pytest.mark.parametrize(("n", "k", "group"), [(200, 256, 128), (96, 96, 96), (130, 192, 64), (5, 160, 32)])
def test_blocks_that_are_cut_keep_their_own_scale(n: int, k: int, group: int) -> None:
    scales = np.random.default_rng(k).uniform(0.1, 2, (-(-n // 128), -(-k // 128))).astype(np.float32)
    tensors = {"weight": codes(n, k), "weight_scale_inv": scales}
    weight = BLOCKS.decode("m", tensors).weight
    assert weight.format.name == f"fp8_e4m3g{group}-f32" == BLOCKS.layout("m", tensors).format.name
    ones = BLOCKS.decode("m", {**tensors, "weight_scale_inv": np.ones_like(scales)}).weight.dequantize()
    spread = scales[np.arange(n)[:, None] // 128, np.arange(k)[None, :] // 128]
    np.testing.assert_array_equal(weight.dequantize(), ones * spread)


def test_scales_that_are_powers_of_two_are_read() -> None:
    exponents = np.array([[120, 130], [127, 100]], np.uint8)
    plain = {"weight": codes(256, 256), "weight_scale_inv": np.exp2(exponents.astype(np.float32) - 127)}
    small = BLOCKS.decode("m", {**plain, "weight_scale_inv": exponents}).weight
    np.testing.assert_array_equal(small.dequantize(), BLOCKS.decode("m", plain).weight.dequantize())


def test_what_does_not_fit_together_is_an_error_that_names_the_module() -> None:
    good = {"weight": codes(256, 256), "weight_scale_inv": np.ones((2, 2), np.float32)}
    with pytest.raises(CheckpointError, match=r"`m.weight_scale_inv` has shape \[2, 3\] for a weight of 256 x 256"):
        BLOCKS.decode("m", {**good, "weight_scale_inv": np.ones((2, 3), np.float32)})
    with pytest.raises(CheckpointError, match="`m.weight_scale_inv` is missing"):
        BLOCKS.layout("m", {"weight": good["weight"]})
    with pytest.raises(CheckpointError, match="holds NaN or infinity"):
        BLOCKS.decode("m", {**good, "weight_scale_inv": np.full((2, 2), np.nan, np.float32)})
    broken = good["weight"].copy()
    broken[3, 4] = 0xFF
    with pytest.raises(CheckpointError, match="`m.weight` holds NaN"):
        BLOCKS.decode("m", {**good, "weight": broken})
    with pytest.raises(UnsupportedModel, match="200 inputs in blocks of 128"):
        BLOCKS.layout("m", {"weight": codes(8, 200), "weight_scale_inv": np.ones((1, 2), np.float32)})
