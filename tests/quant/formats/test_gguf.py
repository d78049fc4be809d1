"""The GGUF reader against the gguf library, and against files that lie."""

import struct

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmctl.kernels.errors import CheckpointError, LlmctlError, UnsupportedModel
from llmctl.quant.formats.gguf import open_gguf

KINDS = {
    "F32": ("f32", gguf.GGMLQuantizationType.F32),
    "F16": ("f16", gguf.GGMLQuantizationType.F16),
    "BF16": ("bf16", gguf.GGMLQuantizationType.BF16),
    "Q8_0": ("int8g32", gguf.GGMLQuantizationType.Q8_0),
    "Q4_0": ("int4g32", gguf.GGMLQuantizationType.Q4_0),
    "Q4_1": ("int4g32min", gguf.GGMLQuantizationType.Q4_1),
    "Q5_0": ("int8g32", gguf.GGMLQuantizationType.Q5_0),
    "Q5_1": ("int8g32min", gguf.GGMLQuantizationType.Q5_1),
}


def write_file(path, tensors, fill=lambda writer: None):
    writer = gguf.GGUFWriter(path, "llama")
    fill(writer)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def small(tmp_path):
    def fill(writer):
        writer.add_uint32("an.int", 7)
        writer.add_string("a.text", "grüße")
        writer.add_array("some.texts", ["a", "bc", ""])
        writer.add_array("some.ints", [1, 2, 3])

    values = np.arange(64, dtype=np.float32).reshape(2, 32)
    return write_file(tmp_path / "small.gguf", {"w": (values, gguf.GGMLQuantizationType.Q8_0)}, fill)


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_mean_what_the_gguf_library_says(tmp_path, kind):
    name, quant = KINDS[kind]
    values = np.random.default_rng(0).normal(size=(6, 96)).astype(np.float32)
    path = write_file(tmp_path / "x.gguf", {"w": (values, quant), "v": (values[0], gguf.GGMLQuantizationType.F32)})
    weight = open_gguf(path).read("w")
    (tensor,) = [t for t in gguf.GGUFReader(path).tensors if t.name == "w"]
    assert weight.format.name == name and weight.shape == (6, 96)
    np.testing.assert_array_equal(weight.dequantize(), gguf.quants.dequantize(tensor.data, quant))


def test_metadata_of_every_type_is_read(tmp_path):
    def fill(writer):
        writer.add_uint8("u8", 200)
        writer.add_int8("i8", -100)
        writer.add_uint16("u16", 60000)
        writer.add_int16("i16", -30000)
        writer.add_uint32("u32", 4_000_000_000)
        writer.add_int32("i32", -2_000_000_000)
        writer.add_uint64("u64", 2**63 + 1)
        writer.add_int64("i64", -(2**62))
        writer.add_float32("f32", 0.5)
        writer.add_float64("f64", 0.1)
        writer.add_bool("yes", True)
        writer.add_string("text", "grüße\n")
        writer.add_array("texts", ["a", "", "bc"])
        writer.add_array("ints", [1, -2, 3])
        writer.add_array("floats", [0.5, 1.5])
        writer.add_array("bools", [True, False])
        writer.add_array("nested", [[1, 2], [3]])

    path = write_file(tmp_path / "x.gguf", {"w": (np.ones((1, 32), np.float32), KINDS["F32"][1])}, fill)
    metadata = open_gguf(path).metadata
    assert metadata["u8"] == 200 and metadata["i8"] == -100 and metadata["u16"] == 60000
    assert metadata["i16"] == -30000 and metadata["u32"] == 4_000_000_000 and metadata["i32"] == -2_000_000_000
    assert metadata["u64"] == 2**63 + 1 and metadata["i64"] == -(2**62)
    assert metadata["f32"] == 0.5 and metadata["f64"] == 0.1 and metadata["yes"] is True
    assert metadata["text"] == "grüße\n" and metadata["texts"] == ["a", "", "bc"] and metadata["ints"] == [1, -2, 3]
    assert metadata["floats"] == [0.5, 1.5] and metadata["bools"] == [True, False]
    assert metadata["nested"] == [[1, 2], [3]]


def test_an_unsupported_type_names_the_tensor_and_what_is_supported(tmp_path):
    blocks = np.zeros((2, 110), np.uint8)
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("blk.0.ffn_up.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.IQ3_S)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match=r"blk.0.ffn_up.weight.*IQ3_S") as caught:
        open_gguf(path).read("blk.0.ffn_up.weight")
    assert "Q4_1" in caught.value.hint and "Q8_0" in caught.value.hint


def test_a_file_cut_anywhere_is_an_error(small):
    whole = small.read_bytes()
    tensor = open_gguf(small).tensors["w"]
    for size in range(tensor.offset + tensor.nbytes):  # behind it there is padding only
        small.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            open_gguf(small)


def test_a_file_cut_in_half_names_the_tensor_that_is_missing(tmp_path):
    values = np.ones((64, 64), np.float32)
    path = write_file(tmp_path / "x.gguf", {"a": (values, KINDS["F32"][1]), "b": (values, KINDS["F32"][1])})
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"tensor `[ab]`.*the file has \d+ bytes") as caught:
        open_gguf(path)
    assert "fetch it again" in caught.value.hint


def header(version=3, tensors=0, keys=0, rest=b""):
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + rest


def text(value):
    return struct.pack("<Q", len(value)) + value


HUGE = 2**60
ARRAY = text(b"k") + struct.pack("<I", 9)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGML" + b"\0" * 30, "no GGUF file"),
        (header(tensors=HUGE), "the number of tensors"),
        (header(keys=HUGE), "the number of metadata keys"),
        (header(keys=1, rest=struct.pack("<Q", HUGE) + b"\0" * 20), "the length of a metadata key"),
        (header(keys=1, rest=text(b"k") + struct.pack("<IQ", 8, HUGE)), "the length of `k`"),
        (header(keys=1, rest=ARRAY + struct.pack("<IQ", 0, HUGE)), "the length of array `k`"),
        (header(keys=1, rest=ARRAY + struct.pack("<IQ", 12, HUGE)), "the length of array `k`"),
        (header(keys=1, rest=ARRAY + struct.pack("<IQ", 8, 5) + b"\0" * 8), "the length of array `k`"),
        (header(keys=1, rest=ARRAY + struct.pack("<IQ", 77, 1) + b"\0" * 8), "unknown value type 77"),
        (header(keys=1, rest=text(b"k") + struct.pack("<I", 77) + b"\0" * 8), "unknown value type 77"),
        (header(keys=1, rest=ARRAY + struct.pack("<IQ", 9, 1) * 50), "nests arrays deeper than"),
        (header(keys=1, rest=text(b"\xff\xff") + struct.pack("<I", 0) + b"\0" * 8), "not UTF-8"),
        (header(keys=2, rest=(text(b"k") + struct.pack("<IB", 0, 1)) * 2), "`k` occurs twice"),
        (header(tensors=1, rest=text(b"w") + struct.pack("<I", 9) + b"\0" * 90), "9 dimensions"),
        (header(tensors=1, rest=text(b"w") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0)), "takes .* bytes"),
        (header(tensors=1, rest=text(b"w") + struct.pack("<IQIQ", 1, 33, 8, 0)), "whole 32s"),
        (header(tensors=1, rest=text(b"w") + struct.pack("<IQIQ", 1, 0, 0, 0)), r"shape \[0\]"),
        (header(tensors=1, rest=text(b"w") + struct.pack("<IQIQ", 1, 1, 0, 7)), "alignment 32"),
        (header(keys=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 3)), "no power of two"),
        (header(keys=1, rest=text(b"general.alignment") + struct.pack("<II", 4, 0)), "no power of two"),
    ],
)
def test_lying_headers_are_refused_without_allocating(tmp_path, content, message):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        open_gguf(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(version=1), "GGUF version 1"),
        (header(version=4), "GGUF version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(tensors=1, rest=text(b"w") + struct.pack("<IQIQ", 1, 32, 999, 0)), "unknown type 999"),
    ],
)
def test_other_versions_and_types_are_unsupported(tmp_path, content, message):
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModel, match=message):
        open_gguf(path)


def test_overlapping_tensors_are_refused(tmp_path):
    entries = text(b"a") + struct.pack("<IQIQ", 1, 32, 0, 0) + text(b"b") + struct.pack("<IQIQ", 1, 32, 0, 64)
    path = tmp_path / "x.gguf"
    path.write_bytes(header(tensors=2, rest=entries) + b"\0" * 400)
    with pytest.raises(CheckpointError, match=r"`a` and `b` of .* overlap"):
        open_gguf(path)


@settings(deadline=None, max_examples=300)
@given(at=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_changed_byte_is_an_error_or_harmless(tmp_path_factory, at, value):
    path = tmp_path_factory.mktemp("flip") / "x.gguf"
    write_file(path, {"w": (np.ones((2, 32), np.float32), KINDS["Q4_0"][1])}, lambda w: w.add_array("k", ["a", "b"]))
    whole = bytearray(path.read_bytes())
    whole[at % len(whole)] = value
    path.write_bytes(whole)
    try:
        file = open_gguf(path)
        for name in file.tensors:
            file.read(name)
    except LlmctlError:
        pass
