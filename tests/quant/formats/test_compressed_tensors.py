from __future__ import annotations

import numpy as np
import pytest

from llmctl.kernels.errors import CheckpointError, UnsupportedModel
from llmctl.kernels.formats import WeightFormat
from llmctl.quant.formats import compressed_tensors
from llmctl.quant.formats.compressed_tensors import CompressedFormat, config_of, detect, encode
from llmctl.quant.tensor import WeightTensor

from .golden import golden
from .test_awq import random_weight

FORMATS = {
    "sym": WeightFormat("int4", 64),
    "asym": WeightFormat("int4", 64, "int"),
    "asym16": WeightFormat("int4", 32, "int"),
    "sym8": WeightFormat("int8", 64),
}


def detected(format: WeightFormat) -> CompressedFormat:
    found = detect(config_of(format))
    assert found is not None
    return found


@pytest.mark.parametrize("kind", FORMATS)
def test_linears_packed_by_compressed_tensors_have_its_values(kind: str) -> None:
    tensors, values = golden("compressed", kind)
    format = detected(FORMATS[kind])
    linear = format.decode("m", tensors)
    assert linear.weight.format == format.layout("m", tensors).format == FORMATS[kind]
    np.testing.assert_array_equal(linear.weight.dequantize(), values)


def test_one_scale_per_output_is_one_group() -> None:
    tensors, values = golden("compressed", "channel")
    config = config_of(WeightFormat("int4", 64))
    config["config_groups"]["group_0"]["weights"].update(strategy="channel", group_size=None)
    linear = detect(config).decode("m", tensors)
    assert linear.weight.format == WeightFormat("int4", 128)
    np.testing.assert_array_equal(linear.weight.dequantize(), values)


def test_encoding_what_compressed_tensors_packed_gives_its_bytes() -> None:
    tensors, _ = golden("compressed", "asym16")
    again = encode(detected(FORMATS["asym16"]).decode("m", tensors).weight)
    assert again.keys() == tensors.keys()
    for name, array in again.items():
        np.testing.assert_array_equal(array, tensors[name])


@pytest.mark.parametrize("zero", ["int", "none"])
def test_encode_then_decode_keeps_every_value_for_any_number_of_outputs(zero: str) -> None:
    weight = random_weight(13, 96, 32, zero)
    again = detected(weight.format).decode("m", encode(weight)).weight
    assert again.format == weight.format
    np.testing.assert_array_equal(again.dequantize(), weight.dequantize())


def test_one_scale_per_tensor_is_repeated() -> None:
    weight = random_weight(8, 32, 32, "none")
    tensors = encode(weight)
    tensors["weight_scale"] = weight.scales[:1, 0]
    config = config_of(weight.format)
    config["config_groups"]["group_0"]["weights"].update(strategy="tensor", group_size=None)
    again = detect(config).decode("m", tensors).weight
    assert (again.scales == weight.scales[0, 0]).all() and again.scales.shape == (8, 1)


def test_inputs_scattered_over_groups_are_gathered() -> None:
    weight = random_weight(8, 64, 32)
    order = np.random.default_rng(2).permutation(64)
    tensors = encode(WeightTensor(weight.format, weight.data[:, np.argsort(order)], weight.scales, weight.zeros))
    tensors["weight_g_idx"] = (np.argsort(order) // 32).astype(np.int32)
    format = detected(weight.format)
    linear = format.decode("m", tensors)
    assert linear.weight.order is not None and format.layout("m", tensors).format == linear.weight.format
    np.testing.assert_array_equal(linear.weight.dequantize(), weight.dequantize()[:, np.argsort(order)])


def test_scales_that_float16_cannot_hold_are_refused() -> None:
    tensors = encode(random_weight(8, 32, 32))
    tensors["weight_scale"] = np.full((8, 1), 1.0 + 2**-20, np.float32)
    with pytest.raises(CheckpointError, match="float16"):
        detected(WeightFormat("int4", 32, "int")).decode("m", tensors)


def test_zero_points_of_more_than_their_bits_are_refused() -> None:
    format = detected(FORMATS["asym"])
    tensors = encode(random_weight(16, 128, 64, "int"))
    fitting = np.full((16, 2), -8, np.int8)
    assert np.all(format.decode("m", {**tensors, "weight_zero_point": fitting}).weight.zeros == 0)
    with pytest.raises(CheckpointError, match="from 9 to 9: 4 bits hold -8 to 7"):
        format.decode("m", {**tensors, "weight_zero_point": fitting + 17})


def test_modules_are_matched_as_the_library_does() -> None:
    config = config_of(WeightFormat("int4", 32), ignored=("lm_head", "re:.*gate$"))
    groups = config["config_groups"]
    groups["group_0"]["targets"] = ["re:.*down_proj"]
    groups["group_1"] = {"targets": ["Linear"], "weights": {**groups["group_0"]["weights"], "num_bits": 8}}
    format = detect(config)
    assert not format.covers("lm_head") and not format.covers("model.layers.0.mlp.gate")
    assert format.covers("model.layers.0.mlp.gate_proj")
    assert format.shape("model.layers.0.mlp.down_proj", {"weight_packed": (3, 8)}) == (3, 64)
    assert format.shape("model.layers.0.mlp.up_proj", {"weight_packed": (3, 8)}) == (3, 32)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("format",), "float-quantized", "float-quantized"),
        (("transform_config",), {"config_groups": {"R1": {}}}, "transform_config"),
        (("sparsity_config",), {"format": "sparse-24-bitmask"}, "sparsity_config"),
        (("config_groups", "group_0", "input_activations"), {"num_bits": 8}, "input_activations"),
        (("config_groups", "group_0", "weights", "num_bits"), 3, "3 bits"),
        (("config_groups", "group_0", "weights", "type"), "float", "type float"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(path: tuple[str, ...], value: object, named: str) -> None:
    config = config_of(WeightFormat("int4", 32))
    target = config
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(UnsupportedModel, match=named):
        compressed_tensors.detect(config)
