"""Rope parameters out of a `config.json`, in either style.

transformers 4 wrote `rope_theta` and `rope_scaling`, transformers 5 writes `rope_parameters`, one set for the model or
one for each type of layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...kernels.errors import CheckpointError, UnsupportedModel
from .arch import RopeSpec
from .fields import Config, float_field, int_field, shown

_KINDS = ("default", "linear", "llama3", "factors")


def rope_spec(config: Config, head_dim: int) -> RopeSpec:
    """The one rope of the model; UnsupportedModel if its layers differ."""
    key = "rope_scaling" if config.get("rope_parameters") is None else "rope_parameters"
    found = config.get(key)
    if found is None:
        found = {}
    if not isinstance(found, dict):
        raise CheckpointError(f"`{key}` in the config is {shown(found)}, expected an object")
    if found and all(isinstance(value, dict) for value in found.values()):
        sets: list[dict[str, object]] = list(found.values())
        if any(item != sets[0] for item in sets):
            raise UnsupportedModel(f"`{key}` has rope parameters that differ between layer types")
        found = sets[0]
    return _from_set(found, config, head_dim, float_field(config, "rope_theta", default=10000.0))


def layered_ropes(config: Config, head_dim: int, theta: float, local_theta: float) -> tuple[RopeSpec, RopeSpec]:
    """(rope of layers with full attention, rope of layers with a window); the thetas stand in for missing ones.

    In the older style `rope_scaling` is for the layers with full attention alone.
    """
    sets = config.get("rope_parameters")
    if sets is None:
        sets = {"full_attention": config.get("rope_scaling")}
    if not isinstance(sets, dict) or not all(isinstance(item, dict | None) for item in sets.values()):
        raise CheckpointError(
            f"rope parameters (`rope_parameters` or `rope_scaling`) are {shown(sets)}, expected an object for "
            "each type of layer"
        )
    full, local = sets.get("full_attention") or {}, sets.get("sliding_attention") or {}
    return (
        _from_set(full, config, head_dim, float_field(config, "rope_theta", default=theta)),
        _from_set(local, config, head_dim, float_field(config, "rope_local_base_freq", default=local_theta)),
    )


def _from_set(rope: Mapping[str, object], config: Config, head_dim: int, theta: float) -> RopeSpec:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UnsupportedModel(f"rope type {shown(kind)} in `rope_type`", "supported: default, linear, llama3")
    for source in (rope, config):
        if source.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise UnsupportedModel(
                f"`partial_rotary_factor` is {shown(source['partial_rotary_factor'])}", "supported: 1.0"
            )
    theta = float_field(rope, "rope_theta", default=theta)
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=float_field(rope, "factor"))
    if kind == "factors":
        return RopeSpec(theta=theta, kind=kind, factors=_factors(rope, head_dim))
    if kind == "llama3":
        low, high = float_field(rope, "low_freq_factor"), float_field(rope, "high_freq_factor")
        if low >= high:
            raise CheckpointError(f"`low_freq_factor` is {low}, it must be less than `high_freq_factor`, {high}")
        context = int_field(config, "max_position_embeddings")
        return RopeSpec(
            theta=theta,
            kind=kind,
            factor=float_field(rope, "factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_context=int_field(rope, "original_max_position_embeddings", default=context),
        )
    return RopeSpec(theta=theta)


def _factors(rope: Mapping[str, object], head_dim: int) -> tuple[float, ...]:
    factors = rope.get("factors")
    if not isinstance(factors, list) or len(factors) != head_dim // 2:
        count = len(factors) if isinstance(factors, list) else 0
        raise CheckpointError(f"{count} rope factors, expected {head_dim // 2} for a head_dim of {head_dim}")
    if not all(isinstance(item, float) and math.isfinite(item) and item > 0 for item in factors):
        raise CheckpointError("a rope factor is no positive number")
    return tuple(factors)
