"""Checkpoints of quantization tools load as what they are, and as what they mean."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmctl.engine.load.checkpoint import Checkpoint, open_checkpoint
from llmctl.engine.load.hub import Source
from llmctl.engine.load.packed import entry_key, open_packed
from llmctl.kernels.cpu.pack import unpack
from llmctl.kernels.errors import CheckpointError, UnsupportedModel

from ..quantized import FLOAT_KINDS, KINDS, write_float, write_quantized
from ..tiny import write_checkpoint

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(Source(folder, "hf", "tiny"))


def change(folder: Path, **tensors: np.ndarray | None) -> None:
    stored = load_file(folder / "model.safetensors")
    for name, array in tensors.items():
        name = name.replace("__", ".")
        if array is None:
            del stored[name]
        else:
            stored[name] = array
    save_file(stored, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An AWQ checkpoint."""
    write_quantized(write_checkpoint(tmp_path, "llama"), "awq")
    return tmp_path


@pytest.mark.parametrize("family", ["llama", "llama-tied-bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_has_the_values_of_its_codes(tmp_path: Path, kind: str, family: str) -> None:
    values = write_quantized(write_checkpoint(tmp_path, family), kind)
    checkpoint = opened(tmp_path)
    assert set(checkpoint.tensors) == set(values)
    for name, expected in values.items():
        np.testing.assert_array_equal(checkpoint.read(name).dequantize(), expected, name)
    stored = checkpoint.tensors[Q_PROJ]
    assert stored.format is not None and stored.format.name == ("int4g32" if kind.endswith("sym") else "int4g32int")
    assert stored.format == checkpoint.read(Q_PROJ).format
    assert (stored.order is not None) == ("desc-act" in kind)


@pytest.mark.parametrize("kind", FLOAT_KINDS)
def test_float8_and_nf4_have_the_values_that_their_tools_mean(tmp_path: Path, kind: str) -> None:
    values = write_float(write_checkpoint(tmp_path / "m", "llama"), kind)
    checkpoint = opened(tmp_path / "m")
    assert set(checkpoint.tensors) == set(values)
    for name, expected in values.items():
        np.testing.assert_array_equal(checkpoint.read(name).dequantize(), expected, name)
    whole = open_packed(checkpoint.source, dtype="float32", cache=tmp_path / "cache")
    np.testing.assert_array_equal(unpack(whole.weights[Q_PROJ])[0], values[Q_PROJ])


@pytest.mark.parametrize("kind", FLOAT_KINDS)
def test_a_cpu_gets_float8_and_nf4_in_8_bits_and_says_so_a_gpu_gets_them_as_they_are(tmp_path: Path, kind: str) -> None:
    values = write_float(write_checkpoint(tmp_path / "m", "llama"), kind)
    source = Source(tmp_path / "m", "hf", "tiny")
    model = open_packed(source, cache=tmp_path / "cache")
    assert any("stored as int8g32: values rounded to 8 bits" in said for said in model.roundings)
    packed = model.weights[Q_PROJ]
    codes, scales, _ = unpack(packed)
    assert packed.format.name == "int8g32" and scales is not None
    kept = (codes.reshape(64, -1, 32) * scales.astype(np.float32)[:, :, None]).reshape(64, 64)
    step = np.abs(values[Q_PROJ]).reshape(64, -1, 32).max(2) / 127
    assert (np.abs(kept - values[Q_PROJ]) <= np.repeat(step, 32, 1) * 0.51 + 1e-7).all()
    native = open_packed(source, dtype="native", cache=tmp_path / "cache")
    assert native.roundings == ()
    packed, weight = native.weights[Q_PROJ], opened(tmp_path / "m").read(Q_PROJ)
    assert packed.format == weight.format and packed.format.kind in ("fp8_e4m3", "nf4")
    for got, expected in zip(unpack(packed)[:2], (weight.data, weight.scales), strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kind", ["awq", "gptq-v2-desc-act"])
def test_codes_reach_the_packed_cache_as_they_are_stored(tmp_path: Path, kind: str) -> None:
    write_quantized(write_checkpoint(tmp_path / "m", "llama"), kind)
    checkpoint = opened(tmp_path / "m")
    cpu, model = (open_packed(checkpoint.source, dtype=d, cache=tmp_path / "cache") for d in ("auto", "native"))
    assert cpu.weights[Q_PROJ].data.tobytes() == model.weights[Q_PROJ].data.tobytes()
    for name, packed in model.weights.items():
        weight = checkpoint.read(name)
        assert packed.format == weight.format
        data, scales, zeros = unpack(packed)
        np.testing.assert_array_equal(data, weight.data)
        if weight.scales is not None:
            np.testing.assert_array_equal(scales, weight.scales)
            np.testing.assert_array_equal(zeros, weight.zeros)
        if weight.order is None:
            assert packed.order is None
        else:
            np.testing.assert_array_equal(packed.order, weight.order)


@pytest.mark.parametrize("kind", ["awq", "gptq-v2-desc-act"])
def test_dtype_float32_unpacks_the_weights(tmp_path: Path, kind: str) -> None:
    values = write_quantized(write_checkpoint(tmp_path / "m", "llama"), kind)
    model = open_packed(Source(tmp_path / "m", "hf", "tiny"), dtype="float32", cache=tmp_path / "cache")
    for name, packed in model.weights.items():
        assert packed.format.name == "f32" and packed.order is None
        np.testing.assert_array_equal(unpack(packed)[0], values[name])


def test_a_config_in_a_file_of_its_own_is_found_and_part_of_the_key(tmp_path: Path) -> None:
    values = write_quantized(write_checkpoint(tmp_path, "llama"), "gptq")
    config = json.loads((tmp_path / "config.json").read_text())
    quantization = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    del quantization["quant_method"]
    (tmp_path / "quantize_config.json").write_text(json.dumps(quantization))
    np.testing.assert_array_equal(opened(tmp_path).read(Q_PROJ).dequantize(), values[Q_PROJ])
    before = entry_key(Source(tmp_path, "hf", "tiny"), "auto")
    (tmp_path / "quantize_config.json").write_text(json.dumps(quantization | {"checkpoint_format": "gptq_v2"}))
    assert entry_key(Source(tmp_path, "hf", "tiny"), "auto") != before


def test_zero_biases_of_layers_without_one_are_left_out(folder: Path) -> None:
    change(folder, model__layers__0__mlp__up_proj__bias=np.zeros(96, np.float16))
    assert not [name for name in opened(folder).tensors if name.endswith(".bias")]


def test_a_module_left_unquantized_is_read_as_it_is(folder: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((96, 64)).astype(np.float16)
    gone = dict.fromkeys(f"model__layers__0__mlp__up_proj__{part}" for part in ("qweight", "qzeros", "scales"))
    change(folder, **gone, model__layers__0__mlp__up_proj__weight=weight)
    np.testing.assert_array_equal(opened(folder).read("model.layers.0.mlp.up_proj.weight").data, weight)


def test_a_module_that_is_there_twice_is_refused(folder: Path) -> None:
    change(folder, model__layers__0__mlp__up_proj__weight=np.zeros((96, 64), np.float16))
    with pytest.raises(CheckpointError, match=r"up_proj` twice"):
        opened(folder)


def test_a_config_without_quantized_tensors_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}})
    )
    with pytest.raises(CheckpointError, match="says AWQ gemm, 4 bits, but no tensor"):
        opened(tmp_path)


def test_a_format_that_nothing_reads_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(UnsupportedModel, match="quantized with `hqq`"):
        opened(folder)


def test_broken_scales_are_an_error_that_names_the_module(folder: Path) -> None:
    scales = load_file(folder / "model.safetensors")["model.layers.1.self_attn.q_proj.scales"]
    scales[0, 3] = np.nan
    change(folder, model__layers__1__self_attn__q_proj__scales=scales)
    with pytest.raises(CheckpointError, match=r"q_proj\.scales` holds NaN"):
        opened(folder).read(Q_PROJ)


def test_a_shape_that_is_not_the_configs_is_refused(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    change(folder, model__layers__1__self_attn__q_proj__qweight=stored["model.layers.1.self_attn.k_proj.qweight"])
    with pytest.raises(CheckpointError, match=r"q_proj\.weight` .* has shape \[32, 64\], the config says \[64, 64\]"):
        opened(folder)


def test_groups_that_no_kernel_reads_work_as_float32_only(tmp_path: Path) -> None:
    write_quantized(write_checkpoint(tmp_path / "m", "llama"), "gptq", group=16)
    source = Source(tmp_path / "m", "hf", "tiny")
    with pytest.raises(UnsupportedModel, match="group 16") as caught:
        open_packed(source, cache=tmp_path / "cache")
    assert "--dtype float32" in caught.value.hint
    assert open_packed(source, dtype="float32", cache=tmp_path / "cache").weights[Q_PROJ].format.name == "f32"
