"""The safetensors reader against the safetensors library, and against files that lie."""

import json
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from llmctl.kernels.errors import CheckpointError, LlmctlError, UnsupportedModel
from llmctl.quant.formats.safetensors import open_files, parse_header, weight_files


def write(path, header, data=b""):
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


def parse(path):
    return parse_header(path, np.fromfile(path, np.uint8))


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_float_tensors_are_read_bit_for_bit(tmp_path):
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(4, 2).to(torch.float16),
        "c": torch.randn(7).to(torch.bfloat16),
        "empty": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    files = open_files(tmp_path)
    assert set(files.tensors) == set(tensors)
    for name, tensor in tensors.items():
        weight = files.read(name)
        assert weight.shape == tuple(tensor.shape)
        np.testing.assert_array_equal(weight.dequantize(), tensor.float().numpy())
    assert [files.read(name).format.name for name in "abc"] == ["f32", "f16", "bf16"]


def test_a_read_tensor_is_a_view_of_the_file(tmp_path):
    save_file({"a": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    data = open_files(tmp_path).read("a").data
    assert not data.flags.owndata and not data.flags.writeable


def test_an_unreadable_dtype_is_named_when_it_is_read(tmp_path):
    save_file({"a": torch.arange(4)}, tmp_path / "model.safetensors")
    files = open_files(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"`a`.*I64") as caught:
        files.read("a")
    assert "BF16" in caught.value.hint


def shards(tmp_path, weight_map):
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "model-2.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_sharded_models_are_read_through_their_index(tmp_path):
    shards(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    files = open_files(tmp_path)
    assert files.read("a").data.tolist() == [1, 1] and files.read("b").data.tolist() == [0, 0, 0]


def test_a_missing_shard_is_named(tmp_path):
    shards(tmp_path, {"a": "model-1.safetensors", "b": "model-3.safetensors"})
    with pytest.raises(CheckpointError, match=r"lacks 1 of 2 weight files, the first is `model-3.safetensors`"):
        open_files(tmp_path)


def test_an_index_that_disagrees_with_its_shards_is_refused(tmp_path):
    shards(tmp_path, {"a": "model-1.safetensors", "b": "model-1.safetensors"})
    with pytest.raises(CheckpointError, match=r"tensor `b` is in `model-1.safetensors`, but it is not"):
        open_files(tmp_path)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "weights.bin", 7])
def test_an_index_cannot_point_outside_its_folder(tmp_path, file):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="no safetensors file name"):
        weight_files(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    shards(tmp_path, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, tmp_path / "model-2.safetensors")
    with pytest.raises(CheckpointError, match=r"`a` is in both `model-1.safetensors` and `model-2.safetensors`"):
        open_files(tmp_path)


def test_pickle_weights_are_refused_with_a_way_out(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="only pickle weights") as caught:
        open_files(tmp_path)
    assert "save_pretrained" in caught.value.hint


def test_a_folder_without_weights_says_what_was_expected(tmp_path):
    with pytest.raises(CheckpointError, match="has no weights"):
        open_files(tmp_path)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry()}, b"\0" * 4, "ends at byte .*, the file has"),
        ({"a": entry(offsets=(0, 4))}, b"\0" * 4, "8 bytes, but its offsets 0..4 hold 4"),
        ({"a": entry(offsets=(8, 0))}, b"\0" * 8, "hold -8"),
        ({"a": entry(offsets=(4, 12))}, b"\0" * 12, "leaves a hole behind the header"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, b"\0" * 12, "`b`.*overlaps `a`"),
        ({"a": entry()}, b"\0" * 9, "1 bytes behind its last tensor"),
        ({"a": entry(dtype="F31")}, b"\0" * 8, "unknown dtype 'F31'"),
        ({"a": entry(shape=(-2,))}, b"\0" * 8, "shape"),
        ({"a": entry(shape=(True, 2))}, b"\0" * 8, "shape"),
        ({"a": entry(shape=(2**70,))}, b"\0" * 8, "bytes, but its offsets"),
        ({"a": {"dtype": "F32"}}, b"", "no dtype, shape and data_offsets"),
        ({"a": 3}, b"", "no dtype, shape and data_offsets"),
        ([], b"", "no JSON object"),
        (b'{"a":', b"", "not valid JSON"),
        (b'{"a": {}, "a": {}}', b"", "`a` occurs twice"),
        (b"\xff\xfe", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
    ],
)
def test_lying_headers_are_refused(tmp_path, header, data, message):
    with pytest.raises(CheckpointError, match=message):
        parse(write(tmp_path / "x.safetensors", header, data))


@pytest.mark.parametrize("content", [b"", b"\0" * 7, struct.pack("<Q", 2**63) + b"{}", struct.pack("<Q", 3) + b"{}"])
def test_a_header_length_beyond_the_file_is_refused(tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        open_files(tmp_path)


def test_every_truncation_is_an_error(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, path)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            open_files(tmp_path)


@settings(deadline=None, max_examples=200)
@given(at=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_changed_byte_is_an_error_or_harmless(tmp_path_factory, at, value):
    folder = tmp_path_factory.mktemp("flip")
    path = folder / "model.safetensors"
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2)}, path)
    whole = bytearray(path.read_bytes())
    whole[at % len(whole)] = value
    path.write_bytes(whole)
    try:
        files = open_files(folder)
        for name in files.tensors:
            files.read(name)
    except LlmctlError:
        pass
