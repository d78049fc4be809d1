"""GGUF names, rows and metadata as Hugging Face has them."""

import gguf
import numpy as np
import pytest

from llmctl.kernels.errors import CheckpointError, UnsupportedModel
from llmctl.quant.formats.gguf import open_gguf
from llmctl.quant.formats.gguf_model import hugging_face_name, open_model

F32, Q4_1 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.Q4_1
HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 64, 4, 2, 96, 40


def permuted(weight, heads):
    """The row order of the llama converter: pairs (i, i + half) of a head become neighbours."""
    rows, *rest = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, *rest).swapaxes(1, 2).reshape(weight.shape)


def write_model(path, arch="llama", drop=(), extra=lambda writer: None, kind=F32, tensors=None):
    rng = np.random.default_rng(1)
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "token_embd": (VOCAB, HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (kv, HIDDEN),
        "blk.0.attn_v": (kv, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (FFN, HIDDEN),
        "blk.0.ffn_up": (FFN, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, FFN),
    }
    values = {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    values |= tensors or {}
    writer = gguf.GGUFWriter(path, arch)
    keys = {
        "block_count": 1,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
    }
    for key, value in keys.items():
        if key not in drop:
            writer.add_uint32(f"{arch}.{key}", value)
    if "attention.layer_norm_rms_epsilon" not in drop:
        writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    extra(writer)
    for name, value in values.items():
        use = kind if value.ndim == 2 else F32
        writer.add_tensor(name, gguf.quants.quantize(value, use), raw_dtype=use)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, values


def model(path):
    return open_model(open_gguf(path))


def test_names_are_those_of_hugging_face():
    assert hugging_face_name("blk.12.attn_q.weight", "llama") == "model.layers.12.self_attn.q_proj.weight"
    assert hugging_face_name("blk.0.attn_k.bias", "llama") == "model.layers.0.self_attn.k_proj.bias"
    assert hugging_face_name("blk.3.ffn_norm.weight", "llama") == "model.layers.3.post_attention_layernorm.weight"
    assert hugging_face_name("output.weight", "llama") == "lm_head.weight"
    assert hugging_face_name("blk.0.ffn_gate_exps.weight", "llama") == "blk.0.ffn_gate_exps.weight"


def test_gemma3_means_other_norms_by_the_same_names():
    names = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "attn_q_norm")
    assert [hugging_face_name(f"blk.1.{name}.weight", "gemma3").removeprefix("model.layers.1.") for name in names] == [
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "pre_feedforward_layernorm.weight",
        "post_feedforward_layernorm.weight",
        "self_attn.q_norm.weight",
    ]
    assert hugging_face_name("blk.1.post_ffw_norm.weight", "llama") == "blk.1.post_ffw_norm.weight"


def test_gemma3_gets_what_its_files_leave_out(tmp_path):
    def extra(writer):
        writer.add_uint32("gemma3.attention.sliding_window", 512)
        writer.add_float32("gemma3.rope.freq_base", 1e6)

    path, _ = write_model(tmp_path / "x.gguf", "gemma3", extra=extra)
    config = model(path).config
    assert config["model_type"] == "gemma3_text" and config["norm_offset_added"] is True
    assert config["sliding_window"] == 512 and "sliding_window_pattern" not in config
    assert config["query_pre_attn_scalar"] == config["head_dim"] == HIDDEN // HEADS
    assert config["rope_parameters"] == {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }


def test_llama_query_and_key_rows_are_put_back_exactly(tmp_path):
    rng = np.random.default_rng(2)
    query = rng.normal(size=(HIDDEN, HIDDEN)).astype(np.float32)
    key = rng.normal(size=(HIDDEN // 2, HIDDEN)).astype(np.float32)
    bias = rng.normal(size=HIDDEN).astype(np.float32)
    tensors = {
        "blk.0.attn_q.weight": permuted(query, HEADS),
        "blk.0.attn_k.weight": permuted(key, KV_HEADS),
        "blk.0.attn_q.bias": permuted(bias, HEADS),
    }
    path, _ = write_model(tmp_path / "f32.gguf", tensors=tensors)
    read = model(path)
    np.testing.assert_array_equal(read.read("model.layers.0.self_attn.q_proj.weight").data, query)
    np.testing.assert_array_equal(read.read("model.layers.0.self_attn.k_proj.weight").data, key)
    np.testing.assert_array_equal(read.read("model.layers.0.self_attn.q_proj.bias").data, bias)

    path, _ = write_model(tmp_path / "q4.gguf", tensors=tensors, kind=Q4_1)
    weight = model(path).read("model.layers.0.self_attn.q_proj.weight")
    expected = gguf.quants.dequantize(gguf.quants.quantize(query, Q4_1), Q4_1)
    np.testing.assert_array_equal(weight.dequantize(), expected)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_rows_stay_as_they_are(tmp_path, arch):
    path, values = write_model(tmp_path / "x.gguf", arch)
    weight = model(path).read("model.layers.0.self_attn.q_proj.weight")
    np.testing.assert_array_equal(weight.data, values["blk.0.attn_q.weight"])


def test_a_vocabulary_beyond_the_embedding_is_refused_and_a_padded_embedding_is_not(tmp_path):
    def extra(count):
        return lambda writer: writer.add_token_list([f"t{number}" for number in range(count)])

    model(write_model(tmp_path / "padded.gguf", extra=extra(VOCAB - 3))[0])
    with pytest.raises(CheckpointError, match=f"names {VOCAB + 1} tokens .* has {VOCAB} rows"):
        model(write_model(tmp_path / "beyond.gguf", extra=extra(VOCAB + 1))[0])


def test_config_is_what_hugging_face_would_say(tmp_path):
    path, _ = write_model(tmp_path / "x.gguf", extra=lambda w: w.add_float32("llama.rope.freq_base", 100000.0))
    assert model(path).config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    }


def test_a_separate_head_is_not_tied(tmp_path):
    path, _ = write_model(tmp_path / "x.gguf", tensors={"output.weight": np.ones((VOCAB, HIDDEN), np.float32)})
    assert model(path).config["tie_word_embeddings"] is False
    assert "lm_head.weight" in model(path).tensors


def test_a_sliding_window_makes_it_mistral(tmp_path):
    path, _ = write_model(tmp_path / "x.gguf", extra=lambda w: w.add_uint32("llama.attention.sliding_window", 128))
    config = model(path).config
    assert config["model_type"] == "mistral" and config["sliding_window"] == 128


def test_linear_rope_scaling_is_kept(tmp_path):
    def scaled(writer):
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_float32("llama.rope.scaling.factor", 4.0)

    path, _ = write_model(tmp_path / "x.gguf", extra=scaled)
    assert model(path).config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def test_yarn_is_kept_with_what_its_file_changes_of_it(tmp_path):
    def yarn(writer):
        writer.add_string("llama.rope.scaling.type", "yarn")
        writer.add_float32("llama.rope.scaling.factor", 4.0)
        writer.add_uint32("llama.rope.scaling.original_context_length", 32)
        writer.add_float32("llama.rope.scaling.yarn_beta_fast", 16.0)
        writer.add_float32("llama.rope.scaling.yarn_attn_factor", 2.0)

    path, _ = write_model(tmp_path / "x.gguf", extra=yarn)
    rope = model(path).config["rope_parameters"]
    assert rope.pop("attention_factor") == pytest.approx(2 * (0.1 * np.log(4) + 1))
    assert rope == {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
    }  # fmt: skip


def test_a_part_of_yarn_is_refused(tmp_path):
    def part(writer):
        writer.add_string("llama.rope.scaling.type", "yarn")
        writer.add_float32("llama.rope.scaling.factor", 4.0)
        writer.add_float32("llama.rope.scaling.yarn_ext_factor", 0.5)

    path, _ = write_model(tmp_path / "x.gguf", extra=part)
    with pytest.raises(UnsupportedModel, match="yarn_ext_factor` in .* is 0.5"):
        model(path)


def test_factors_for_short_and_long_contexts_become_a_longrope(tmp_path):
    short, long = np.float32([1, 1, 2, 2]), np.float32([1, 2, 4, 8])
    tensors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}

    def original(writer):
        writer.add_uint32("llama.rope.scaling.original_context_length", 32)

    path, _ = write_model(tmp_path / "x.gguf", tensors=tensors, extra=original)
    read = model(path)
    assert read.config["rope_parameters"] == {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short.tolist(), "long_factor": long.tolist(),
        "original_max_position_embeddings": 32,
    }  # fmt: skip
    assert not set(tensors) & set(read.tensors)
    path, _ = write_model(tmp_path / "y.gguf", tensors={"rope_factors_short.weight": short})
    with pytest.raises(CheckpointError, match="rope_factors_long.weight"):
        model(path)


def test_rope_factors_become_part_of_the_config(tmp_path):
    factors = np.linspace(1, 8, HIDDEN // HEADS // 2).astype(np.float32)
    path, _ = write_model(tmp_path / "x.gguf", tensors={"rope_freqs.weight": factors})
    read = model(path)
    assert read.config["rope_parameters"]["rope_type"] == "factors"
    np.testing.assert_array_equal(np.float32(read.config["rope_parameters"]["factors"]), factors)
    assert "rope_freqs.weight" not in read.tensors


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count"])
def test_a_missing_key_is_named(tmp_path, key):
    path, _ = write_model(tmp_path / "x.gguf", drop=(key,))
    with pytest.raises(CheckpointError, match=key):
        model(path)


def test_an_unknown_architecture_lists_those_known(tmp_path):
    path, _ = write_model(tmp_path / "x.gguf", "mamba")
    with pytest.raises(UnsupportedModel, match="'mamba'") as caught:
        model(path)
    assert "llama, qwen2, qwen3" in caught.value.hint


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.expert_count", 8, "mixture of experts"),
        ("llama.rope.dimension_count", 8, "rope.dimension_count"),
        ("llama.attention.value_length", 8, "value_length"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused(tmp_path, key, value, message):
    path, _ = write_model(tmp_path / "x.gguf", extra=lambda w: w.add_uint32(key, value))
    with pytest.raises(UnsupportedModel, match=message):
        model(path)
