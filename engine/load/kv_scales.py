"""Scales that a checkpoint brings for an fp8 KV cache."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...kernels.ops import F32Array


def scale_names(layer: int, part: str) -> tuple[str, ...]:
    """What the scale of a layer's K ("k") or V ("v") may be called: by compressed-tensors and vLLM, by ModelOpt."""
    attention = f"model.layers.{layer}.self_attn"
    return f"{attention}.{part}_scale", f"{attention}.{part}_proj.{part}_scale"


def scale_tensors(num_layers: int) -> frozenset[str]:
    """Every name that a scale of a model of so many layers may have."""
    return frozenset(name for layer in range(num_layers) for part in "kv" for name in scale_names(layer, part))


def stored_scales(vectors: Mapping[str, F32Array], layer: int, num_kv_heads: int) -> F32Array | None:
    """The layer's scales of K and V, [2, kv_heads], None if one is missing. One number stands for all heads.

    As in vLLM, a scale that is not positive is missing.
    """
    rows = []
    for part in "kv":
        found = [vectors[name] for name in scale_names(layer, part) if name in vectors]
        if not found or not (found[0] > 0).all():
            return None
        rows.append(np.broadcast_to(found[0], num_kv_heads))
    return np.stack(rows).astype(np.float32)
