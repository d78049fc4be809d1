"""From a checkpoint's `config.json` to a `DecoderSpec`: one function per family, in one table.

What the tensors can tell (biases, a separate head, query and key norms) is not read from the config. What no kernel
here computes is refused by name, never left out: a model that runs with a part missing still writes fluent text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from ...kernels.errors import CheckpointError, UnsupportedModel
from .arch import MAX_CONTEXT, DecoderSpec, ExpertSpec, LatentSpec, RopeSpec
from .fields import Config, flag_field, float_field, int_field, shown, window_field
from .rope_config import layered_ropes, rope_spec, scaled_context, yarn_scale

MAX_LAYERS = 1024  # a config that asks for more is broken; keeps a wrong number from becoming a huge table
_INNER_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def decoder_spec(config: Config) -> DecoderSpec:
    """What the config describes; UnsupportedModel if nothing here can run it, CheckpointError if it makes no sense."""
    family = config.get("model_type")
    read = _FAMILIES.get(family) if isinstance(family, str) else None
    if read is None:
        architectures = config.get("architectures")
        named = f" ({', '.join(map(str, architectures))})" if isinstance(architectures, list) else ""
        raise UnsupportedModel(
            f"unknown model family `{family}` in `model_type`{named}", f"known: {', '.join(known_families())}"
        )
    return read(config)


def known_families() -> tuple[str, ...]:
    """Every `model_type` that can be run."""
    return (*_FAMILIES, *_LANGUAGE_PARTS)


@dataclass(frozen=True, slots=True)
class LanguagePart:
    """The decoder inside a model that also sees: its config, and how its tensors are told from the others.

    prefixes  beginnings of its tensors' names, and what stands for them in a decoder that is alone
    others    beginnings of the names of tensors that belong to the other parts
    """

    config: Config
    prefixes: tuple[tuple[str, str], ...]
    others: tuple[str, ...]

    def name(self, name: str) -> str | None:
        """What the tensor is called in a decoder that is alone, None for a tensor of the other parts."""
        if name.startswith(self.others):
            return None
        return next((own + name[len(start) :] for start, own in self.prefixes if name.startswith(start)), name)


def language_part(config: Config) -> LanguagePart | None:
    """The decoder in a model of several parts, None if the config is of a decoder alone."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in _LANGUAGE_PARTS:
        return None
    own = config.get("text_config")
    if not isinstance(own, dict):
        raise CheckpointError(f"`text_config` in the config is {shown(own)}, expected an object")
    decoder, prefixes, others = _LANGUAGE_PARTS[family]
    shared = {key: config[key] for key in _SHARED if key in config}
    return LanguagePart({"model_type": decoder, **own, **shared}, prefixes, others)


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
    dense = {
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    linears: dict[str, tuple[_Dim, _Dim]] = {}
    norms: dict[str, _Dim] = {}
    if spec.latent is None:
        linears |= {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (value, hidden),
            "self_attn.v_proj": (value, hidden),
            "self_attn.o_proj": (hidden, query),
        }
    else:
        latent_linears, norms = _latent_tensors(spec, spec.latent, hidden, query)
        linears |= latent_linears
    rules = {
        "model.embed_tokens.weight": _rule(vocab, hidden),
        "model.norm.weight": _rule(hidden),
        "lm_head.weight": _rule(vocab, hidden, required=not spec.tied_head),
    }
    for layer in range(spec.num_layers):
        prefix = f"model.layers.{layer}."
        experts = spec.experts_of(layer)
        if experts is not None:
            rules |= {f"{prefix}{name}": rule for name, rule in _expert_tensors(experts, hidden).items()}
        for name, (outputs, inputs) in (linears | (dense if experts is None else {})).items():
            rules[f"{prefix}{name}.weight"] = _rule(outputs, inputs)
            rules[f"{prefix}{name}.bias"] = _rule(outputs, required=False)
        for name in ("input_layernorm", "post_attention_layernorm", *(_INNER_NORMS if spec.sandwich_norms else ())):
            rules[f"{prefix}{name}.weight"] = _rule(hidden)
        for name, size in norms.items():
            rules[f"{prefix}{name}.weight"] = _rule(size)
        for name in ("self_attn.q_norm", "self_attn.k_norm") if spec.latent is None else ():
            rules[f"{prefix}{name}.weight"] = _rule(head, required=False)
    return rules


def _latent_tensors(
    spec: DecoderSpec, latent: LatentSpec, hidden: _Dim, query: _Dim
) -> tuple[dict[str, tuple[_Dim, _Dim]], dict[str, _Dim]]:
    """(linears, norms) of attention on latents, by name in a layer."""
    kv_rank = _Dim(latent.kv_rank, ("kv_lora_rank",))
    stored = _Dim(latent.kv_rank + latent.rope_dim, ("kv_lora_rank", "qk_rope_head_dim"))
    both = _Dim(spec.num_heads * (latent.nope_dim + latent.value_dim), ("qk_nope_head_dim", "v_head_dim"))
    mixed = _Dim(spec.num_heads * latent.value_dim, ("num_attention_heads", "v_head_dim"))
    linears = {
        "self_attn.kv_a_proj_with_mqa": (stored, hidden),
        "self_attn.kv_b_proj": (both, kv_rank),
        "self_attn.o_proj": (hidden, mixed),
    }
    norms = {"self_attn.kv_a_layernorm": kv_rank}
    if not latent.q_rank:
        return linears | {"self_attn.q_proj": (query, hidden)}, norms
    q_rank = _Dim(latent.q_rank, ("q_lora_rank",))
    linears |= {"self_attn.q_a_proj": (q_rank, hidden), "self_attn.q_b_proj": (query, q_rank)}
    return linears, norms | {"self_attn.q_a_layernorm": q_rank}


def _expert_tensors(experts: ExpertSpec, hidden: _Dim) -> dict[str, TensorRule]:
    """The tensors of a mixture of experts, by name in a layer."""
    count = _Dim(experts.count, ("num_experts", "num_local_experts", "n_routed_experts"))
    ffn = _Dim(experts.ffn_size, ("moe_intermediate_size", "intermediate_size"))
    shared = _Dim(experts.shared_size, ("moe_intermediate_size", "n_shared_experts"))
    shapes = dict(zip(experts.names, ((ffn, hidden), (ffn, hidden), (hidden, ffn)), strict=True))
    rules = {f"{experts.place}.gate.weight": _rule(count, hidden)}
    if experts.biased:
        rules[f"{experts.place}.gate.e_score_correction_bias"] = _rule(count)
    for expert in range(experts.count):
        for name, shape in shapes.items():
            rules[f"{experts.place}.experts.{expert}.{name}.weight"] = _rule(*shape)
    if experts.shared_size:
        for name in ("gate_proj", "up_proj"):
            rules[f"{experts.place}.shared_experts.{name}.weight"] = _rule(shared, hidden)
        rules[f"{experts.place}.shared_experts.down_proj.weight"] = _rule(hidden, shared)
    return rules


class _Dim(NamedTuple):
    size: int
    keys: tuple[str, ...]


def _rule(*dims: _Dim, required: bool = True) -> TensorRule:
    keys = dict.fromkeys(key for dim in dims for key in dim.keys)
    return TensorRule(tuple(dim.size for dim in dims), tuple(keys), required)


def _llama(config: Config) -> DecoderSpec:
    return _spec(config, "llama", ())


def _mistral(config: Config) -> DecoderSpec:
    layers = int_field(config, "num_hidden_layers", high=MAX_LAYERS)
    window = window_field(config, default=4096)
    return _spec(config, "mistral", _layer_windows(config, layers, window, first=0))


def _mixtral(config: Config) -> DecoderSpec:
    layers = int_field(config, "num_hidden_layers", high=MAX_LAYERS)
    window = window_field(config)
    plain = _spec(config, "mixtral", _layer_windows(config, layers, window, first=0))
    experts = ExpertSpec(
        count=int_field(config, "num_local_experts"),
        chosen=int_field(config, "num_experts_per_tok"),
        ffn_size=plain.ffn_size,
        normalize=True,
        place="block_sparse_moe",
        names=("w1", "w3", "w2"),
    )
    return msgspec.structs.replace(plain, experts=_checked(experts))


def _qwen3_moe(config: Config) -> DecoderSpec:
    plain = _spec(config, "qwen3_moe", _qwen_windows(config), default_head_dim=128)
    step = int_field(config, "decoder_sparse_step", default=1)
    only = config.get("mlp_only_layers") or []
    if not isinstance(only, list):
        raise CheckpointError(f"`mlp_only_layers` is {shown(only)}, expected a list of layers")
    experts = ExpertSpec(
        count=int_field(config, "num_experts" if "num_experts" in config else "num_local_experts"),
        chosen=int_field(config, "num_experts_per_tok"),
        ffn_size=int_field(config, "moe_intermediate_size"),
        normalize=flag_field(config, "norm_topk_prob", default=False),
        dense=tuple(layer for layer in range(plain.num_layers) if layer in only or (layer + 1) % step),
    )
    return msgspec.structs.replace(plain, experts=_checked(experts))


def _checked(experts: ExpertSpec) -> ExpertSpec:
    if experts.chosen > experts.count:
        raise CheckpointError(
            f"`num_experts_per_tok` is {experts.chosen}, more than there are experts, which is {experts.count}"
        )
    return experts


def _qwen2(config: Config) -> DecoderSpec:
    return _spec(config, "qwen2", _qwen_windows(config))


def _qwen3(config: Config) -> DecoderSpec:
    return _spec(config, "qwen3", _qwen_windows(config), default_head_dim=128)


# What transformers takes a missing key of a Gemma 3 config to be; the files of Gemma's makers leave out many.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window_pattern": 6,
}


def _gemma3(config: Config) -> DecoderSpec:
    """Gemma 3 without its eyes. `norm_offset_added` is a key of ours, for files whose norms hold the 1 already."""
    if "sliding_window" in config and config["sliding_window"] is None:
        raise UnsupportedModel("`sliding_window` is null", "a Gemma 3 decoder has layers with a window")
    config = _GEMMA3_DEFAULTS | {key: value for key, value in config.items() if value is not None}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key in config:
            raise UnsupportedModel(
                f"`{key}` is {shown(config[key])}", "models with soft caps on their logits cannot be run"
            )
    if flag_field(config, "use_bidirectional_attention", default=False):
        raise UnsupportedModel("attention is bidirectional (use_bidirectional_attention)", "use a causal model")
    layers = int_field(config, "num_hidden_layers", high=MAX_LAYERS)
    window, pattern = int_field(config, "sliding_window", default=4096), int_field(config, "sliding_window_pattern")
    every = tuple(window if (layer + 1) % pattern else 0 for layer in range(layers))
    windows = every if config.get("layer_types") is None else _layer_windows(config, layers, window, first=0)
    full, local = layered_ropes(config, int_field(config, "head_dim"), theta=1e6, local_theta=1e4)
    plain = _spec(config, "gemma3", windows, rope=full, activation_key="hidden_activation")
    return msgspec.structs.replace(
        plain,
        rope_local=local,
        query_scale=float_field(config, "query_pre_attn_scalar") ** -0.5,
        embedding_scale=plain.hidden_size**0.5,
        norm_offset=0.0 if flag_field(config, "norm_offset_added", default=False) else 1.0,
        sandwich_norms=True,
    )


def _deepseek_v2(config: Config) -> DecoderSpec:
    return _deepseek(config, "deepseek_v2", first_dense=0, interleaved=True)


def _deepseek_v3(config: Config) -> DecoderSpec:
    return _deepseek(config, "deepseek_v3", 3, flag_field(config, "rope_interleave", default=True))


def _deepseek(config: Config, family: str, first_dense: int, interleaved: bool) -> DecoderSpec:
    """A DeepSeek model, of whose experts all are in one group."""
    layers = int_field(config, "num_hidden_layers", high=MAX_LAYERS)
    dense = int_field(config, "first_k_dense_replace", default=first_dense, low=0)
    experts = _deepseek_experts(config, dense, family) if dense < layers else None
    latent = LatentSpec(
        kv_rank=int_field(config, "kv_lora_rank"),
        q_rank=0 if config.get("q_lora_rank") is None else int_field(config, "q_lora_rank"),
        nope_dim=int_field(config, "qk_nope_head_dim"),
        rope_dim=int_field(config, "qk_rope_head_dim"),
        value_dim=int_field(config, "v_head_dim"),
        interleaved=interleaved,
    )
    rope = rope_spec(config, latent.rope_dim)
    head_dim = latent.nope_dim + latent.rope_dim
    heads = int_field(config, "num_attention_heads")
    plain = _spec({**config, "head_dim": head_dim, "num_key_value_heads": heads}, family, (), rope=rope)
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    sharper = float_field(found, "mscale_all_dim", default=1e-9) if isinstance(found, dict) else 1e-9
    scale = yarn_scale(rope.factor, sharper) if rope.kind != "default" else 1.0
    return msgspec.structs.replace(plain, latent=latent, query_scale=head_dim**-0.5 * scale * scale, experts=experts)


def _deepseek_experts(config: Config, dense: int, family: str) -> ExpertSpec:
    """The experts of layers from `dense` on, with those that compute every token beside them."""
    third = family == "deepseek_v3"
    groups = 1 if config.get("n_group") is None else int_field(config, "n_group")
    if groups != 1 or int_field(config, "moe_layer_freq", default=1) != 1:
        raise UnsupportedModel(
            f"layers from {dense} on are mixtures of experts that are chosen in {groups} groups (`n_group`), or not in "
            "every layer (`moe_layer_freq`)",
            "mixtures whose experts are all in one group can be run",
        )
    normalize = flag_field(config, "norm_topk_prob", default=third)
    if normalize and not third:
        raise UnsupportedModel("`norm_topk_prob` is true", "in DeepSeek-V2 the weights of experts are not normalized")
    ffn = int_field(config, "moe_intermediate_size")
    return _checked(
        ExpertSpec(
            count=int_field(config, "n_routed_experts" if "n_routed_experts" in config else "num_local_experts"),
            chosen=int_field(config, "num_experts_per_tok"),
            ffn_size=ffn,
            normalize=normalize,
            score="sigmoid" if third else "softmax",
            scale=float_field(config, "routed_scaling_factor", default=2.5 if third else 1.0),
            biased=third,
            dense=tuple(range(dense)),
            shared_size=ffn * int_field(config, "n_shared_experts", default=1 if third else 2),
        )
    )


_FAMILIES: dict[str, Callable[[Config], DecoderSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gemma3_text": _gemma3,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
}

_SHARED = ("tie_word_embeddings",)  # what the config of the whole says for the decoder
# Models that also see: the decoder's own family, its tensors' prefixes, and those of the other parts.
_LANGUAGE_PARTS: dict[str, tuple[str, tuple[tuple[str, str], ...], tuple[str, ...]]] = {
    "gemma3": (
        "gemma3_text",
        (("language_model.", ""), ("model.language_model.", "model.")),
        ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
    ),
}


def _spec(
    config: Config,
    family: str,
    windows: tuple[int, ...],
    default_head_dim: int = 0,
    rope: RopeSpec | None = None,
    activation_key: str = "hidden_act",
) -> DecoderSpec:
    hidden = int_field(config, "hidden_size")
    heads = int_field(config, "num_attention_heads")
    kv_heads = int_field(config, "num_key_value_heads", default=heads)
    if config.get("head_dim") is None and not default_head_dim and hidden % heads:
        raise CheckpointError(f"`hidden_size` is {hidden}, no multiple of `num_attention_heads`, which is {heads}")
    head_dim = int_field(config, "head_dim", default=default_head_dim or hidden // heads)
    layers = int_field(config, "num_hidden_layers", high=MAX_LAYERS)
    if heads % kv_heads:
        raise CheckpointError(f"`num_attention_heads` is {heads}, no multiple of `num_key_value_heads`, {kv_heads}")
    if head_dim % 2:
        raise CheckpointError(f"`head_dim` is {head_dim}, rotary embedding needs an even number")
    if rope is None:
        rope = rope_spec(config, head_dim)
    window_field(config)  # for families without a window too: a config that makes no sense here is broken
    activation = config.get(activation_key, "silu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"activation {shown(activation)} in `{activation_key}`", f"supported: {', '.join(_ACTIVATIONS)}"
        )
    return DecoderSpec(
        family=family,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=int_field(config, "intermediate_size"),
        vocab_size=int_field(config, "vocab_size"),
        context_length=scaled_context(rope, int_field(config, "max_position_embeddings", high=MAX_CONTEXT)),
        norm_eps=float_field(config, "rms_norm_eps", default=1e-6),
        rope=rope,
        activation=_ACTIVATIONS[activation],
        windows=windows or (0,) * layers,
        tied_head=flag_field(config, "tie_word_embeddings", default=False),
    )


def _qwen_windows(config: Config) -> tuple[int, ...]:
    layers = int_field(config, "num_hidden_layers", high=MAX_LAYERS)
    window = window_field(config, default=4096) if flag_field(config, "use_sliding_window", default=False) else 0
    first = int_field(config, "max_window_layers", default=28, low=0)
    return _layer_windows(config, layers, window, first)


def _layer_windows(config: Config, layers: int, window: int, first: int) -> tuple[int, ...]:
    """The window of each layer: as `layer_types` says, else in every layer from `first` on."""
    types = config.get("layer_types")
    if types is None:
        return tuple(window if layer >= first else 0 for layer in range(layers))
    if not isinstance(types, list) or len(types) != layers:
        found = f"has {len(types)} entries" if isinstance(types, list) else f"is {shown(types)}"
        raise CheckpointError(f"`layer_types` {found}, expected a list of {layers} (`num_hidden_layers`)")
    known = {"full_attention": 0, "sliding_attention": window}
    unknown = [kind for kind in types if not isinstance(kind, str) or kind not in known]
    if unknown:
        raise UnsupportedModel(f"layer type {shown(unknown[0])} in `layer_types`", f"supported: {', '.join(known)}")
    return tuple(known[kind] for kind in types)
