"""From a checkpoint's `config.json` to a `DecoderSpec`: one function per family, in one table.

What the tensors can tell (biases, a separate head, query and key norms) is not read from the config. What no kernel
here computes is refused by name, never left out: a model that runs with a part missing still writes fluent text.
Both styles of config are read, `rope_theta` + `rope_scaling` (transformers 4) and `rope_parameters` (transformers 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ...kernels.errors import CheckpointError, UnsupportedModel
from .arch import DecoderSpec, RopeSpec

Config = Mapping[str, object]

MAX_LAYERS = 1024  # a config that asks for more is broken; keeps a wrong number from becoming a huge table
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ROPE_KINDS = ("default", "linear", "llama3", "factors")


def decoder_spec(config: Config) -> DecoderSpec:
    """What the config describes; UnsupportedModel if nothing here can run it, CheckpointError if it makes no sense."""
    family = config.get("model_type")
    read = _FAMILIES.get(family) if isinstance(family, str) else None
    if read is None:
        architectures = config.get("architectures")
        named = f" ({', '.join(map(str, architectures))})" if isinstance(architectures, list) else ""
        raise UnsupportedModel(f"unknown model family `{family}`{named}", f"known: {', '.join(known_families())}")
    return read(config)


def known_families() -> tuple[str, ...]:
    """Every `model_type` that can be run."""
    return tuple(_FAMILIES)


@dataclass(frozen=True, slots=True)
class TensorRule:
    """The shape a tensor must have, the config keys that say so, and whether a checkpoint may do without it."""

    shape: tuple[int, ...]
    keys: tuple[str, ...]
    required: bool = True


def decoder_tensors(spec: DecoderSpec) -> dict[str, TensorRule]:
    """Every tensor that a decoder of this spec can use, by Hugging Face name."""
    hidden = _Dim(spec.hidden_size, ("hidden_size",))
    ffn = _Dim(spec.ffn_size, ("intermediate_size",))
    vocab = _Dim(spec.vocab_size, ("vocab_size",))
    query = _Dim(spec.num_heads * spec.head_dim, ("num_attention_heads", "head_dim"))
    value = _Dim(spec.num_kv_heads * spec.head_dim, ("num_key_value_heads", "head_dim"))
    head = _Dim(spec.head_dim, ("head_dim",))
    linears = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (value, hidden),
        "self_attn.v_proj": (value, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    rules = {
        "model.embed_tokens.weight": _rule(vocab, hidden),
        "model.norm.weight": _rule(hidden),
        "lm_head.weight": _rule(vocab, hidden, required=False),
    }
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        for name, (outputs, inputs) in linears.items():
            rules[f"{prefix}{name}.weight"] = _rule(outputs, inputs)
            rules[f"{prefix}{name}.bias"] = _rule(outputs, required=False)
        for name in ("input_layernorm", "post_attention_layernorm"):
            rules[f"{prefix}{name}.weight"] = _rule(hidden)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            rules[f"{prefix}{name}.weight"] = _rule(head, required=False)
    return rules


def expected_shapes(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """The tensors that a checkpoint of this spec cannot do without, and their shapes."""
    return {name: rule.shape for name, rule in decoder_tensors(spec).items() if rule.required}


class _Dim(NamedTuple):
    size: int
    keys: tuple[str, ...]


def _rule(*dims: _Dim, required: bool = True) -> TensorRule:
    keys = dict.fromkeys(key for dim in dims for key in dim.keys)
    return TensorRule(tuple(dim.size for dim in dims), tuple(keys), required)


def _llama(config: Config) -> DecoderSpec:
    return _spec(config, "llama", ())


def _mistral(config: Config) -> DecoderSpec:
    layers = _int(config, "num_hidden_layers", high=MAX_LAYERS)
    window = _window(config, default=4096)
    return _spec(config, "mistral", _layer_windows(config, layers, window, first=0))


def _qwen2(config: Config) -> DecoderSpec:
    return _spec(config, "qwen2", _qwen_windows(config))


def _qwen3(config: Config) -> DecoderSpec:
    return _spec(config, "qwen3", _qwen_windows(config), default_head_dim=128)


_FAMILIES: dict[str, Callable[[Config], DecoderSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


def _spec(config: Config, family: str, windows: tuple[int, ...], default_head_dim: int = 0) -> DecoderSpec:
    hidden = _int(config, "hidden_size")
    heads = _int(config, "num_attention_heads")
    kv_heads = _int(config, "num_key_value_heads", default=heads)
    head_dim = _int(config, "head_dim", default=default_head_dim or hidden // heads)
    layers = _int(config, "num_hidden_layers", high=MAX_LAYERS)
    if heads % kv_heads:
        raise CheckpointError(f"num_attention_heads is {heads}, no multiple of num_key_value_heads, {kv_heads}")
    if head_dim % 2:
        raise CheckpointError(f"head_dim is {head_dim}, rotary embedding needs an even number")
    activation = config.get("hidden_act", "silu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise UnsupportedModel(f"activation `{activation}` (hidden_act)", f"supported: {', '.join(_ACTIVATIONS)}")
    return DecoderSpec(
        family=family,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=_int(config, "intermediate_size"),
        vocab_size=_int(config, "vocab_size"),
        context_length=_int(config, "max_position_embeddings"),
        norm_eps=_float(config, "rms_norm_eps", default=1e-6),
        rope=_rope(config, head_dim),
        activation=_ACTIVATIONS[activation],
        windows=windows or (0,) * layers,
    )


def _qwen_windows(config: Config) -> tuple[int, ...]:
    layers = _int(config, "num_hidden_layers", high=MAX_LAYERS)
    window = _window(config, default=4096) if config.get("use_sliding_window", False) else 0
    first = _int(config, "max_window_layers", default=28, low=0)
    return _layer_windows(config, layers, window, first)


def _window(config: Config, default: int) -> int:
    """Positions a query sees in a sliding layer, 0 for all; `null` means all, a missing key the family's default."""
    if "sliding_window" in config and config["sliding_window"] is None:
        return 0
    return _int(config, "sliding_window", default=default, low=0)


def _layer_windows(config: Config, layers: int, window: int, first: int) -> tuple[int, ...]:
    """The window of each layer: as `layer_types` says, else in every layer from `first` on."""
    types = config.get("layer_types")
    if types is None:
        return tuple(window if layer >= first else 0 for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        found = len(types) if isinstance(types, list) else repr(types)
        raise CheckpointError(f"layer_types has {found} entries, num_hidden_layers is {layers}")
    known = {"full_attention": 0, "sliding_attention": window}
    unknown = [kind for kind in types if not isinstance(kind, str) or kind not in known]
    if unknown:
        raise UnsupportedModel(f"layer type `{unknown[0]}` (layer_types)", f"supported: {', '.join(known)}")
    return tuple(known[kind] for kind in types)


def _rope(config: Config, head_dim: int) -> RopeSpec:
    rope = _rope_parameters(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _ROPE_KINDS:
        raise UnsupportedModel(f"rope type `{kind}`", "supported: default, linear, llama3")
    for source in (rope, config):
        if source.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise UnsupportedModel(f"partial_rotary_factor is {source['partial_rotary_factor']}", "supported: 1.0")
    theta = _float(rope, "rope_theta", default=_float(config, "rope_theta", default=10000.0))
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=_float(rope, "factor"))
    if kind == "factors":
        return RopeSpec(theta=theta, kind=kind, factors=_factors(rope, head_dim))
    if kind == "llama3":
        low, high = _float(rope, "low_freq_factor"), _float(rope, "high_freq_factor")
        if low >= high:
            raise CheckpointError(f"low_freq_factor is {low}, it must be less than high_freq_factor, which is {high}")
        context = _int(config, "max_position_embeddings")
        return RopeSpec(
            theta=theta,
            kind=kind,
            factor=_float(rope, "factor"),
            low_freq_factor=low,
            high_freq_factor=high,
            original_context=_int(rope, "original_max_position_embeddings", default=context),
        )
    return RopeSpec(theta=theta)


def _rope_parameters(config: Config) -> Mapping[str, object]:
    """The one set of rope parameters, from either style of config."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, dict):
        raise CheckpointError(f"rope_parameters or rope_scaling is {found!r}, expected an object")
    if found and all(isinstance(value, dict) for value in found.values()):
        sets: list[dict[str, object]] = list(found.values())
        if any(item != sets[0] for item in sets):
            raise UnsupportedModel("rope parameters that differ between layer types")
        return sets[0]
    return found


def _factors(rope: Mapping[str, object], head_dim: int) -> tuple[float, ...]:
    factors = rope.get("factors")
    if not isinstance(factors, list) or len(factors) != head_dim // 2:
        count = len(factors) if isinstance(factors, list) else 0
        raise CheckpointError(f"{count} rope factors, expected {head_dim // 2} for a head_dim of {head_dim}")
    if not all(isinstance(item, float) and math.isfinite(item) and item > 0 for item in factors):
        raise CheckpointError("a rope factor is no positive number")
    return tuple(factors)


def _int(config: Config, key: str, default: int | None = None, low: int = 1, high: int = 1 << 31) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"the config has no `{key}`")
    if type(value) is not int or not low <= value <= high:
        raise CheckpointError(f"`{key}` in the config is {value!r}, expected an integer from {low} to {high}")
    return value


def _float(config: Config, key: str, default: float | None = None) -> float:
    """A positive number."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"the config has no `{key}`")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"`{key}` in the config is {value!r}, expected a positive number")
    return float(value)
