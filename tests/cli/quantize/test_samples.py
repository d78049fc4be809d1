"""Calibration and evaluation never share a token, and say what they are of."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from llmctl.cli.quantize import samples as module
from llmctl.cli.quantize.asked import Asked
from llmctl.cli.quantize.samples import Samples, choose_samples
from llmctl.cli.quantize.text import Unreachable
from llmctl.kernels.errors import UsageError
from llmctl.quant.scheme import Scheme

CONTEXT = 1000


class Numbers:
    """A tokenizer for texts of numbers: a token is the number."""

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        assert not add_special
        return [int(word) for word in text.split()]


def written(samples: int, length: int) -> np.ndarray:
    return np.full((samples, length), 7, np.int32)


def chosen(**options: object) -> Samples:
    asked = Asked(
        **{
            "model": "", "scheme": Scheme(), "output": None, "overwrite": False, "calib_dataset": "",
            "calib_samples": None, "calib_seqlen": None, "eval_text": "", "eval_tokens": None, "seed": 0, "threads": 1,
            "fail_if": (), **options,
        }
    )  # fmt: skip
    asked.check()
    return choose_samples(asked, Numbers(), CONTEXT, written)  # type: ignore[arg-type]


@pytest.fixture
def numbers(tmp_path: Path) -> str:
    """A file of the numbers below 3000."""
    path = tmp_path / "numbers.txt"
    path.write_text(" ".join(map(str, range(3000))))
    return str(path)


@pytest.fixture(autouse=True)
def short_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "python_documentation", lambda: ("1 2 3 4 5 " * 200,))


def test_samples_are_drawn_without_repetition_and_the_end_is_held_out(numbers: str) -> None:
    found = chosen(calib_dataset=numbers, calib_samples=8, calib_seqlen=100, eval_tokens=600)
    assert found.calibration is not None and found.calibration.shape == (8, 100)
    assert all((np.diff(sample) == 1).all() and sample[0] % 100 == 0 for sample in found.calibration)
    assert found.calibration.max() < 2400 and len(np.unique(found.calibration)) == 800
    assert [window.size for window in found.evaluation] == [512, 88]
    assert np.concatenate(found.evaluation).min() >= 2400
    assert (found.calibration_text, found.evaluation_text) == (
        "numbers.txt", "a part of numbers.txt that was not used for calibration",
    )  # fmt: skip
    again = chosen(calib_dataset=numbers, calib_samples=8, calib_seqlen=100, eval_tokens=600, seed=1)
    assert not np.array_equal(again.calibration, found.calibration)


def test_text_that_has_nothing_left_is_measured_on_something_else(numbers: str) -> None:
    found = chosen(calib_dataset=numbers, calib_samples=25, calib_seqlen=100, eval_tokens=600)
    assert found.evaluation_text.startswith("Python 3") and sum(map(len, found.evaluation)) == 600


def test_fewer_samples_than_by_default_are_told_and_than_asked_are_refused(
    numbers: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = chosen(calib_dataset=numbers, calib_seqlen=400)
    assert found.calibration is not None and found.calibration.shape == (7, 400)
    assert "has 7 samples of 400 tokens" in caplog.text
    with pytest.raises(UsageError, match="enough for 7 samples of 400, but 8 are needed"):
        chosen(calib_dataset=numbers, calib_seqlen=400, calib_samples=8)


def test_an_own_text_to_measure_on_has_to_be_long_enough(numbers: str) -> None:
    found = chosen(eval_text=numbers, eval_tokens=3000)
    assert sum(map(len, found.evaluation)) == 3000 and found.evaluation_text == "numbers.txt"
    assert chosen(eval_text=numbers).evaluation[0].size == 512
    with pytest.raises(UsageError, match="has 3000 tokens to measure on, 3001 are needed"):
        chosen(eval_text=numbers, eval_tokens=3001)


def test_windows_are_spread_over_the_whole_text(numbers: str) -> None:
    starts = [int(window[0]) for window in chosen(eval_text=numbers, eval_tokens=1024).evaluation]
    assert starts == [0, 3000 - 512]


def test_without_text_the_model_writes_and_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = chosen(calib_samples=3, calib_seqlen=20)
    assert found.calibration is not None and (found.calibration == 7).all() and found.calibration.shape == (3, 20)
    assert found.calibration_text == "text sampled from the model itself (no --calib-dataset was given)"

    def unreachable(*_: object) -> None:
        raise Unreachable("no route to host")

    monkeypatch.setattr(module, "open_documents", unreachable)
    found = chosen(calib_dataset="org/name")
    assert "`org/name` cannot be reached: no route to host" in found.calibration_text
    assert "model writes itself: `org/name` cannot be reached" in caplog.text

    with pytest.raises(UsageError, match="--eval-text `org/name` cannot be reached: no route to host"):
        chosen(eval_text="org/name")


def test_text_that_will_not_do_is_refused_before_the_model_writes_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "written", None)
    with pytest.raises(UsageError, match="has 1000 tokens to measure on, 1001 are needed"):
        chosen(eval_tokens=1001)
    with pytest.raises(UsageError, match="there is no file `nosuch`"):
        chosen(eval_text="nosuch")


def test_rounding_takes_no_samples() -> None:
    assert chosen(scheme=Scheme("rtn")).calibration is None
