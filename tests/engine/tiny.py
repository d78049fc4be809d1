"""Tiny random checkpoints of every family, written by transformers, for tests to load."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = 304
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA3 = {
    **SHAPE,
    "num_hidden_layers": 4,
    "head_dim": 24,
    "query_pre_attn_scalar": 40,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
FAMILIES: dict[str, transformers.PretrainedConfig] = {
    "llama": transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "llama-tied-bias": transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True, attention_bias=True),
    "llama3-rope": transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False, rope_parameters=LLAMA3_ROPE),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=24, head_dim=16),
    "qwen2": transformers.Qwen2Config(**SHAPE, tie_word_embeddings=True),
    "qwen2-window": transformers.Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=24, max_window_layers=1, tie_word_embeddings=False
    ),
    "gemma3": transformers.Gemma3TextConfig(**GEMMA3),
    "gemma3-linear-rope": transformers.Gemma3TextConfig(
        **GEMMA3,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=False),
}

# Attention on latents. Layers are dense.
_LATENT = {
    **{key: value for key, value in SHAPE.items() if key != "num_key_value_heads"},
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "first_k_dense_replace": 2,
    "tie_word_embeddings": False,
}
LATENT: dict[str, transformers.PretrainedConfig] = {
    "deepseek-v2": transformers.DeepseekV2Config(**_LATENT, q_lora_rank=None),
    "deepseek-v2-yarn": transformers.DeepseekV2Config(
        **_LATENT,
        q_lora_rank=48,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.9,
        },
    ),
    "deepseek-v3": transformers.DeepseekV3Config(**_LATENT, q_lora_rank=48),
    "deepseek-v2-wide": transformers.DeepseekV2Config(**{**_LATENT, "qk_rope_head_dim": 32}, q_lora_rank=48),
    "deepseek-v3-wide": transformers.DeepseekV3Config(
        **{**_LATENT, "qk_rope_head_dim": 32, "kv_lora_rank": 64}, q_lora_rank=None, rope_interleave=False
    ),
    "deepseek-v3-halves": transformers.DeepseekV3Config(**_LATENT, q_lora_rank=None, rope_interleave=False),
}  # fmt: skip

# Decoders that only transformers has: rotated in part, with other norms, with learned positions, with experts.
FOREIGN: dict[str, transformers.PretrainedConfig] = {
    "gpt-neox": transformers.GPTNeoXConfig(
        **{k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}, tie_word_embeddings=False
    ),
    "olmo2": transformers.Olmo2Config(**SHAPE, tie_word_embeddings=False),
    "gpt2": transformers.GPT2Config(
        **{k: v for k, v in SHAPE.items() if k not in ("num_key_value_heads", "intermediate_size")}
    ),
    "cohere2": transformers.Cohere2Config(
        **{**SHAPE, "num_hidden_layers": 3},
        sliding_window=24,
        layer_types=["sliding_attention"] * 2 + ["full_attention"],
    ),
    "mixtral": transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2),
}


# Attention on latents, and experts behind a dense layer: for GPUs alone.
_BOTH = {
    **_LATENT,
    "qk_rope_head_dim": 32,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
}
LATENT_EXPERTS: dict[str, transformers.PretrainedConfig] = {
    "deepseek-v2-experts": transformers.DeepseekV2Config(**_BOTH, routed_scaling_factor=1.5),
    "deepseek-v3-experts": transformers.DeepseekV3Config(**_BOTH, n_group=1, topk_group=1),
}

# Mixtures of experts, which our decoder computes on a GPU and transformers' modules on a CPU.
_EXPERTS = {**SHAPE, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts_per_tok": 2}
EXPERTS: dict[str, transformers.PretrainedConfig] = {
    "mixtral-wide": transformers.MixtralConfig(**_EXPERTS, num_local_experts=4),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **{**_EXPERTS, "num_hidden_layers": 3, "num_experts_per_tok": 3},
        num_experts=6,
        moe_intermediate_size=32,
        mlp_only_layers=[1],
        norm_topk_prob=True,
    ),
}


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: one token per byte, three special tokens in front."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def write_checkpoint(folder: Path, family: str, seed: int = 7, dtype: torch.dtype = torch.float32) -> Path:
    """A random model of this family with every tensor away from its trivial value (norms and biases too)."""
    model = transformers.AutoModelForCausalLM.from_config(
        (FAMILIES | LATENT | FOREIGN | EXPERTS | LATENT_EXPERTS)[family]
    )
    randomize(model, seed)
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def randomize(model: torch.nn.Module, seed: int = 7) -> None:
    """Every parameter to a random value away from its trivial one."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (0.0 if name.endswith("bias") else 1.0))
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
