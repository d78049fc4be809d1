"""The packed cache: what is built is what the checkpoint says, and what is broken is built again."""

import errno
import io
import json
import multiprocessing
import os
import shutil
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmctl.engine.load import build
from llmctl.engine.load.checkpoint import open_checkpoint
from llmctl.engine.load.hub import Source
from llmctl.engine.load.packed import entry_key, list_entries, open_packed, prune, verify
from llmctl.kernels.cpu.pack import unpack
from llmctl.kernels.errors import CapacityError, CheckpointError, UsageError
from llmctl.kernels.reference.weight import dequantize


def source(folder):
    return Source(folder, "hf", "tiny")


def names(cache):
    return sorted(path.name for path in (cache / "packed").iterdir())


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def test_weights_and_vectors_are_those_of_the_checkpoint(model_folder, cache):
    model = open_packed(source(model_folder), cache=cache)
    checkpoint = open_checkpoint(source(model_folder))
    assert set(model.weights) | set(model.vectors) == set(checkpoint.tensors)
    assert "lm_head.weight" not in model.weights  # tied: one copy
    for name, weight in model.weights.items():
        np.testing.assert_array_equal(unpack(weight)[0], checkpoint.read(name).data)
        assert weight.data.ctypes.data % 64 == 0 and not weight.data.flags.writeable
    for name, vector in model.vectors.items():
        np.testing.assert_array_equal(vector, checkpoint.read(name).data)
        assert vector.dtype == np.float32 and vector.ctypes.data % 64 == 0
    assert model.spec == checkpoint.spec and model.name == "tiny" and model.chat.eos_ids == (2,)
    assert json.loads((model.folder / "tokenizer.json").read_text())["model"]["type"] == "BPE"


def test_a_warm_start_reads_no_source_tensor_and_gives_the_same(model_folder, cache, monkeypatch):
    cold = open_packed(source(model_folder), cache=cache)
    monkeypatch.setattr(build, "build_from_source", None)
    monkeypatch.setattr(build, "open_checkpoint", None)
    warm = open_packed(source(model_folder), cache=cache)
    assert warm.digest == cold.digest and warm.spec == cold.spec and warm.chat == cold.chat
    for name, weight in cold.weights.items():
        np.testing.assert_array_equal(warm.weights[name].data, weight.data)


def test_the_digest_does_not_depend_on_where_the_model_lies(tmp_path, build_model):
    for place in ("a", "b"):
        build_model(tmp_path / place)
    first = open_packed(Source(tmp_path / "a", "hf", "one"), cache=tmp_path / "c1")
    second = open_packed(Source(tmp_path / "b", "hf", "two"), cache=tmp_path / "c2")
    assert first.digest == second.digest


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("dtype", "target"),
    [("float32", torch.float32), ("float16", torch.float16), ("bfloat16", torch.bfloat16)],
)
def test_dtype_converts_like_torch(tmp_path, build_model, stored, dtype, target):
    state = build_model(tmp_path / "m", dtype=stored)
    model = open_packed(source(tmp_path / "m"), dtype=dtype, cache=tmp_path / "cache")
    for name, weight in model.weights.items():
        data = unpack(weight)[0]
        expected = state[name].to(target)
        if target == torch.bfloat16:
            np.testing.assert_array_equal(data, expected.view(torch.uint16).numpy())
        else:
            np.testing.assert_array_equal(data, expected.numpy())


def test_a_value_too_large_for_float16_is_an_error_that_names_it(model_folder, cache):
    path = model_folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e5
    save_file(tensors, path)
    with pytest.raises(UsageError, match=r"up_proj\.weight` holds 100000"):
        open_packed(source(model_folder), dtype="float16", cache=cache)
    assert names(cache) == []


def test_each_dtype_has_its_own_entry_and_an_unknown_one_is_refused(model_folder, cache):
    open_packed(source(model_folder), cache=cache)
    open_packed(source(model_folder), dtype="bfloat16", cache=cache)
    assert len(list_entries(cache)) == 2
    with pytest.raises(UsageError, match="--dtype is `int8`"):
        open_packed(source(model_folder), dtype="int8", cache=cache)


def k_quant_blocks(kind, shape):
    """Random bytes, whose float16 numbers are all made small ones."""
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = np.random.default_rng(7).integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    raw[:, :, [*range(1, 4, 2), *range(size - 3, size, 2)] if kind != "Q6_K" else size - 1] &= 0x1F
    return raw.reshape(shape[0], -1)


def write_gguf(path, ffn_down="Q4_1", ffn=96):
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": ((300, 64), "Q8_0"),
        "output_norm": ((64,), "F32"),
        "blk.0.attn_norm": ((64,), "F32"),
        "blk.0.ffn_norm": ((64,), "F32"),
        "blk.0.attn_q": ((64, 64), "Q4_1"),
        "blk.0.attn_k": ((32, 64), "Q4_0"),
        "blk.0.attn_v": ((32, 64), "F16"),
        "blk.0.attn_output": ((64, 64), "Q4_1"),
        "blk.0.ffn_gate": ((ffn, 64), "Q4_1"),
        "blk.0.ffn_up": ((ffn, 64), "BF16"),
        "blk.0.ffn_down": ((64, ffn), ffn_down),
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_uint32("llama.context_length", 128)
    writer.add_uint32("llama.embedding_length", 64)
    writer.add_uint32("llama.feed_forward_length", ffn)
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_uint32("llama.attention.head_count_kv", 2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    alphabet = [f"<t{i}>" for i in range(300)]
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "smollm")
    writer.add_array("tokenizer.ggml.tokens", alphabet)
    writer.add_array("tokenizer.ggml.token_type", [1] * 300)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    for name, (shape, kind) in shapes.items():
        quant = gguf.GGMLQuantizationType[kind]
        values = rng.normal(size=shape).astype(np.float32)
        blocks = k_quant_blocks(kind, shape) if kind.endswith("_K") else gguf.quants.quantize(values, quant)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Source(path, "gguf", "tiny-gguf")


def test_gguf_formats_are_kept_exactly(tmp_path, cache):
    file = write_gguf(tmp_path / "x.gguf")
    model = open_packed(file, dtype="native", cache=cache)
    checkpoint = open_checkpoint(file)
    formats = {name: weight.format.name for name, weight in model.weights.items()}
    assert formats["model.embed_tokens.weight"] == "int8g32"
    assert formats["model.layers.0.self_attn.q_proj.weight"] == "int4g32min"
    assert formats["model.layers.0.self_attn.k_proj.weight"] == "int4g32"
    assert formats["model.layers.0.mlp.up_proj.weight"] == "bf16"
    for name, weight in model.weights.items():
        stored = checkpoint.read(name)
        for got, expected in zip(unpack(weight), (stored.data, stored.scales, stored.zeros)):
            np.testing.assert_array_equal(got, expected)


def test_floats_of_16_bits_become_integers_for_a_cpu_unless_a_float_type_is_asked_for(tmp_path, cache):
    file = write_gguf(tmp_path / "x.gguf")
    cpu, gpu, half = (open_packed(file, dtype=dtype, cache=cache) for dtype in ("auto", "native", "float16"))
    for name, weight in cpu.weights.items():
        stored = gpu.weights[name]
        if not stored.format.is_float:
            assert weight.format == stored.format and weight.data.tobytes() == stored.data.tobytes()
            continue
        assert weight.format.name == "int16g32" and half.weights[name].format.name == "f16"
        exact, kept = dequantize(stored), dequantize(weight)
        largest = exact.abs().reshape(exact.shape[0], -1, 32).amax(2).repeat_interleave(32, 1)
        assert ((kept - exact).abs() <= largest * 2.0**-13).all()


@pytest.mark.parametrize(("kind", "format"), [("Q4_K", "int4g32min"), ("Q5_K", "int8g32"), ("Q6_K", "int8g32")])
def test_k_quants_are_rounded_and_said_so_at_every_start(tmp_path, cache, caplog, kind, format):
    file, name = write_gguf(tmp_path / "x.gguf", kind, 256), "model.layers.0.mlp.down_proj.weight"
    line = f"{kind} stored as {format}: "
    with caplog.at_level("WARNING", "llmctl"):
        model = open_packed(file, cache=cache)
    assert line in caplog.text and "--dtype float32 keeps every value" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO", "llmctl"):
        assert open_packed(file, cache=cache).roundings == model.roundings
    assert line in caplog.text
    (entry,) = list_entries(cache)
    assert model.weights[name].format.name == format and entry.roundings == model.roundings
    assert [rounding.split()[0] for rounding in model.roundings] == sorted(["BF16", "F16", kind])
    assert any(rounding.startswith(line) for rounding in model.roundings)

    caplog.clear()
    exact = open_packed(file, dtype="float32", cache=cache)
    wanted = gguf.quants.dequantize(k_quant_blocks(kind, (64, 256)), gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(unpack(exact.weights[name])[0], wanted)
    assert exact.roundings == () and "rounded" not in caplog.text


def test_rows_packed_a_few_at_a_time_are_the_weight_packed_at_once(tmp_path, cache, monkeypatch):
    file = write_gguf(tmp_path / "x.gguf")
    whole = open_packed(file, cache=cache / "whole")
    monkeypatch.setattr(build, "_CHUNK_ELEMENTS", 3000)
    parts = open_packed(file, cache=cache / "parts")
    assert parts.digest == whole.digest
    for name, weight in whole.weights.items():
        np.testing.assert_array_equal(weight.data, parts.weights[name].data)


def test_the_file_is_written_in_whole_pieces_at_their_multiples(monkeypatch):
    """What is written so is kept on large pages by file systems that can."""
    pieces = []

    class Disk(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            pieces.append(bytes(data))
            return len(pieces[-1])

    monkeypatch.setattr(build, "_WRITE", 4096)
    content = np.random.default_rng(0).bytes(100_000)
    position, file = 0, io.BufferedWriter(Disk(), build._WRITE)
    for size in (64, 1, 4031, 4096, 20_000, 0, 100, 8192, 63_516):
        build._write_cut(file, memoryview(content)[position : position + size], position)
        position += size
    file.flush()
    assert b"".join(pieces) == content and all(len(piece) == 4096 for piece in pieces[:-1])


def test_quantized_weights_are_dequantized_for_a_float_dtype(tmp_path, cache):
    file = write_gguf(tmp_path / "x.gguf")
    model = open_packed(file, dtype="float32", cache=cache)
    checkpoint = open_checkpoint(file)
    for name, weight in model.weights.items():
        np.testing.assert_array_equal(unpack(weight)[0], checkpoint.read(name).dequantize())


def test_a_scale_that_is_not_finite_is_named(tmp_path, cache):
    file = write_gguf(tmp_path / "x.gguf")
    tensor = open_checkpoint(file).tensors["model.layers.0.self_attn.o_proj.weight"]
    content = bytearray(file.path.read_bytes())
    at = tensor.offset + (3 * 2 + 1) * 20  # row 3, second group of Q4_1 blocks
    content[at : at + 2] = np.float16("nan").tobytes()
    file.path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"o_proj\.weight`.*first at scale \[3, 1\]"):
        open_packed(file, cache=cache)
    assert names(cache) == []


def spoil_cut(folder):
    os.truncate(folder / "weights.bin", (folder / "weights.bin").stat().st_size - 1)


def spoil_magic(folder):
    with (folder / "weights.bin").open("r+b") as file:
        file.write(b"something")


def spoil_manifest(folder):
    (folder / "manifest.json").write_text("{")


def spoil_manifest_value(folder):
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"num_heads": 4', '"num_heads": 8'))


def spoil_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")


def spoil_by_removing(folder):
    (folder / "chat.json").unlink()


def spoil_by_emptying(folder):
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_cut,
        spoil_magic,
        spoil_manifest,
        spoil_manifest_value,
        spoil_tokenizer,
        spoil_by_removing,
        spoil_by_emptying,
    ],
)
def test_a_torn_or_foreign_entry_is_built_again_and_said_so(model_folder, cache, caplog, spoil):
    first = open_packed(source(model_folder), cache=cache)
    spoil(first.folder)
    assert not verify(list_entries(cache)[0])
    second = open_packed(source(model_folder), cache=cache)
    assert "rebuilt" in caplog.text
    assert second.digest == first.digest and names(cache) == [second.folder.name]
    assert verify(list_entries(cache)[0])


def test_an_entry_with_another_entrys_weights_is_built_again(tmp_path, build_model, cache):
    build_model(tmp_path / "a")
    build_model(tmp_path / "b", dtype=torch.float32, rms_norm_eps=1e-3)
    first = open_packed(source(tmp_path / "a"), cache=cache)
    second = open_packed(source(tmp_path / "b"), cache=cache)
    (first.folder / "weights.bin").write_bytes((second.folder / "weights.bin").read_bytes())
    assert open_packed(source(tmp_path / "a"), cache=cache).spec.norm_eps == first.spec.norm_eps
    assert all(verify(entry) for entry in list_entries(cache))


def test_verify_finds_one_flipped_bit(model_folder, cache):
    model = open_packed(source(model_folder), cache=cache)
    (entry,) = list_entries(cache)
    assert verify(entry)
    path = model.folder / "weights.bin"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    assert not verify(entry)


def test_a_changed_source_has_another_key(model_folder):
    before = entry_key(source(model_folder), "auto")
    assert entry_key(source(model_folder), "auto") == before
    assert entry_key(source(model_folder), "float32") != before
    path = model_folder / "tokenizer_config.json"
    path.write_text(path.read_text() + " ")
    assert entry_key(source(model_folder), "auto") != before


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "no space left on device")])
def test_a_build_that_is_cut_short_leaves_nothing_behind(model_folder, cache, monkeypatch, failure):
    pack = build.pack
    calls = []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise failure
        return pack(*arguments)

    monkeypatch.setattr(build, "pack", failing)
    with pytest.raises((KeyboardInterrupt, CapacityError)) as caught:
        open_packed(source(model_folder), cache=cache)
    if isinstance(failure, OSError):
        assert f"no space left in `{cache / 'packed'}` for the packed weights of" in caught.value.message
        assert "bytes), " in caught.value.message and caught.value.message.endswith("bytes) are free")
        assert "LLMCTL_CACHE" in caught.value.hint
    assert names(cache) == []


def test_an_unwritable_cache_is_an_error_with_a_way_out(model_folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write") as caught:
        open_packed(source(model_folder), cache=tmp_path / "file" / "cache")
    assert "LLMCTL_CACHE" in caught.value.hint


def build_once(folder, cache, start, results):
    start.wait()
    results.put(open_packed(source(folder), cache=cache).digest)


def test_two_processes_that_build_at_once_both_get_the_model(model_folder, cache):
    context = multiprocessing.get_context("fork")
    start, results = context.Barrier(2), context.Queue()
    workers = [context.Process(target=build_once, args=(model_folder, cache, start, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    digests = {results.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join()
    assert len(digests) == 1 and len(names(cache)) == 1
    assert verify(list_entries(cache)[0])


def test_the_loser_of_a_race_takes_the_winners_entry(model_folder, cache, monkeypatch):
    publish = build._publish

    def publish_late(folder, target):
        monkeypatch.setattr(build, "_publish", publish)
        open_packed(source(model_folder), cache=cache)  # the other process
        publish(folder, target)

    monkeypatch.setattr(build, "_publish", publish_late)
    model = open_packed(source(model_folder), cache=cache)
    assert names(cache) == [model.folder.name] and verify(list_entries(cache)[0])


def test_prune_removes_what_is_not_kept_and_what_crashes_left(model_folder, cache):
    kept = open_packed(source(model_folder), cache=cache)
    other = open_packed(source(model_folder), dtype="bfloat16", cache=cache)
    (cache / "packed" / ".building-1-dead").mkdir()
    with build._temporary_folder(cache / "packed") as alive:
        removed = prune(cache, keep=(kept.folder.name,))
        assert [entry.key for entry in removed] == [other.folder.name]
        assert names(cache) == sorted([alive.name, kept.folder.name])
    assert [entry.key for entry in prune(cache)] == [kept.folder.name]
    assert names(cache) == []
    assert prune(cache / "nowhere") == () and list_entries(cache / "nowhere") == ()


def test_a_build_removes_what_a_crash_left(model_folder, cache):
    dead = cache / "packed" / ".building-1-dead"
    dead.mkdir(parents=True)
    (dead / "weights.bin").write_bytes(b"half")
    model = open_packed(source(model_folder), cache=cache)
    assert names(cache) == [model.folder.name]


def test_a_running_model_survives_prune(model_folder, cache):
    model = open_packed(source(model_folder), cache=cache)
    prune(cache)
    assert np.isfinite(model.vectors["model.norm.weight"]).all()


def test_entries_are_described_and_broken_ones_say_why(model_folder, cache):
    model = open_packed(source(model_folder), cache=cache)
    (entry,) = list_entries(cache)
    assert (entry.name, entry.dtype, entry.formats, entry.problem) == ("tiny", "auto", ("f32",), "")
    assert entry.source == str(model_folder.resolve())
    assert entry.bytes == sum(path.stat().st_size for path in model.folder.iterdir())
    spoil_cut(model.folder)
    (entry,) = list_entries(cache)
    assert "sizes are" in entry.problem


def test_progress_ends_at_the_total(model_folder, cache):
    seen = []
    open_packed(source(model_folder), cache=cache, progress=lambda *step: seen.append(step))
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1][0] == "packing tiny" and seen[-1][1] == seen[-1][2] > 0


def test_loading_imports_neither_torch_nor_transformers(tmp_path, cache):
    file = write_gguf(tmp_path / "x.gguf")
    script = (
        "import sys; from pathlib import Path\n"
        "from llmctl.engine.load.hub import resolve; from llmctl.engine.config import Environment\n"
        "from llmctl.engine.load.packed import open_packed; from llmctl.engine.tokenizer import Tokenizer\n"
        f"source = resolve({str(file.path)!r}, environment=Environment('', Path({str(cache)!r}), True))\n"
        f"model = open_packed(source, cache=Path({str(cache)!r})); Tokenizer(model.folder)\n"
        "print([m for m in ('torch', 'transformers', 'httpx', 'requests', 'safetensors', 'gguf') if m in sys.modules])"
    )
    for _ in range(2):  # cold, then warm
        command = [sys.executable, "-c", script]
        result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
        assert result.stdout == "[]\n"


@pytest.mark.parametrize("name", ["tokenizer.json", "chat.json"])
def test_a_text_file_that_is_not_what_was_written_makes_the_entry_rebuilt(name, tmp_path):
    from tests.engine.tiny import write_checkpoint

    source = Source(write_checkpoint(tmp_path / "tiny", "llama"), "hf", "tiny")
    folder = open_packed(source, cache=tmp_path).folder
    good = (folder / name).read_bytes()
    (folder / name).write_bytes(b"x" * len(good))
    assert (open_packed(source, cache=tmp_path).folder / name).read_bytes() == good


def test_a_plain_file_where_the_entry_belongs_is_replaced(tmp_path):
    from tests.engine.tiny import write_checkpoint

    source = Source(write_checkpoint(tmp_path / "tiny", "llama"), "hf", "tiny")
    folder = open_packed(source, cache=tmp_path).folder
    shutil.rmtree(folder)
    folder.write_text("not a folder")
    assert open_packed(source, cache=tmp_path).folder.is_dir()
