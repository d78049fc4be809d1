"""Rope tables against transformers' own."""

import numpy as np
import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from llmctl.engine.models.arch import RopeSpec
from llmctl.engine.models.families import decoder_spec
from llmctl.engine.models.rope import inverse_frequencies, rope_tables, settled

LONG, SHORT = [1.0 + 0.25 * i for i in range(64)], [1.0 + 0.01 * i for i in range(64)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048}


@pytest.mark.parametrize("theta", [10000.0, 100000.0, 500000.0, 1e6])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "llama3", **LLAMA3},
        YARN,
        {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.3},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    ],
    ids=["default", "linear", "llama3", "yarn", "yarn with betas", "yarn with mscale"],
)
def test_tables_are_those_of_transformers(theta, head_dim, rope):
    config = transformers.LlamaConfig(
        hidden_size=4 * head_dim,
        head_dim=head_dim,
        num_attention_heads=4,
        max_position_embeddings=8192,
        rope_parameters={"rope_theta": theta, **rope},
    )
    theirs = LlamaRotaryEmbedding(config)
    spec = decoder_spec(config.to_dict())
    ours = inverse_frequencies(spec.rope, head_dim)
    assert ours.dtype == np.float32
    # one unit in the last place, where torch's float32 power is not rounded correctly
    np.testing.assert_array_max_ulp(ours, theirs.inv_freq.numpy(), maxulp=1)
    cos, sin = rope_tables(spec.rope, head_dim, 2048)
    their_cos, their_sin = theirs(torch.zeros(1, 2048, 1), torch.arange(2048)[None])
    assert cos.shape == sin.shape == (2048, head_dim // 2) and cos.dtype == sin.dtype == np.float32
    np.testing.assert_allclose(cos, their_cos[0, :, : head_dim // 2].numpy(), atol=2e-7)
    np.testing.assert_allclose(sin, their_sin[0, :, : head_dim // 2].numpy(), atol=2e-7)


def test_explicit_factors_divide_the_frequencies():
    plain = inverse_frequencies(RopeSpec(theta=10000.0), 8)
    scaled = inverse_frequencies(RopeSpec(theta=10000.0, kind="factors", factors=(1.0, 2.0, 4.0, 8.0)), 8)
    np.testing.assert_array_equal(scaled, plain / np.float32([1, 2, 4, 8]))


@pytest.mark.parametrize("length", [512, 1500])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {
            "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 1024,
            "short_factor": SHORT[:32], "long_factor": LONG[:32],
        },
    ],
    ids=["dynamic", "longrope"],
)  # fmt: skip
def test_tables_that_depend_on_the_length_are_those_of_transformers_for_the_longest(rope, length):
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=1024,
        rope_parameters={"rope_theta": 1e4, **rope},
    )
    theirs = LlamaRotaryEmbedding(config)
    spec = decoder_spec(config.to_dict())
    cos, sin = rope_tables(spec.rope, 64, length)
    their_cos, their_sin = theirs(torch.zeros(1, length, 1), torch.arange(length)[None])
    # an angle of 1500 radians is known to 1e-4 of a radian in float32
    np.testing.assert_allclose(cos, their_cos[0, :, :32].numpy(), atol=3e-4)
    np.testing.assert_allclose(sin, their_sin[0, :, :32].numpy(), atol=3e-4)
    frequencies = inverse_frequencies(settled(spec.rope, 64, length), 64)
    np.testing.assert_allclose(frequencies, theirs.inv_freq.numpy(), rtol=2e-6)


@pytest.mark.parametrize(
    "rope,context",
    [
        ({"rope_type": "default"}, 2048),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({**YARN, "factor": 16.0}, 32768),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096),
    ],
)
def test_the_context_is_what_the_rope_stretches_it_to(rope, context):
    config = transformers.LlamaConfig(max_position_embeddings=2048, rope_parameters={"rope_theta": 1e4, **rope})
    assert decoder_spec(config.to_dict()).context_length == context
