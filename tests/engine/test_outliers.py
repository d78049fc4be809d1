"""Inputs with outliers: which quads are widened, and what that does for a model with 4-bit weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmctl.engine.config import EngineConfig
from llmctl.engine.load.hub import Source
from llmctl.engine.load.packed import PackedModel, open_packed
from llmctl.engine.plan import resolve
from llmctl.engine.runner import outliers
from llmctl.engine.runner.outliers import gain, worth_widening
from llmctl.engine.runner.runner import Runner
from llmctl.kernels.ops import NO_QUAD

from .quantized import write_quantized
from .tiny import write_checkpoint


def quads_of(*inputs: tuple[np.ndarray, int]) -> list[list[int]]:
    """The quads that are widened in groups of 32, of inputs and how many outputs each feeds."""
    return [quads.tolist() for quads in worth_widening([(gain(x, 32), outputs) for x, outputs in inputs])]


def noise(width: int, **larger: float) -> np.ndarray:
    """Inputs of about 1, some of them larger."""
    x = np.random.default_rng(width).standard_normal((50, width)).astype(np.float32)
    for place, by in larger.items():
        x[:, int(place[1:])] *= by
    return x


def test_the_quads_with_the_largest_outliers_are_widened() -> None:
    assert quads_of((noise(192, _41=30, _127=20), 64)) == [[NO_QUAD, 2, NO_QUAD, 7, NO_QUAD, NO_QUAD]]


def test_a_quad_that_feeds_fewer_outputs_is_widened_first() -> None:
    x = np.ones((2, 64), np.float32)
    x[:, 41] = 30
    assert quads_of((x, 1000), (x, 10)) == [[NO_QUAD] * 2, [NO_QUAD, 2]]


def test_inputs_without_outliers_and_rows_with_nan_widen_nothing() -> None:
    x = np.ones((4, 96), np.float32)
    assert quads_of((x, 16)) == [[NO_QUAD] * 3]
    x[1, 3], x[2, 40] = np.nan, np.inf
    assert quads_of((x, 16)) == [[NO_QUAD] * 3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_checkpoint(tmp_path / "tiny", "qwen3")
    write_quantized(folder, "awq")
    return folder


def runner_of(folder: Path) -> tuple[PackedModel, Runner]:
    model = open_packed(Source(folder, "hf", "tiny"), cache=folder / "cache")
    runner = Runner(model, resolve(EngineConfig(max_model_len=64, max_num_seqs=2, threads=1), model)[0])
    runner.close()
    return model, runner


def test_what_is_widened_is_found_once_and_kept_beside_the_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, first = runner_of(folder)
    (kept,) = model.folder.glob("outliers-*")
    monkeypatch.setattr(outliers, "_find", lambda *_: pytest.fail("looked for again"))
    _, again = runner_of(folder)
    forms, others = ([r.act.forms[0].wide for r in runner.decoder.readers] for runner in (first, again))
    assert any(wide is not None and (wide != NO_QUAD).any() for wide in forms)
    assert all(np.array_equal(a, b) for a, b in zip(forms, others, strict=True) if a is not None)
    monkeypatch.undo()
    whole = kept.read_bytes()
    for damaged in (b"", b"broken", whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
        kept.write_bytes(damaged)
        runner_of(folder)
        assert kept.read_bytes() == whole


def test_models_without_4_bit_weights_widen_nothing(tmp_path: Path) -> None:
    model, _ = runner_of(write_checkpoint(tmp_path / "tiny", "qwen3"))
    assert not list(model.folder.glob("outliers-*"))
