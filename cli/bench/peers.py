"""Peers that a run is measured against, on the very same weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...engine.load.checkpoint import open_checkpoint
from ...engine.load.hub import Source
from ...kernels.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Timing:
    """One timed generation: seconds to the first token, seconds in all, tokens that came out."""

    first_token_s: float
    total_s: float
    tokens: int

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second after the first one."""
        return (self.tokens - 1) / (self.total_s - self.first_token_s)


def load_transformers(source: Source) -> Any:
    """The model in transformers, float32 on the CPU, from our own reading of the files (quantized ones dequantized)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = open_checkpoint(source)
    settings = dict(checkpoint.config)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = {name: torch.from_numpy(checkpoint.read(name).dequantize().copy()) for name in checkpoint.tensors}
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [name for name in missing if not (config.tie_word_embeddings and name == "lm_head.weight")]
    if missing or unexpected:
        raise UnsupportedModel(f"transformers expects other tensors: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.eval()


def time_transformers(model: Any, prompt: Sequence[int], num_tokens: int) -> Timing:
    """Greedy generation of exactly `num_tokens` after one prompt, with its KV cache."""
    import torch

    with torch.inference_mode():
        start = time.perf_counter()
        out = model(torch.tensor([list(prompt)]), use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        first = time.perf_counter() - start
        for _ in range(num_tokens - 1):
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
        return Timing(first, time.perf_counter() - start, num_tokens)


def time_transformers_batch(model: Any, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> Timing:
    """Greedy generation for many prompts as one left-padded batch, which runs until the longest answer is done.

    `tokens` counts only what was asked for: rows that go on because others are not done yet produce nothing useful.
    """
    import torch

    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    longest = max(lengths)
    with torch.inference_mode():
        start = time.perf_counter()
        model.generate(
            ids, attention_mask=mask, do_sample=False, min_new_tokens=longest, max_new_tokens=longest, pad_token_id=0
        )
        total = time.perf_counter() - start
    return Timing(total, total, sum(lengths))
