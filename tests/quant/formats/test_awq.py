from __future__ import annotations

import numpy as np
import pytest

from llmctl.kernels.errors import CheckpointError, UnsupportedModel
from llmctl.kernels.formats import WeightFormat
from llmctl.quant.formats import awq
from llmctl.quant.tensor import WeightTensor

from .golden import golden


def random_weight(n: int, k: int, group: int, zero: str = "int", seed: int = 0) -> WeightTensor:
    rng = np.random.default_rng(seed)
    zeros = rng.integers(0, 16, (n, k // group), dtype=np.uint8) if zero == "int" else None
    scales = rng.uniform(0.001, 0.1, (n, k // group)).astype(np.float16)
    return WeightTensor(WeightFormat("int4", group, zero), rng.integers(0, 16, (n, k), dtype=np.uint8), scales, zeros)


@pytest.mark.parametrize(
    ("kind", "version", "group"), [("gemm", "gemm", 64), ("gemm_channel", "gemm", -1), ("gemv", "gemv", 64)]
)
def test_linears_packed_by_autoawq_have_its_values(kind: str, version: str, group: int) -> None:
    tensors, values = golden("autoawq", kind)
    format = awq.AwqFormat(version, group)
    linear = format.decode("m", tensors)
    assert format.layout("m", tensors).format == linear.weight.format
    assert linear.weight.format == WeightFormat("int4", 64 if group == 64 else 128, "int")
    np.testing.assert_array_equal(linear.weight.dequantize().astype(np.float16), values)
    assert linear.bias is not None
    np.testing.assert_array_equal(linear.bias.data, tensors["bias"])


def test_encoding_what_autoawq_packed_gives_its_bytes() -> None:
    tensors, _ = golden("autoawq", "gemm")
    again = awq.encode(awq.AwqFormat("gemm", 64).decode("m", tensors).weight)
    for name, array in again.items():
        np.testing.assert_array_equal(array, tensors[name])


@pytest.mark.parametrize("zero", ["int", "none"])
def test_encode_then_decode_keeps_every_value(zero: str) -> None:
    weight = random_weight(24, 96, 32, zero)
    config = awq.config_of(32)
    format = awq.detect(config)
    assert format is not None
    again = format.decode("m", awq.encode(weight)).weight
    np.testing.assert_array_equal(again.dequantize(), weight.dequantize())
    np.testing.assert_array_equal(again.data, weight.data)


def test_a_short_last_group_becomes_smaller_equal_groups() -> None:
    weight = random_weight(16, 192, 64)
    tensors = awq.encode(weight)
    tensors["qzeros"], tensors["scales"] = tensors["qzeros"][[0, 2]], tensors["scales"][[0, 2]]
    again = awq.AwqFormat("gemm", 128).decode("m", tensors).weight
    assert again.format.group == 64
    np.testing.assert_array_equal(again.scales, weight.scales[:, [0, 0, 2]])


def test_wrong_group_size_is_refused_with_both_shapes() -> None:
    with pytest.raises(CheckpointError, match=r"m.qzeros.*\[3, 2\].*\[2, 2\]"):
        awq.AwqFormat("gemm", 64).decode("m", awq.encode(random_weight(16, 96, 32)))


def test_scales_with_nan_are_refused() -> None:
    tensors = awq.encode(random_weight(8, 32, 32))
    tensors["scales"][0, 3] = np.nan
    with pytest.raises(CheckpointError, match="NaN"):
        awq.AwqFormat("gemm", 32).decode("m", tensors)


def test_config_of_old_and_new_files_is_read() -> None:
    old = awq.detect({"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"})
    assert old == awq.AwqFormat("gemm", 128)
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": -1,
        "version": "gemv",
        "modules_to_not_convert": ["vision"],
    }
    new = awq.detect(config)
    assert new == awq.AwqFormat("gemv", -1, ("vision",))
    assert not new.covers("model.vision.fc1") and not new.covers("lm_head") and new.covers("model.layers.0.mlp.up_proj")
    rounded = {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "bits": 4, "group_size": 128}
    assert awq.detect(rounded) == awq.AwqFormat("gemm", 128)
    assert awq.detect({"quant_method": "gptq", "bits": 4, "group_size": 128}) is None


@pytest.mark.parametrize(
    "change", [{"version": "marlin"}, {"version": "gemv_fast"}, {"bits": 8}, {"backend": "llm-awq"}]
)
def test_layouts_of_particular_kernels_are_refused_by_name(change: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModel, match=str(next(iter(change.values())))):
        awq.detect({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", **change})
