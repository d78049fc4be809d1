"""Tiny checkpoints, made with transformers and the tokenizers library."""

import json

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = ["the quick brown fox jumps over the lazy dog", "Grüße, 你好 🙂 and 12345"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_tokenizer(folder):
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(folder, config_class=transformers.LlamaConfig, dtype=torch.float32, shard="1GB", **changes):
    """A tiny random model saved by transformers, with a tokenizer; returns its state dict."""
    torch.manual_seed(0)
    config = config_class(
        **{
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 300,
            "max_position_embeddings": 128,
            "tie_word_embeddings": True,
            **changes,
        }
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    write_tokenizer(folder)
    return model.state_dict()


@pytest.fixture
def model_folder(tmp_path):
    folder = tmp_path / "model"
    write_model(folder)
    return folder


@pytest.fixture
def build_model():
    """`write_model`, for tests that choose the model."""
    return write_model


@pytest.fixture
def build_tokenizer():
    """`write_tokenizer`, for tests that need no weights."""
    return write_tokenizer
