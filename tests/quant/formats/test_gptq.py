from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from llmctl.kernels.errors import CheckpointError, UnsupportedModel
from llmctl.kernels.formats import WeightFormat
from llmctl.quant.formats import gptq
from llmctl.quant.tensor import WeightTensor

from .golden import golden, golden_config
from .test_awq import random_weight

PLAIN = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}


@pytest.mark.parametrize("kind", ["sym", "asym", "desc_act", "sym8"])
def test_linears_packed_by_autogptq_have_its_values(kind: str) -> None:
    tensors, values = golden("autogptq", kind)
    bits = 8 if kind == "sym8" else 4
    format = gptq.GptqFormat(1, bits, 32)
    linear = format.decode("m", tensors)
    expected = {"asym": "int4g32int", "sym8": "int8g32"}.get(kind, "int4g32")
    assert linear.weight.format.name == expected and format.layout("m", tensors).format == linear.weight.format
    assert (linear.weight.order is not None) == (kind == "desc_act")
    assert linear.bias is None and "bias" in tensors  # a zero bias for a layer without one
    np.testing.assert_array_equal(linear.weight.dequantize().astype(np.float16), values)


@pytest.mark.parametrize("kind", ["v2_desc_act", "v1_asym", "v1_sym8"])
@pytest.mark.parametrize("module", ["self_attn.v_proj", "mlp.down_proj"])
def test_linears_of_gptqmodel_have_its_values_under_its_config(kind: str, module: str) -> None:
    tensors, values = golden("gptqmodel", f"{kind}.{module}")
    format = gptq.detect(golden_config("gptqmodel", kind))
    assert format is not None and format.covers(f"model.layers.0.{module}") and not format.covers("lm_head")
    linear = format.decode("m", tensors)
    assert format.layout("m", tensors).format == linear.weight.format
    assert (linear.weight.order is not None) == (kind == "v2_desc_act")
    np.testing.assert_array_equal(linear.weight.dequantize().astype(np.float16), values)


@pytest.mark.parametrize("kind", ["sym", "asym", "sym8"])
def test_encoding_what_autogptq_packed_gives_its_bytes(kind: str) -> None:
    tensors, _ = golden("autogptq", kind)
    linear = gptq.GptqFormat(1, 8 if kind == "sym8" else 4, 32).decode("m", tensors)
    for name, array in gptq.encode(linear.weight, 1).items():
        np.testing.assert_array_equal(array, tensors[name])


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("ordered", [False, True])
def test_encode_then_decode_keeps_every_value_also_zero_point_0(version: int, ordered: bool) -> None:
    weight = random_weight(24, 96, 32)
    weight.zeros[3:9] = 0
    order = np.random.default_rng(1).permutation(96).astype(np.int32) if ordered else None
    weight = dataclasses.replace(weight, order=order)
    format = gptq.detect(gptq.config_of(version, 32, symmetric=False))
    assert format is not None and format.version == version
    again = format.decode("m", gptq.encode(weight, version)).weight
    if order is None:
        np.testing.assert_array_equal(again.data, weight.data)
    else:
        assert again.order is not None
        assert all(set(order[i : i + 32]) == set(again.order[i : i + 32]) for i in range(0, 96, 32))
    np.testing.assert_array_equal(again.dequantize(), weight.dequantize())


def test_large_groups_are_read_as_smaller_ones_that_kernels_have() -> None:
    weight = random_weight(16, 1024, 512)
    again = gptq.GptqFormat(2, 4, 512).decode("m", gptq.encode(weight, 2)).weight
    assert again.format.group == 128 and again.scales is not None and again.scales.shape == (16, 8)
    np.testing.assert_array_equal(again.dequantize(), weight.dequantize())


def test_missing_g_idx_means_consecutive_groups() -> None:
    weight = random_weight(16, 64, 32, "none")
    tensors = gptq.encode(weight, 1)
    del tensors["g_idx"]
    linear = gptq.GptqFormat(1, 4, 32).decode("m", tensors)
    assert linear.weight.format == WeightFormat("int4", 32)
    np.testing.assert_array_equal(linear.weight.data, weight.data)


def test_a_short_last_group_in_g_idx_becomes_smaller_equal_groups() -> None:
    tensors = gptq.encode(random_weight(16, 96, 32, "none"), 1)
    tensors["g_idx"] = np.arange(96, dtype=np.int32) // 64
    tensors["scales"], tensors["qzeros"] = tensors["scales"][:2], tensors["qzeros"][:2]
    weight = gptq.GptqFormat(1, 4, 64).decode("m", tensors).weight
    assert weight.format.group == 32 and weight.scales is not None
    np.testing.assert_array_equal(weight.scales, tensors["scales"][[0, 0, 1]].T)


def test_asymmetric_8_bits_are_refused() -> None:
    rng = np.random.default_rng(0)
    data = rng.integers(-128, 128, (8, 32), dtype=np.int8)
    tensors = gptq.encode(WeightTensor(WeightFormat("int8", 32), data, np.ones((8, 1), np.float16)), 2)
    tensors["qzeros"] += 1
    with pytest.raises(UnsupportedModel, match="asymmetric"):
        gptq.GptqFormat(2, 8, 32).decode("m", tensors)


def test_a_group_index_out_of_range_is_refused() -> None:
    tensors = gptq.encode(random_weight(16, 64, 32), 2)
    tensors["g_idx"][5] = 7
    with pytest.raises(CheckpointError, match=r"0\.\.7.*2 groups"):
        gptq.GptqFormat(2, 4, 32).decode("m", tensors)


def test_a_zero_point_of_0_in_version_1_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    weight = random_weight(16, 64, 32)
    weight.zeros[:] = 0
    gptq.GptqFormat(1, 4, 32).decode("layer.q_proj", gptq.encode(weight, 1))
    assert "layer.q_proj" in caplog.text


def test_overrides_of_gptqmodel_change_or_skip_modules() -> None:
    dynamic = {"-:.*down.*": {}, "+:.*up_proj": {"bits": 8, "group_size": 64}}
    format = gptq.detect({**PLAIN, "dynamic": dynamic})
    assert format is not None
    assert not format.covers("model.layers.0.mlp.down_proj")
    assert format.shape("model.layers.0.mlp.up_proj", {"qweight": (16, 8)}) == (8, 64)
    assert format.shape("model.layers.0.mlp.gate_proj", {"qweight": (16, 8)}) == (8, 128)


def test_auto_round_files_are_version_1() -> None:
    config = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 128}
    format = gptq.detect({**config, "extra_config": {"model.layers.0.mlp.up_proj": {"bits": 16}}})
    assert format is not None and (format.version, format.group_size) == (1, 128)
    assert not format.covers("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"checkpoint_format": "marlin"}, "marlin"),
        ({"is_marlin_format": True}, "marlin"),
        ({"checkpoint_format": "gptq_p"}, "gptq_p"),
        ({"bits": 3}, "3 bits"),
    ],
)
def test_other_layouts_are_refused_by_name(change: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        gptq.detect({**PLAIN, **change})


def test_a_flag_of_old_files_that_says_plain_is_accepted() -> None:
    assert gptq.detect({**PLAIN, "is_marlin_format": False}) == gptq.GptqFormat(1, 4, 32)
