"""`llmctl plan`: figures from headers, as tables and as JSON."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from llmctl.cli import app
from llmctl.cli.commands.plan import PackedSize, as_json, packed_size, show
from llmctl.cli.exits import ExitCode
from llmctl.engine.budget import memory_budget
from llmctl.engine.config import EngineConfig
from llmctl.engine.models.arch import DecoderSpec, RopeSpec
from llmctl.engine.models.families import decoder_tensors
from llmctl.kernels.cpu.pack import packed_bytes
from llmctl.kernels.device import read_machine
from llmctl.kernels.errors import UsageError
from llmctl.kernels.formats import F16, F32, INT16, WeightFormat
from llmctl.quant.formats.stored import StoredTensor
from tests.engine.quantized import write_quantized
from tests.engine.tiny import write_checkpoint

SPEC = DecoderSpec(
    family="llama",
    num_layers=2,
    hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    ffn_size=256,
    vocab_size=1000,
    context_length=4096,
    norm_eps=1e-5,
    rope=RopeSpec(),
    tied_head=True,
)
SHAPES = {name: rule.shape for name, rule in decoder_tensors(SPEC).items() if rule.required}
SIZE = PackedSize(1 << 20, {"f32": 1, "int4g32": 14})


@pytest.fixture
def budget():
    return memory_budget(SPEC, SIZE.bytes, tuple(SIZE.formats), EngineConfig(), 1 << 30)


def stored(format, *shape):
    return StoredTensor("w", "", format, shape, Path("x"), 0, 0)


def test_weights_are_counted_as_packed_and_vectors_not():
    q4 = WeightFormat("int4", 32)
    tensors = [stored(q4, 1000, 128), stored(F16, 128, 128), stored(F32, 128)]
    codes, half, pairs = packed_bytes(q4, 1000, 128), packed_bytes(F16, 128, 128), packed_bytes(INT16, 128, 128)
    assert packed_size(tensors, "auto") == PackedSize(codes + pairs, {"int16g32": 1, "int4g32": 1})
    assert packed_size(tensors, "native") == PackedSize(codes + half, {"f16": 1, "int4g32": 1})


def test_asked_type_counts_for_all_weights():
    tensors = [stored(WeightFormat("int4", 32), 1000, 128), stored(F16, 128, 128)]
    size = packed_size(tensors, "float32")
    assert size == PackedSize(packed_bytes(F32, 1000, 128) + packed_bytes(F32, 128, 128), {"f32": 2})


def test_json_adds_up(budget):
    report = as_json("m", SIZE, budget)
    assert report == json.loads(json.dumps(report))
    assert report["total_bytes"] == report["weight_bytes"] + report["kv_bytes"] + report["workspace_bytes"]
    assert report["kv_bytes"] == report["num_blocks"] * report["block_size"] * report["kv_bytes_per_token"]
    assert list(report["sequences"]) == ["512", "2048", "4096"]


def test_swap_space_is_told_in_blocks_and_is_no_part_of_the_memory(console, budget):
    swapping = memory_budget(SPEC, SIZE.bytes, tuple(SIZE.formats), EngineConfig(swap_space=0.5), 1 << 30)
    report, plain = as_json("m", SIZE, swapping), as_json("m", SIZE, budget)
    assert report["swap_blocks"] == (1 << 29) // swapping.bytes_per_block and plain["swap_blocks"] == 0
    assert report["swap_bytes"] == report["swap_blocks"] * report["bytes_per_block"]
    assert report["total_bytes"] == plain["total_bytes"]
    show(console, "m", SIZE, swapping)
    assert f"swap space: {swapping.tier_blocks} more blocks" in console.stdout.getvalue()


def test_a_swap_space_of_less_than_a_block_is_refused():
    with pytest.raises(UsageError, match="--swap-space is 1.00 KiB, one KV block of 32 tokens has"):
        memory_budget(SPEC, SIZE.bytes, tuple(SIZE.formats), EngineConfig(swap_space=2**-20), 1 << 30)


def test_a_swap_space_that_the_disk_has_no_room_for_is_refused_with_the_figures(console, checkpoint):
    assert app.run(["plan", str(checkpoint), "--swap-space", "1000000"], console) == ExitCode.CAPACITY
    assert "for swapped KV blocks: it needs 977 TiB" in console.stderr.getvalue()


def test_what_is_not_kept_stands_below_the_weights(console, budget):
    size = PackedSize(SIZE.bytes, SIZE.formats, ("Q4_K stored as int4g32min: scales rounded to float16",))
    show(console, "m", size, budget)
    assert "Q4_K stored as int4g32min: scales rounded to float16" in console.stdout.getvalue()
    assert as_json("m", size, budget)["roundings"] == list(size.roundings)


def test_table_in_a_file_is_never_cut(console, budget):
    show(console, "a-model-with-a-long-name-" * 10, SIZE, budget)
    text = console.stdout.getvalue()
    assert "a-model-with-a-long-name-" * 10 in text
    assert f"{budget.num_blocks} blocks of 32 tokens in int16, {budget.kv_bytes_per_token} B per token" in text
    assert "…" not in text and "\x1b" not in text


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a float16 checkpoint of SPEC, all zeros; the plan reads its headers only."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": SPEC.num_layers,
        "hidden_size": SPEC.hidden_size,
        "num_attention_heads": SPEC.num_heads,
        "num_key_value_heads": SPEC.num_kv_heads,
        "intermediate_size": SPEC.ffn_size,
        "vocab_size": SPEC.vocab_size,
        "max_position_embeddings": SPEC.context_length,
        "rms_norm_eps": SPEC.norm_eps,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    tensors = {name: np.zeros(shape, np.float16) for name, shape in SHAPES.items()}
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_plan_of_a_folder_counts_its_weights(console, checkpoint):
    command = ["plan", str(checkpoint), "--json", "--max-num-seqs", "3", "--dtype", "float16"]
    assert app.run(command, console) == ExitCode.OK
    report = json.loads(console.stdout.getvalue())
    weights = sum(2 * np.prod(shape) for shape in SHAPES.values() if len(shape) == 2)
    assert report["weight_bytes"] == weights + 2 * 128 * (-1000 % 16)  # the vocabulary is padded to panels of 16
    assert report["weight_formats"] == {"f16": 15}
    assert report["max_model_len"] == 4096
    assert report["num_blocks"] == 3 * 4096 // 32


def test_plan_of_a_stretched_rope_has_its_longer_context(console, checkpoint):
    yarn = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}'
    command = ["plan", str(checkpoint), "--json", "--max-num-seqs", "1"]
    assert app.run([*command, "--rope-scaling", yarn], console) == ExitCode.OK
    report = json.loads(console.stdout.getvalue())
    assert report["max_model_len"] == 16384 and report["num_blocks"] == 16384 // 32
    overrides = f'{{"rope_parameters": {yarn}}}'
    assert app.run([*command, "--hf-overrides", overrides, "-c", "20000"], console) == ExitCode.CAPACITY
    assert "the model's context is 16384 tokens" in console.stderr.getvalue()
    assert app.run([*command, "-c", "5000"], console) == ExitCode.CAPACITY
    assert "--rope-scaling" in console.stderr.getvalue()


def test_plan_counts_a_draft_model_in_and_says_how_much_of_it_is_that_ones(console, checkpoint):
    drafting = json.dumps({"model": str(checkpoint), "num_speculative_tokens": 2})
    reports = []
    for options in ([], ["--speculative-config", drafting]):
        command = ["plan", str(checkpoint), "--json", "--num-gpu-blocks-override", "200", *options]
        assert app.run(command, console) == ExitCode.OK
        reports.append(json.loads(console.stdout.getvalue()))
        console.stdout.seek(0)
        console.stdout.truncate()
    alone, both = reports
    draft = both["draft"]
    assert alone["draft"] is None and draft["weight_bytes"] == alone["weight_bytes"]
    assert both["weight_bytes"] == 2 * alone["weight_bytes"]
    assert both["kv_bytes"] == 2 * alone["kv_bytes"]
    assert both["workspace_bytes"] == alone["workspace_bytes"] + draft["workspace_bytes"]
    assert app.run(["plan", str(checkpoint), "--speculative-config", drafting], console) == ExitCode.OK
    assert "of which draft" in console.stdout.getvalue()


def test_plan_of_a_draft_model_of_another_vocabulary_is_refused(console, tmp_path):
    target, draft = (write_checkpoint(tmp_path / name, "llama") for name in ("target", "draft"))
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["content"] = "<another>"
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    drafting = json.dumps({"model": str(draft)})
    assert app.run(["plan", str(target), "--speculative-config", drafting], console) == ExitCode.UNSUPPORTED
    assert "has another vocabulary than" in console.stderr.getvalue()


def test_plan_of_a_quantized_folder_counts_what_its_codes_take(console, tmp_path):
    write_quantized(write_checkpoint(tmp_path, "llama"), "gptq-sym")
    assert app.run(["plan", str(tmp_path), "--json"], console) == ExitCode.OK
    assert json.loads(console.stdout.getvalue())["weight_formats"] == {"int16g32": 2, "int4g32": 14}


def test_plan_of_a_decoder_that_only_transformers_has(console, tmp_path):
    folder = write_checkpoint(tmp_path, "olmo2")
    assert app.run(["plan", str(folder), "--json", "--dtype", "bfloat16"], console) == ExitCode.OK
    report = json.loads(console.stdout.getvalue())
    assert report["weight_formats"] == {"bf16": 16} and report["max_model_len"] == 512
    assert report["kv_bytes_per_token"] == 2 * 2 * 2 * (16 * 2 + 2)
    state = safetensors.numpy.load_file(folder / "model.safetensors").values()
    assert report["weight_bytes"] == sum(tensor.size * (2 if tensor.ndim == 2 else 4) for tensor in state)


@pytest.mark.parametrize(
    "option",
    [
        ["--threads", "2"],
        ["--seed", "1"],
        ["--kernels", "generic"],
        ["--async-depth", "2"],
        ["--scheduling-policy", "fcfs"],
        ["--no-enable-prefix-caching"],
        ["--preemption-mode", "recompute"],
    ],
    ids=lambda option: option[0],
)
def test_option_that_no_figure_depends_on_is_refused(console, checkpoint, option):
    assert app.run(["plan", str(checkpoint), *option], console) == ExitCode.USAGE
    assert f"no such option `{option[0]}`" in console.stderr.getvalue()


@pytest.mark.parametrize(
    "option",
    [
        ["--dtype", "float32"],
        ["--kv-cache-dtype", "float32"],
        ["--max-model-len", "512"],
        ["--max-num-seqs", "3"],
        ["--max-num-batched-tokens", "64"],
        ["--block-size", "64"],
        ["--num-gpu-blocks-override", "200"],
        ["--kv-cache-memory-bytes", "8M"],
        ["--gpu-memory-utilization", "0.6"],
        ["--swap-space", "1"],
        ["--model-impl", "transformers"],
    ],
    ids=lambda option: option[0],
)
def test_every_option_of_a_plan_changes_its_figures(make_console, checkpoint, option, monkeypatch):
    machine = dataclasses.replace(read_machine(), memory_available=1 << 30)
    monkeypatch.setattr("llmctl.kernels.device.read_machine", lambda: machine)
    consoles = [make_console(), make_console()]
    for console, options in zip(consoles, ([], option), strict=True):
        assert app.run(["plan", str(checkpoint), "--json", *options], console) == ExitCode.OK
    plain, changed = (json.loads(console.stdout.getvalue()) for console in consoles)
    assert plain != changed


def test_plan_that_does_not_fit_names_what_would(console, checkpoint):
    assert app.run(["plan", str(checkpoint), "--num-gpu-blocks-override", "10"], console) == ExitCode.CAPACITY
    assert "a KV cache of 10 blocks holds 320 tokens, one sequence may have 4096" in console.stderr.getvalue()
    assert "--max-model-len 320" in console.stderr.getvalue()


def test_plan_of_a_model_that_is_not_there_is_a_usage_error(console, tmp_path):
    assert app.run(["plan", str(tmp_path / "none")], console) == ExitCode.USAGE
    assert console.stdout.getvalue() == ""
