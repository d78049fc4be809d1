"""Peers that a run is measured against, on the very same weights."""

from __future__ import annotations

from typing import Any

from ...engine.load.checkpoint import open_checkpoint
from ...engine.load.hub import Source
from ...kernels.errors import UnsupportedModel


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
