"""Peers that a run is measured against, on the very same weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...engine.load.checkpoint import open_checkpoint
from ...engine.load.hub import Source
from ...engine.models.rope import inverse_frequencies
from ...kernels.errors import UnsupportedModel


def load_transformers(source: Source) -> Any:
    """The model in transformers, float32 on the CPU, from our own reading of the files (quantized ones dequantized)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = open_checkpoint(source)
    settings = dict(checkpoint.config)
    held = settings.pop("norm_offset_added", False) is True  # norms that hold the 1 which transformers adds
    factors = checkpoint.spec.rope.kind == "factors"  # a kind of ours, for GGUF files
    if factors:
        settings["rope_parameters"] = {"rope_type": "default", "rope_theta": checkpoint.spec.rope.theta}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = {name: checkpoint.read(name).dequantize().copy() for name in checkpoint.tensors}
    for name, values in state.items():
        if held and name.endswith("norm.weight"):
            values -= np.float32(1)
    missing, unexpected = model.load_state_dict({k: torch.from_numpy(v) for k, v in state.items()}, strict=False)
    missing = [name for name in missing if not (config.tie_word_embeddings and name == "lm_head.weight")]
    if missing or unexpected:
        raise UnsupportedModel(f"transformers expects other tensors: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    if factors:
        frequencies = inverse_frequencies(checkpoint.spec.rope, checkpoint.spec.head_dim)
        model.model.rotary_emb.inv_freq.copy_(torch.from_numpy(frequencies))
    return model.eval()
