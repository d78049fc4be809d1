"""`llmctl plan`: figures from headers, as tables and as JSON."""

import json

import pytest

from llmctl.cli.commands.plan import PackedSize, as_json, packed_size, show
from llmctl.engine.budget import memory_budget
from llmctl.engine.config import EngineConfig
from llmctl.engine.models.arch import DecoderSpec, RopeSpec
from llmctl.kernels.cpu.pack import packed_bytes
from llmctl.kernels.formats import F16, F32, WeightFormat

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
)
SIZE = PackedSize(1 << 20, {"f32": 1, "int4g32": 14})


@pytest.fixture
def budget():
    return memory_budget(SPEC, SIZE.bytes, tuple(SIZE.formats), EngineConfig(), 1 << 30)


def test_weights_are_counted_as_packed_and_vectors_not():
    q4 = WeightFormat("int4", 32)
    tensors = [(q4, (1000, 128)), (F16, (128, 128)), (F32, (128,))]
    size = packed_size(tensors, EngineConfig())
    assert size == PackedSize(packed_bytes(q4, 1000, 128) + packed_bytes(F16, 128, 128), {"f16": 1, "int4g32": 1})


def test_asked_type_counts_for_all_weights():
    tensors = [(WeightFormat("int4", 32), (1000, 128)), (F16, (128, 128))]
    size = packed_size(tensors, EngineConfig(dtype="float32"))
    assert size == PackedSize(packed_bytes(F32, 1000, 128) + packed_bytes(F32, 128, 128), {"f32": 2})


def test_json_adds_up(budget):
    report = as_json("m", SIZE, budget)
    assert report == json.loads(json.dumps(report))
    assert report["total_bytes"] == report["weight_bytes"] + report["kv_bytes"] + report["workspace_bytes"]
    assert report["kv_bytes"] == report["num_blocks"] * report["block_size"] * report["kv_bytes_per_token"]
    assert list(report["sequences"]) == ["512", "2048", "4096"]


def test_table_in_a_file_is_never_cut(console, budget):
    show(console, "a-model-with-a-long-name-" * 10, SIZE, budget)
    text = console.stdout.getvalue()
    assert "a-model-with-a-long-name-" * 10 in text
    assert f"{budget.num_blocks} blocks of 32 tokens in f16, 512 B per token" in text
    assert "…" not in text and "\x1b" not in text
