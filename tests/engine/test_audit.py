"""The audit of prefix hits: silent where the cache is what it should be, loud where it is not, invisible to clients."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from llmctl.engine.assemble import build_engine
from llmctl.engine.audit import AuditedEngine
from llmctl.engine.config import EngineConfig
from llmctl.engine.engine import Core
from llmctl.engine.request import Output, Request, SamplingParams
from llmctl.kernels.errors import UsageError

from .tiny import write_checkpoint

PROMPT = tuple(range(40, 90))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), "llama")


def make_engine(folder: Path, share: float) -> Core:
    config = EngineConfig(
        model=str(folder), max_model_len=128, num_gpu_blocks_override=40, block_size=16, cache_audit=share
    )
    return build_engine(config, epoch=1)[0]


def answer(engine: Core, name: str) -> list[Output]:
    sampling = SamplingParams(temperature=0, max_tokens=4)
    engine.add(Request(id=name, prompt=PROMPT, sampling=sampling, seed=1, stop_ids=(), max_tokens=4))
    outputs: list[Output] = []
    while engine.has_work:
        outputs.extend(engine.step())
    return outputs


def test_a_share_of_the_hits_is_audited_and_nobody_else_sees_it(folder: Path) -> None:
    engine = make_engine(folder, 0.5)
    for number in range(5):  # the first is no hit
        outputs = answer(engine, str(number))
        assert {output.request_id for output in outputs} == {str(number)}
    stats = engine.stats()
    assert (stats.audits, stats.audit_failures, stats.blocks_active) == (2, 0, 0)


def test_a_cached_block_that_has_changed_is_found(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(folder, 1.0)
    answer(engine, "first")
    assert isinstance(engine, AuditedEngine)
    arena = engine._engine._runner.groups[0].arena  # type: ignore[attr-defined]
    arena[arena != 0] ^= 1  # what an overheated memory chip might do
    with caplog.at_level(logging.ERROR):
        answer(engine, "second")
    assert (engine.stats().audits, engine.stats().audit_failures) == (1, 1)
    assert "cache audit 1 of second: its 49 cached tokens give other bits" in caplog.text


def test_a_share_must_be_one(folder: Path) -> None:
    with pytest.raises(UsageError, match="--cache-audit is 1.5"):
        EngineConfig(cache_audit=1.5).check()
