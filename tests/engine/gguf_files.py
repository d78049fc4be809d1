"""Models as GGUF files, written as llama.cpp's converter does, for tests to load."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch
import transformers

from .tiny import FAMILIES

GEMMA3_NAMES = {
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


LLAMA_NAMES = {
    **{name: GEMMA3_NAMES[name] for name in GEMMA3_NAMES if name.startswith(("self_attn", "mlp", "input"))},
    "post_attention_layernorm": "ffn_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str, parts: dict[str, str]) -> str:
    for ours, theirs in TOP.items():
        if name.startswith(ours):
            return theirs + name[len(ours) :]
    _, _, layer, *rest = name.removesuffix(".weight").split(".")
    return f"blk.{layer}.{parts['.'.join(rest)]}.weight"


def write_gemma3(path: Path, oracle: torch.nn.Module) -> Path:
    """Norms with the 1 added, most facts left out, the head tied."""
    config = oracle.config
    writer = _begun(path, "gemma3", config)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    for name, tensor in oracle.state_dict().items():
        if name != "lm_head.weight":
            shifted = tensor + 1 if name.endswith("norm.weight") else tensor
            writer.add_tensor(gguf_name(name, GEMMA3_NAMES), shifted.numpy())
    return _ended(path, writer)


def write_llama3(path: Path, oracle: torch.nn.Module) -> Path:
    """Rows of queries and keys interleaved, and the scaling of the rope as a divisor of each frequency."""
    config = oracle.config
    writer = _begun(path, "llama", config)
    theta = config.rope_parameters["rope_theta"]
    writer.add_rope_freq_base(theta)
    plain = theta ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    writer.add_tensor("rope_freqs.weight", (plain / oracle.model.rotary_emb.inv_freq).float().numpy())
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in oracle.state_dict().items():
        count = heads.get(name.split(".")[-2])
        if count is not None:
            tensor = tensor.reshape(count, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
        writer.add_tensor(gguf_name(name, LLAMA_NAMES), tensor.contiguous().numpy())
    return _ended(path, writer)


def _begun(path: Path, arch: str, config: transformers.PretrainedConfig) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    tokens = ["<pad>", "a", "b", "ab", *(f"t{i}" for i in range(4, config.vocab_size))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    return writer


def _ended(path: Path, writer: gguf.GGUFWriter) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gemma3_config(num_layers: int) -> transformers.Gemma3TextConfig:
    """What a GGUF file takes for granted: a window in all layers but every sixth, queries scaled by head."""
    given = FAMILIES["gemma3"].to_dict()
    changes = {"num_hidden_layers": num_layers, "layer_types": None, "query_pre_attn_scalar": given["head_dim"]}
    return transformers.Gemma3TextConfig(**{**given, **changes})
