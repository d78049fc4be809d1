"""Rope parameters out of a `config.json`, in either style.

transformers 4 wrote `rope_theta` and `rope_scaling`, transformers 5 writes `rope_parameters`, one set for the model or
one for each type of layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from ...kernels.errors import CheckpointError, UnsupportedModel, UsageError
from ..rope_scaling import RopeScaling
from .arch import MAX_CONTEXT, DecoderSpec, RopeSpec
from .fields import Config, flag_field, float_field, int_field, shown

_KINDS = ("default", "linear", "llama3", "yarn", "dynamic", "longrope", "factors")


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


def scaled_context(rope: RopeSpec, declared: int) -> int:
    """The model's context: what its config declares, or what its rope stretches that to.

    Files with yarn declare either the original or the stretched context, those with dynamic scaling the original.
    """
    if rope.kind == "yarn":
        return max(declared, round(rope.factor * rope.original_context))
    return round(rope.factor * declared) if rope.kind == "dynamic" else declared


def overridden(spec: DecoderSpec, asked: RopeScaling) -> DecoderSpec:
    """The model with the rope that is asked for, and the context that this rope makes of its original one.

    Layers with a rope of their own for their window keep it. UsageError for what the model cannot have.
    """
    own = spec.rope
    trained = own.original_context or round(spec.context_length / (own.factor if own.kind == "linear" else 1))
    context = asked.original_max_position_embeddings or trained
    if context > (most := max(trained, spec.context_length)):
        raise UsageError(
            f"`original_max_position_embeddings` of --rope-scaling is {context}, this model's context is {most} tokens",
            f"give at most {most}, or leave it out; `factor` makes the context longer",
        )
    config = {"max_position_embeddings": context}
    try:
        rope = _from_set(asked.given(), config, spec.rope_dim, asked.rope_theta or own.theta)
    except CheckpointError as error:
        raise UsageError(f"--rope-scaling: {error.message}") from error
    if asked.rope_type == "default":
        length = context
    elif asked.rope_type == "llama3":
        length = max(context, spec.context_length)
    else:
        length = round(asked.factor * context) if asked.factor else spec.context_length
    if length > MAX_CONTEXT:
        raise UsageError(
            f"--rope-scaling makes a context of {length} tokens, at most {MAX_CONTEXT} can be had",
            f"lower `factor`, which is {asked.factor:g}",
        )
    return msgspec.structs.replace(spec, rope=rope, context_length=length)


def _from_set(rope: Mapping[str, object], config: Config, head_dim: int, theta: float) -> RopeSpec:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UnsupportedModel(f"rope type {shown(kind)} in `rope_type`", f"supported: {', '.join(_KINDS[:-1])}")
    for source in (rope, config):
        if source.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise UnsupportedModel(
                f"`partial_rotary_factor` is {shown(source['partial_rotary_factor'])}", "supported: 1.0"
            )
    theta = float_field(rope, "rope_theta", default=theta)
    if theta <= 1:  # every dimension would turn at the same pace, or the later ones faster
        raise CheckpointError(f"`rope_theta` is {theta:g}, it must be more than 1")
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=float_field(rope, "factor"))
    if kind == "factors":
        return RopeSpec(theta=theta, kind=kind, factors=_factors(rope, "factors", head_dim))
    if kind == "yarn":
        return _yarn(rope, config, theta)
    if kind == "longrope":
        return _longrope(rope, config, theta, head_dim)
    if kind == "dynamic":
        if head_dim <= 2:
            raise UnsupportedModel(f"dynamic rope scaling of {head_dim} dimensions")
        context = int_field(config, "max_position_embeddings")
        return RopeSpec(theta=theta, kind=kind, factor=float_field(rope, "factor"), original_context=context)
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


def _yarn(rope: Mapping[str, object], config: Config, theta: float) -> RopeSpec:
    factor, original = _stretch(rope, config)
    if factor == 1:  # neither said nor to be had from the lengths
        factor = float_field(rope, "factor")
    fast, slow = float_field(rope, "beta_fast", default=32.0), float_field(rope, "beta_slow", default=1.0)
    if fast <= slow:
        raise CheckpointError(f"`beta_fast` is {fast:g}, it must be more than `beta_slow`, {slow:g}")
    if rope.get("attention_factor") is not None:
        attention = float_field(rope, "attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        attention = yarn_scale(factor, float_field(rope, "mscale")) / yarn_scale(
            factor, float_field(rope, "mscale_all_dim")
        )
    else:
        attention = yarn_scale(factor, 1.0)
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_context=original,
        attention_factor=attention,
        beta_fast=fast,
        beta_slow=slow,
        truncate=flag_field(rope, "truncate", default=True),
    )


def yarn_scale(factor: float, mscale: float) -> float:
    """By how much yarn sharpens attention for a context stretched by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(rope: Mapping[str, object], config: Config, theta: float, head_dim: int) -> RopeSpec:
    factor, original = _stretch(rope, config)
    computed = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return RopeSpec(
        theta=theta,
        kind="longrope",
        factor=factor,
        original_context=original,
        factors=_factors(rope, "short_factor", head_dim),
        long_factors=_factors(rope, "long_factor", head_dim),
        attention_factor=float_field(rope, "attention_factor", default=computed),
    )


def _stretch(rope: Mapping[str, object], config: Config) -> tuple[float, int]:
    """(factor, original context); the latter may also stand beside the rope's parameters, and then counts."""
    context = int_field(config, "max_position_embeddings")
    original = int_field(rope, "original_max_position_embeddings", default=context)
    original = int_field(config, "original_max_position_embeddings", default=original)
    return float_field(rope, "factor", default=context / original), original


def _factors(rope: Mapping[str, object], key: str, head_dim: int) -> tuple[float, ...]:
    factors = rope.get(key)
    if not isinstance(factors, list) or len(factors) != head_dim // 2:
        count = len(factors) if isinstance(factors, list) else 0
        raise CheckpointError(
            f"{count} rope factors in `{key}`, expected {head_dim // 2} for {head_dim} rotated dimensions"
        )
    if any(isinstance(item, bool) or not isinstance(item, int | float) for item in factors) or not all(
        math.isfinite(item) and item > 0 for item in factors
    ):
        raise CheckpointError(f"a rope factor in `{key}` is no positive number")
    return tuple(map(float, factors))
