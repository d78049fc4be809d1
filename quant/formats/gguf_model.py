"""A GGUF model under Hugging Face names: tensors, config and generation defaults.

Only names and the order of rows change; codes and scales stay as stored. The llama converters of GGUF interleave the
rows of each query and key head (pairs 2i, 2i + 1 are rotated together); `read` puts them back into the split-half order
that the decoder rotates, which is exact in every format because a row is never split.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...kernels.errors import CheckpointError, UnsupportedModel
from ..tensor import WeightTensor
from .gguf import GGUFFile, Value
from .stored import StoredTensor

_INTERLEAVED_PARTS = {".self_attn.q_proj.": "num_attention_heads", ".self_attn.k_proj.": "num_key_value_heads"}
_ROPE_FACTORS = "rope_freqs.weight"
_LONGROPE_FACTORS = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_LAYER = _LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Architecture:
    """What files of one `general.architecture` hold, in Hugging Face's words.

    layer        the parts of a layer by their name in the file
    interleaved  whether its converter permutes the rows of queries and keys
    windowed     (model_type, class) if a file has a sliding window, where that makes it another family
    facts        what its config says besides what all of them say, from the file
    """

    model_type: str
    causal_lm: str
    layer: Mapping[str, str]
    interleaved: bool = False
    windowed: tuple[str, str] | None = None
    facts: Callable[[GGUFFile], dict[str, object]] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GGUFModel:
    """`tensors` by Hugging Face name (names without a counterpart stay), and the matching config."""

    config: dict[str, object]
    tensors: Mapping[str, StoredTensor]
    gguf: GGUFFile
    head_rows: Mapping[str, npt.NDArray[np.int64]]  # by tensor: where each of its rows is in the file

    def check_readable(self, name: str) -> None:
        """Raise UnsupportedModel if the tensor's type cannot be read."""
        self.gguf.check_readable(self.tensors[name].name)

    def read(self, name: str) -> WeightTensor:
        """The tensor with its rows in Hugging Face order."""
        weight = self.gguf.read(self.tensors[name].name)
        rows = self.head_rows.get(name)
        return weight if rows is None else weight.select_rows(rows)


def open_model(gguf: GGUFFile) -> GGUFModel:
    """The model in the file; UnsupportedModel for an architecture that has no mapping here."""
    arch = _architecture(gguf)
    architecture = _ARCHITECTURES[arch]
    config = _config(gguf, arch) | (architecture.facts(gguf) if architecture.facts is not None else {})
    tensors: dict[str, StoredTensor] = {}
    head_rows: dict[str, npt.NDArray[np.int64]] = {}
    for name, tensor in gguf.tensors.items():
        if name in (_ROPE_FACTORS, *_LONGROPE_FACTORS.values()):
            continue
        renamed = hugging_face_name(name, arch)
        tensors[renamed] = tensor
        if architecture.interleaved:
            for part, heads in _INTERLEAVED_PARTS.items():
                if part in renamed:
                    head_rows[renamed] = _split_half_rows(tensor, _size(config, heads))
    return GGUFModel(config, tensors, gguf, head_rows)


def hugging_face_name(name: str, arch: str) -> str:
    """`blk.3.attn_q.weight` as `model.layers.3.self_attn.q_proj.weight`; a name without a counterpart as it is."""
    parts = _ARCHITECTURES[arch].layer
    match = _NAME.fullmatch(name)
    if match is None:
        return name
    layer, part, kind = match.groups()
    if layer is None:
        return f"{_TOP[part]}.{kind}" if part in _TOP else name
    return f"model.layers.{int(layer)}.{parts[part]}.{kind}" if part in parts else name


def text_value(gguf: GGUFFile, key: str) -> str | None:
    """The string under `key`, None if absent; CheckpointError if it is something else."""
    value = gguf.metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"`{key}` in `{gguf.path}` is {type(value).__name__}, expected a string")
    return value


def int_value(gguf: GGUFFile, key: str) -> int | None:
    """The integer under `key`, None if absent; CheckpointError if it is something else."""
    value = gguf.metadata.get(key)
    if value is not None and type(value) is not int:
        raise CheckpointError(f"`{key}` in `{gguf.path}` is {type(value).__name__}, expected an integer")
    return value


def float_value(gguf: GGUFFile, key: str) -> float | None:
    """The number under `key`, float32 ones by their shortest decimal: 9.999999747378752e-06 was written as 1e-05."""
    value = gguf.metadata.get(key)
    if value is None:
        return None
    if type(value) not in (int, float):
        raise CheckpointError(f"`{key}` in `{gguf.path}` is {type(value).__name__}, expected a number")
    assert isinstance(value, int | float)
    return float(str(np.float32(value)))


def _architecture(gguf: GGUFFile) -> str:
    arch = text_value(gguf, "general.architecture")
    if arch not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"`{gguf.path}` has architecture {arch!r}", f"supported in GGUF files: {', '.join(_ARCHITECTURES)}"
        )
    return arch


def _config(gguf: GGUFFile, arch: str) -> dict[str, object]:
    if int_value(gguf, f"{arch}.expert_count"):
        raise UnsupportedModel(f"`{gguf.path}` is a mixture of experts", "use a dense model")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"`{gguf.path}` has no matrix `token_embd.weight`")
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) > embedding.shape[0]:
        raise CheckpointError(
            f"`{gguf.path}` names {len(tokens)} tokens (`tokenizer.ggml.tokens`), but its embedding "
            f"(`token_embd.weight`) has {embedding.shape[0]} rows",
            "the tokenizer is another model's: convert the model again",
        )
    hidden = _required(gguf, f"{arch}.embedding_length")
    heads = _heads(gguf, f"{arch}.attention.head_count")
    kv_heads = _heads(gguf, f"{arch}.attention.head_count_kv", heads)
    head_dim = int_value(gguf, f"{arch}.attention.key_length") or hidden // max(heads, 1)
    for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        if (size := int_value(gguf, key)) not in (None, head_dim):
            raise UnsupportedModel(f"`{key}` in `{gguf.path}` is {size}, but query heads have {head_dim} dimensions")
    window = int_value(gguf, f"{arch}.attention.sliding_window")
    architecture = _ARCHITECTURES[arch]
    model_type, causal_lm = architecture.model_type, architecture.causal_lm
    if window and architecture.windowed is not None:
        model_type, causal_lm = architecture.windowed
    config: dict[str, object] = {
        "architectures": [causal_lm],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": _required(gguf, f"{arch}.feed_forward_length"),
        "num_hidden_layers": _required(gguf, f"{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": _required(gguf, f"{arch}.context_length"),
        "rms_norm_eps": float_value(gguf, f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(gguf, arch),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
    }
    if config["rms_norm_eps"] is None:
        raise CheckpointError(f"`{gguf.path}` has no `{arch}.attention.layer_norm_rms_epsilon`")
    if window:
        config |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    return config


def _gemma3(gguf: GGUFFile) -> dict[str, object]:
    """What a Gemma 3 config says differently. Norms in these files hold the 1 that the model adds to them.

    The files leave out what llama.cpp takes for granted (`src/llama-model.cpp`): every sixth layer is a full one, the
    others have a rope of their own, and only the largest model, known by its 62 layers, scales queries differently.
    """
    arch = "gemma3"
    layers, heads = _required(gguf, f"{arch}.block_count"), _heads(gguf, f"{arch}.attention.head_count")
    hidden = _required(gguf, f"{arch}.embedding_length")
    window = int_value(gguf, f"{arch}.attention.sliding_window")
    local_theta = float_value(gguf, f"{arch}.rope.freq_base_swa") or 10000.0
    per_head = int_value(gguf, f"{arch}.attention.key_length") or hidden // max(heads, 1)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "norm_offset_added": True,
        "query_pre_attn_scalar": hidden // max(heads, 1) if layers == 62 else per_head,
        "final_logit_softcapping": float_value(gguf, f"{arch}.final_logit_softcapping"),
        "attn_logit_softcapping": float_value(gguf, f"{arch}.attn_logit_softcapping"),
        "rope_parameters": {
            "full_attention": _rope(gguf, arch),
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
        **({"sliding_window": window} if window else {"sliding_window_pattern": 1}),
    }


_ARCHITECTURES = {
    "llama": Architecture(
        "llama", "LlamaForCausalLM", _LAYER, interleaved=True, windowed=("mistral", "MistralForCausalLM")
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _LAYER),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _LAYER),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _GEMMA3_LAYER, facts=_gemma3),
}


def _rope(gguf: GGUFFile, arch: str) -> dict[str, object]:
    """Rope parameters in the style of transformers 5; kind `factors` (ours) for frequencies divided one by one."""
    rope: dict[str, object] = {
        "rope_type": "default",
        "rope_theta": float_value(gguf, f"{arch}.rope.freq_base") or 10000.0,
    }
    scaling = text_value(gguf, f"{arch}.rope.scaling.type") or "none"
    factor = float_value(gguf, f"{arch}.rope.scaling.factor") or float_value(gguf, f"{arch}.rope.scale_linear")
    if scaling != "none":
        rope["rope_type"] = scaling
    elif factor not in (None, 1.0):
        rope["rope_type"] = "linear"
    if factor is not None:
        rope["factor"] = factor
    if rope["rope_type"] in ("yarn", "longrope"):
        rope["original_max_position_embeddings"] = int_value(gguf, f"{arch}.rope.scaling.original_context_length")
    if rope["rope_type"] == "yarn":
        rope |= _yarn(gguf, arch, factor)
    if any(name in gguf.tensors for name in _LONGROPE_FACTORS.values()):
        rope |= _longrope(gguf, arch)
    if _ROPE_FACTORS in gguf.tensors:
        if rope["rope_type"] != "default":
            raise UnsupportedModel(f"`{gguf.path}` has both `{_ROPE_FACTORS}` and {rope['rope_type']} rope scaling")
        factors = gguf.read(_ROPE_FACTORS).dequantize()
        rope |= {"rope_type": "factors", "factors": factors.reshape(-1).tolist()}
    return rope


def _yarn(gguf: GGUFFile, arch: str, factor: float | None) -> dict[str, object]:
    """llama.cpp multiplies what it derives from the factor with a factor of the file's own."""
    mix = float_value(gguf, f"{arch}.rope.scaling.yarn_ext_factor")
    if mix not in (None, -1.0, 1.0):
        raise UnsupportedModel(
            f"`{arch}.rope.scaling.yarn_ext_factor` in `{gguf.path}` is {mix:g}", "yarn is computed with all of it, 1"
        )
    found: dict[str, object] = {}
    for name in ("beta_fast", "beta_slow"):
        value = float_value(gguf, f"{arch}.rope.scaling.yarn_{name}")
        if value is not None:
            found[name] = value
    attention = float_value(gguf, f"{arch}.rope.scaling.yarn_attn_factor")
    if attention not in (None, 1.0):
        found["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0 if factor and factor > 1 else 1.0)
    return found


def _longrope(gguf: GGUFFile, arch: str) -> dict[str, object]:
    missing = [name for name in _LONGROPE_FACTORS.values() if name not in gguf.tensors]
    if missing:
        raise CheckpointError(f"`{gguf.path}` has no `{missing[0]}`, only the other of the two")
    found: dict[str, object] = {
        key: gguf.read(name).dequantize().reshape(-1).tolist() for key, name in _LONGROPE_FACTORS.items()
    }
    found["original_max_position_embeddings"] = int_value(gguf, f"{arch}.rope.scaling.original_context_length")
    attention = float_value(gguf, f"{arch}.rope.scaling.attn_factor")
    if attention is not None:
        found["attention_factor"] = attention
    return {"rope_type": "longrope", **found}


def _required(gguf: GGUFFile, key: str) -> int:
    value = int_value(gguf, key)
    if value is None:
        raise CheckpointError(f"`{gguf.path}` has no `{key}`")
    return value


def _heads(gguf: GGUFFile, key: str, default: int | None = None) -> int:
    """A head count, which some files store once per layer."""
    value: Value | None = gguf.metadata.get(key)
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        value = value[0]
    if value is None and default is not None:
        return default
    if isinstance(value, list):
        raise UnsupportedModel(f"`{key}` in `{gguf.path}` differs between layers")
    if type(value) is not int:
        raise CheckpointError(f"`{key}` in `{gguf.path}` is {value!r}, expected an integer")
    return value


def _size(config: Mapping[str, object], key: str) -> int:
    value = config[key]
    assert isinstance(value, int), (key, value)
    return value


def _split_half_rows(tensor: StoredTensor, heads: int) -> npt.NDArray[np.int64]:
    """Rows in the file for rows (head, half, i): (head, i, half)."""
    rows = tensor.shape[0]
    if heads < 1 or rows % (2 * heads):
        raise CheckpointError(
            f"tensor `{tensor.name}` of `{tensor.path}` has {rows} rows, no even number per head of {heads} heads"
        )
    return np.arange(rows, dtype=np.int64).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)
