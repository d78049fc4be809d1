"""Gemma 3 from other containers than its own folder: a GGUF file, and the folder of a model that also sees."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from llmctl.engine.config import EngineConfig, environment
from llmctl.engine.load.hub import resolve
from llmctl.engine.load.packed import open_packed
from llmctl.engine.plan import resolve as resolve_plan
from llmctl.engine.runner.runner import Runner

from .forced import forced_logits
from .tiny import FAMILIES, VOCAB, randomize, write_tokenizer

GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str) -> str:
    for ours, theirs in (("model.embed_tokens", "token_embd"), ("model.norm", "output_norm")):
        if name.startswith(ours):
            return theirs + name[len(ours) :]
    _, _, layer, *rest = name.removesuffix(".weight").split(".")
    return f"blk.{layer}.{GGUF_NAMES['.'.join(rest)]}.weight"


def write_gguf(path: Path, config: transformers.Gemma3TextConfig, state: dict[str, torch.Tensor]) -> Path:
    """The model as llama.cpp's converter writes it: norms with the 1 added, most facts left out."""
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    tokens = ["<pad>", "a", "b", "ab", *(f"t{i}" for i in range(4, config.vocab_size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    for name, tensor in state.items():
        if name != "lm_head.weight":
            shifted = tensor + 1 if name.endswith("norm.weight") else tensor
            writer.add_tensor(gguf_name(name), shifted.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def our_logits(path: Path, tokens: list[int], cache: Path) -> np.ndarray:
    config = EngineConfig(dtype="float32", max_num_batched_tokens=64, max_num_seqs=64, block_size=16)
    model = open_packed(resolve(str(path), environment=environment()), dtype="float32", cache=cache)
    return forced_logits(Runner(model, resolve_plan(config, model)[0]), tokens, VOCAB, 64, 16)


@pytest.fixture
def tokens() -> list[int]:
    return np.random.default_rng(3).integers(3, VOCAB, 60).tolist()


def test_a_gguf_file_gives_the_logits_of_transformers(tokens: list[int], tmp_path: Path) -> None:
    """With what the file format takes for granted: a window in all layers but every sixth, queries scaled by head."""
    given = FAMILIES["gemma3"].to_dict()
    config = transformers.Gemma3TextConfig(
        **{**given, "num_hidden_layers": 7, "layer_types": None, "query_pre_attn_scalar": given["head_dim"]}
    )
    oracle = transformers.AutoModelForCausalLM.from_config(config).eval()
    randomize(oracle)
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0].numpy()
    path = write_gguf(tmp_path / "gemma.gguf", config, oracle.state_dict())
    np.testing.assert_allclose(our_logits(path, tokens, tmp_path / "cache"), expected, atol=3e-4, rtol=0)


def test_the_decoder_of_a_model_that_sees_gives_its_logits_for_text(tokens: list[int], tmp_path: Path) -> None:
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = transformers.Gemma3Config(text_config=FAMILIES["gemma3"], vision_config=vision, mm_tokens_per_image=4)
    oracle = transformers.Gemma3ForConditionalGeneration(config).eval()
    randomize(oracle)
    oracle.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(our_logits(tmp_path / "model", tokens, tmp_path / "cache"), expected, atol=3e-4, rtol=0)
