"""Golden logits in the quality card: the measured weights pass, others are refused, and what is between is told."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from llmctl.engine.assemble import find_model
from llmctl.engine.config import NO_SPECULATION, EngineConfig
from llmctl.engine.llm import LLM
from llmctl.engine.load.golden import Golden
from llmctl.engine.plan import resolve
from llmctl.engine.runner.golden import make_golden
from llmctl.engine.runner.runner import Runner
from llmctl.kernels.errors import CheckpointError
from llmctl.quant.card import CARD_NAME
from tests.engine.tiny import write_checkpoint

TOKENS = tuple(range(5, 165, 10))


@pytest.fixture(scope="module")
def golden(folder: Path) -> Golden:
    config = EngineConfig(model=str(folder), num_gpu_blocks_override=4, max_model_len=32, threads=1)
    model = find_model(msgspec.structs.replace(config, speculative_config=NO_SPECULATION))
    plan, _ = resolve(config, model)
    return make_golden(Runner(model, plan), plan, TOKENS, model.spec.vocab_size)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("measured"), "llama")


def load(folder: Path, golden: object, **options: object) -> None:
    (folder / CARD_NAME).write_bytes(msgspec.json.encode({"version": 1, "golden": golden}))
    with LLM(str(folder), **{"max_model_len": 64, "num_gpu_blocks_override": 8, **options}):
        pass


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 3}, {"max_num_seqs": 1, "threads": 2}])
def test_the_weights_that_were_measured_give_the_same_bits(
    options: dict[str, object], folder: Path, golden: Golden, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "llmctl"):
        load(folder, golden, **options)
    assert "differ by up to 0 of" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "WARNING" and "logits" in record.message]


def test_a_context_shorter_than_the_golden_tokens_compares_as_many_as_fit(folder: Path, golden: Golden) -> None:
    load(folder, golden, max_model_len=5)


def test_another_format_of_the_cache_may_round(folder: Path, golden: Golden, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "llmctl"):
        load(folder, golden, kv_cache_dtype="float16")
    assert "the logits differ by up to 0.0" in caplog.text and "up to 0 of" not in caplog.text


def test_other_weights_are_refused_with_figures(folder: Path, golden: Golden, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", seed=8)
    with pytest.raises(CheckpointError, match=r"logits of `.*` differ by up to \d.* of \d.* from those in its quality"):
        load(tmp_path, golden)


def test_a_difference_under_the_same_plan_is_told(
    folder: Path, golden: Golden, caplog: pytest.LogCaptureFixture
) -> None:
    first, *rest = golden.logits
    load(folder, msgspec.structs.replace(golden, logits=((first[0] * 1.001, *first[1:]), *rest)))
    assert "though kernels, formats and weights are the same" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": ()}, "16 tokens, 16 lists of ids and 0 of logits"),
        ({"tokens": (99999, *TOKENS[1:])}, "beyond its vocabulary of 304"),
        ({"tokens": "sea"}, "is no quality card"),
    ],
)
def test_a_broken_card_is_told(changes: dict[str, object], message: str, folder: Path, golden: Golden) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(folder, {**msgspec.to_builtins(golden), **changes})


def test_a_card_without_golden_logits_is_no_reason_to_refuse(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "m"
    shutil.copytree(folder, copy)
    load(copy, None)


def test_another_rope_is_not_held_against_logits_of_the_models_own(folder: Path, golden: Golden) -> None:
    other = msgspec.structs.replace(golden, logits=tuple(tuple(-value for value in row) for row in golden.logits))
    with pytest.raises(CheckpointError):
        load(folder, other)
    load(folder, other, rope_scaling={"rope_type": "linear", "factor": 2.0})
