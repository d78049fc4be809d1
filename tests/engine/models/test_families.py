"""Configs of both transformers styles become the same spec, and what cannot be run is refused by name."""

import pytest
import torch
import transformers
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from llmctl.engine.models.arch import RopeSpec
from llmctl.engine.models.decoder import scale_as_stored
from llmctl.engine.models.families import (
    decoder_spec,
    decoder_tensors,
    known_families,
    language_part,
)
from llmctl.kernels.errors import CheckpointError, UnsupportedModel
from llmctl.kernels.formats import BF16, F16, F32, WeightFormat

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
CLASSES = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "gemma3_text": transformers.Gemma3TextConfig,
}


def config(family="llama", **changes):
    return {"model_type": family, **SMALL, **changes}


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_of_the_transformers_model_is_expected_with_its_shape(family, tied):
    built = CLASSES[family](**SMALL, head_dim=16, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(built)
    rules = decoder_tensors(decoder_spec(built.to_dict()))
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert {name: rules[name].shape for name in state} == state
    required = {name for name, rule in rules.items() if rule.required}
    assert required <= set(state)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_windows_are_those_of_transformers(family):
    for window, use, first in ((None, False, 0), (32, True, 1), (32, False, 1), (32, True, 0)):
        extra = {"use_sliding_window": use, "max_window_layers": first} if "qwen" in family else {}
        built = CLASSES[family](**SMALL, **({} if family == "llama" else {"sliding_window": window}), **extra)
        spec = decoder_spec(built.to_dict())
        if family == "llama":
            expected = (0, 0, 0)
        elif family == "mistral":
            expected = (window or 0,) * 3
        else:
            expected = tuple(
                (built.sliding_window or 0) if kind == "sliding_attention" else 0 for kind in built.layer_types
            )
        assert spec.windows == expected


def test_gemma3_is_what_its_config_class_makes_of_the_same_file():
    """Its makers leave out most keys, so that missing ones and both styles of rope count."""
    files = (
        {},
        {"num_hidden_layers": 12, "sliding_window": 512, "sliding_window_pattern": 4, "rope_theta": 5e5},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 2e4, "hidden_size": 2560},
        {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2, "query_pre_attn_scalar": 168},
    )
    for file in files:
        built = transformers.Gemma3TextConfig(**file)
        for spec in (decoder_spec({"model_type": "gemma3_text", **file}), decoder_spec(built.to_dict())):
            ropes = built.rope_parameters
            kinds = [kind == "sliding_attention" for kind in built.layer_types]
            assert spec.windows == tuple(built.sliding_window if kind else 0 for kind in kinds)
            assert (spec.rope.theta, spec.rope.kind) == (
                ropes["full_attention"]["rope_theta"], ropes["full_attention"]["rope_type"]
            )  # fmt: skip
            assert spec.rope.factor == ropes["full_attention"].get("factor", 1.0)
            assert spec.rope_local == RopeSpec(theta=ropes["sliding_attention"]["rope_theta"])
            sizes = (built.vocab_size, built.hidden_size, built.intermediate_size, built.max_position_embeddings)
            assert (spec.vocab_size, spec.hidden_size, spec.ffn_size, spec.context_length) == sizes
            heads = (built.num_attention_heads, built.num_key_value_heads, built.head_dim)
            assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == heads
            assert spec.query_scale == built.query_pre_attn_scalar**-0.5
            assert (spec.activation, spec.norm_offset, spec.sandwich_norms) == ("gelu_tanh", 1.0, True)
            assert spec.tied_head == built.tie_word_embeddings


def test_layers_with_a_window_have_the_local_rope():
    spec = decoder_spec({"model_type": "gemma3_text", "num_hidden_layers": 6})
    assert [spec.rope_of(layer) for layer in range(6)] == [RopeSpec(theta=1e4)] * 5 + [RopeSpec(theta=1e6)]
    plain = decoder_spec(config("mistral", sliding_window=8))
    assert {plain.rope_of(layer) for layer in range(3)} == {plain.rope}


@pytest.mark.parametrize("hidden", [640, 1152, 2560, 3840, 5376])
def test_the_embedding_scale_is_rounded_as_transformers_rounds_it(hidden):
    for format, dtype in ((BF16, torch.bfloat16), (F16, torch.float16), (F32, torch.float32)):
        theirs = Gemma3TextScaledWordEmbedding(1, 1, 0, embed_scale=hidden**0.5)
        assert scale_as_stored(hidden**0.5, format) == theirs.embed_scale.to(dtype).item()
    assert scale_as_stored(hidden**0.5, WeightFormat("int4", 32)) == float(torch.tensor(hidden**0.5))


def test_the_language_part_of_a_model_that_sees_is_found():
    assert language_part(config()) is None
    part = language_part({"model_type": "gemma3", "text_config": {"hidden_size": 64}, "tie_word_embeddings": False})
    assert part.config == {"model_type": "gemma3_text", "hidden_size": 64, "tie_word_embeddings": False}
    assert part.name("language_model.model.norm.weight") == "model.norm.weight"
    assert part.name("model.language_model.norm.weight") == "model.norm.weight"
    assert part.name("lm_head.weight") == "lm_head.weight"
    assert part.name("vision_tower.embeddings.patch_embedding.bias") is None
    with pytest.raises(CheckpointError, match="text_config"):
        language_part({"model_type": "gemma3"})


def test_qwen_windows_start_at_max_window_layers_without_layer_types():
    spec = decoder_spec(config("qwen2", use_sliding_window=True, sliding_window=32, max_window_layers=2))
    assert spec.windows == (0, 0, 32)


def test_mistral_without_the_key_has_its_first_window():
    assert decoder_spec(config("mistral")).windows == (4096,) * 3
    assert decoder_spec(config("mistral", sliding_window=None)).windows == (0,) * 3


def test_both_styles_of_rope_config_mean_the_same():
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    expected = RopeSpec(
        theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64
    )
    old = config(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **llama3})
    oldest = config(rope_theta=5e5, rope_scaling={"type": "llama3", **llama3})
    new = config(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **llama3})
    assert [decoder_spec(item).rope for item in (old, oldest, new)] == [expected] * 3
    assert decoder_spec(config(rope_theta=5e5, rope_scaling=None)).rope == RopeSpec(theta=5e5)
    layered = config(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 7.0}})
    assert decoder_spec(layered).rope == RopeSpec(theta=7.0)


def test_defaults_of_the_families_are_used():
    assert decoder_spec(config()).head_dim == 16
    assert decoder_spec(config("qwen3")).head_dim == 128
    assert decoder_spec({k: v for k, v in config().items() if k != "num_key_value_heads"}).num_kv_heads == 4
    assert decoder_spec(config(head_dim=None)).head_dim == 16
    assert decoder_spec(config(hidden_act="gelu_pytorch_tanh")).activation == "gelu_tanh"


def test_an_unknown_family_lists_those_known():
    with pytest.raises(UnsupportedModel, match=r"`mamba`.*MambaForCausalLM") as caught:
        decoder_spec({"model_type": "mamba", "architectures": ["MambaForCausalLM"]})
    assert caught.value.hint == f"known: {', '.join(known_families())}"
    with pytest.raises(UnsupportedModel):
        decoder_spec({})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "activation 'gelu' in `hidden_act`"),
        ({"hidden_act": ["silu"]}, "activation"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 4.0}}, "rope type 'mrope'"),
        ({"rope_parameters": {"a": {"rope_theta": 1.0}, "b": {"rope_theta": 2.0}}}, "differ between layer types"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 3}, "'linear_attention' in `layer_types`"),
        ({"model_type": "gemma3_text", "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "bidirectional"),
        ({"model_type": "gemma3_text", "sliding_window": None}, "sliding_window"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused(changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        decoder_spec({**config(), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "`hidden_size` in the config is 0"),
        ({"hidden_size": "64"}, "`hidden_size`"),
        ({"hidden_size": True}, "`hidden_size`"),
        ({"hidden_size": None}, "has no `hidden_size`"),
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers`"),
        ({"num_attention_heads": 3}, "no multiple of `num_attention_heads`"),
        ({"num_key_value_heads": 3}, "no multiple of `num_key_value_heads`"),
        ({"max_position_embeddings": 1 << 31}, "`max_position_embeddings` .* from 1 to 16777216"),
        ({"intermediate_size": -96}, "`intermediate_size` in the config is -96"),
        ({"vocab_size": 1 << 31}, "`vocab_size` .* from 1 to 2147483647"),
        ({"rms_norm_eps": 10**400}, "`rms_norm_eps`"),
        ({"rope_theta": float("inf")}, "`rope_theta` in the config is inf"),
        ({"rope_scaling": []}, r"`rope_scaling` in the config is \[\], expected an object"),
        ({"model_type": "qwen2", "use_sliding_window": "no"}, "`use_sliding_window`"),
        ({"hidden_size": [1] * 100}, r"`hidden_size` in the config is \[1, .*\.\.\., expected an integer"),
        ({"head_dim": 15}, "`head_dim` is 15"),
        ({"rms_norm_eps": -1.0}, "`rms_norm_eps`"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps`"),
        ({"rope_scaling": {"rope_type": "linear"}}, "has no `factor`"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"model_type": "mistral", "layer_types": ["full_attention"]}, "`layer_types` has 1 entries"),
        ({"model_type": "mistral", "layer_types": 3}, "layer_types"),
        ({"rope_parameters": {"rope_type": "factors", "factors": [1.0]}}, "1 rope factors in `factors`, expected 8"),
        ({"rope_parameters": {"rope_type": "factors", "factors": [0.0] * 8}}, "no positive number"),
        ({"model_type": "gemma3_text", "rope_parameters": {"rope_type": "default"}}, "each type of layer"),
        ({"tie_word_embeddings": "yes"}, "`tie_word_embeddings`"),
    ],
)
def test_values_that_make_no_sense_are_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        decoder_spec({**config(), **changes})
