"""A rope that is asked for on the command line, against transformers with the same in its config."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from llmctl.engine.config import EngineConfig, environment
from llmctl.engine.load.hub import resolve
from llmctl.engine.load.model import open_model
from llmctl.engine.models.arch import DecoderSpec, RopeSpec
from llmctl.engine.models.rope_config import overridden
from llmctl.engine.plan import resolve as resolve_plan
from llmctl.engine.rope_scaling import RopeScaling
from llmctl.engine.runner.runner import Runner
from llmctl.kernels.errors import UnsupportedModel, UsageError

from .forced import forced_logits
from .tiny import VOCAB, write_checkpoint

TOKENS = 160
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.02 * i for i in range(8)],
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
}
SPEC = DecoderSpec(
    family="llama", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=96,
    vocab_size=VOCAB, context_length=8192, norm_eps=1e-6, rope=RopeSpec(theta=5e4),
)  # fmt: skip


@pytest.mark.parametrize(
    "family,rope",
    [
        ("llama", YARN),
        ("llama", {**YARN, "mscale": 1.2, "mscale_all_dim": 0.7, "truncate": False}),
        ("llama", {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 64}),
        ("llama", LONGROPE),
        ("mistral", {**YARN, "beta_fast": 8.0, "beta_slow": 0.5}),
        ("qwen2", YARN),
        ("qwen2", {"rope_type": "linear", "factor": 2.0}),
        ("qwen3", {**YARN, "attention_factor": 1.4}),
        ("qwen3", {"rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": 64}),
        ("gemma3", YARN),
    ],
    ids=lambda value: value if isinstance(value, str) else value["rope_type"],
)  # fmt: skip
def test_a_rope_that_is_asked_for_gives_the_logits_of_transformers(
    family: str, rope: dict[str, object], tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "model", family)
    config = transformers.AutoConfig.from_pretrained(folder)
    if family == "gemma3":
        config.rope_parameters["full_attention"] = {"rope_theta": 1e6, **rope}
    else:
        config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"], **rope}
    if rope["rope_type"] == "dynamic":
        config.max_position_embeddings = config.rope_parameters.pop("original_max_position_embeddings")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    tokens = np.random.default_rng(3).integers(3, VOCAB, TOKENS).tolist()
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0].numpy()
    asked = EngineConfig(
        model=str(folder),
        dtype="float32",
        max_num_batched_tokens=64,
        max_num_seqs=64,
        block_size=16,
        max_model_len=TOKENS,
        rope_scaling=RopeScaling.read(rope),
    )
    model = open_model(
        resolve(str(folder), environment=environment()),
        implementation="auto", dtype="float32", cache=tmp_path / "cache", progress=None,
        rope_scaling=asked.rope_scaling,
    )  # fmt: skip
    plan = resolve_plan(asked, model)[0]
    got = forced_logits(Runner(model, plan), tokens, VOCAB, 64, 16)
    np.testing.assert_allclose(got, expected, atol=4e-4, rtol=0)


def test_the_context_becomes_what_the_scaling_makes_of_it() -> None:
    for rope, context in (
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 32768),
        ({"rope_type": "yarn", "factor": 4.0}, 32768),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}, 4096),
        ({"rope_type": "linear", "factor": 1.5}, 12288),
        ({"rope_type": "dynamic", "factor": 2.0}, 16384),
        ({"rope_type": "default", "rope_theta": 1e6}, 8192),
    ):
        changed = overridden(SPEC, RopeScaling.read(rope))
        assert changed.context_length == context, rope
        assert changed.rope.theta == rope.get("rope_theta", 5e4)
    yarn = overridden(SPEC, RopeScaling.read({"rope_type": "yarn", "factor": 4.0}))
    assert overridden(yarn, RopeScaling.read({"rope_type": "yarn", "factor": 2.0})).context_length == 16384


def test_a_fingerprint_tells_of_the_rope_and_of_the_length_where_it_matters(tmp_path: Path) -> None:
    folder = str(write_checkpoint(tmp_path / "model", "llama"))

    def fingerprint(length: int, rope: dict[str, object] | None) -> str:
        scaling = None if rope is None else RopeScaling.read(rope)
        model = open_model(
            resolve(folder, environment=environment()),
            implementation="auto", dtype="auto", cache=tmp_path / "cache", progress=None, rope_scaling=scaling,
        )  # fmt: skip
        return resolve_plan(EngineConfig(max_model_len=length, max_num_seqs=1), model)[0].fingerprint

    yarn, dynamic = {"rope_type": "yarn", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}
    assert len({fingerprint(256, rope) for rope in (None, yarn, LONGROPE)}) == 3
    assert fingerprint(256, yarn) == fingerprint(512, yarn)
    assert fingerprint(256, dynamic) == fingerprint(512, dynamic) != fingerprint(1024, dynamic)
    assert fingerprint(64, LONGROPE) != fingerprint(65, LONGROPE) == fingerprint(256, LONGROPE)


@pytest.mark.parametrize(
    "rope,message",
    [
        ({"rope_type": "yarn"}, "lacks `factor`"),
        ({"rope_type": "yarn", "factor": 0.5}, "`factor` of --rope-scaling is 0.5, it must be from 1 to 4096"),
        ({"rope_type": "yam", "factor": 2.0}, "`yam`"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}, "`beta_fast` has no meaning"),
        ({"rope_type": "yarn", "faktor": 2.0}, "no key `faktor`"),
        ({"factor": 2.0}, "rope_type"),
        ({"rope_type": "yarn", "factor": "four"}, "four"),
        ([1], "must be a JSON object"),
        ({"rope_parameters": 3}, "`rope_parameters` is 3"),
        ({"rope_parameters": {}, "vocab_size": 3}, "names `vocab_size`"),
    ],
)
def test_a_scaling_that_cannot_work_is_refused_by_name(rope: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RopeScaling.read(rope)


def test_the_styles_of_a_config_mean_the_same() -> None:
    plain = RopeScaling.read({"rope_type": "yarn", "factor": 4.0, "rope_theta": 7.0})
    assert RopeScaling.read({"type": "yarn", "factor": 4, "rope_theta": 7}) == plain
    assert RopeScaling.read({"rope_scaling": {"type": "yarn", "factor": 4}, "rope_theta": 7}) == plain
    assert RopeScaling.read({"rope_parameters": {"rope_type": "yarn", "factor": 4, "rope_theta": 7}}) == plain


def test_what_the_model_cannot_have_is_a_usage_error() -> None:
    lists = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0], "long_factor": [1.0]}
    with pytest.raises(UsageError, match="1 rope factors in `short_factor`, expected 8"):
        overridden(SPEC, RopeScaling.read(lists))
    with pytest.raises(UsageError, match="`beta_fast` is 1, it must be more than"):
        overridden(SPEC, RopeScaling.read({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0}))
    with pytest.raises(UsageError, match="a context of 33554432 tokens"):
        overridden(SPEC, RopeScaling.read({"rope_type": "linear", "factor": 4096.0}))


def test_a_model_of_transformers_modules_refuses_a_scaling(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "llama")
    with pytest.raises(UnsupportedModel, match="--rope-scaling is for our own decoder"):
        open_model(
            resolve(str(folder), environment=environment()),
            implementation="transformers", dtype="auto", cache=tmp_path, progress=None,
            rope_scaling=RopeScaling(rope_type="linear", factor=2.0),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"rope_type": "default", "original_max_position_embeddings": 16384}, "is 16384, this model's context is 8192"),
        ({**YARN, "original_max_position_embeddings": 1 << 20}, "is 1048576, this model's context is 8192"),
        ({**YARN, "rope_theta": 1.0}, "`rope_theta` is 1, it must be more than 1"),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e-300}, "`rope_theta`"),
    ],
)
def test_a_rope_that_the_model_cannot_have_had_is_refused(asked: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        overridden(SPEC, RopeScaling.read(asked))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_parameter_that_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(UsageError, match="`attention_factor` of --rope-scaling is .*, it must be above 0 and finite"):
        RopeScaling.read({**YARN, "attention_factor": value})
