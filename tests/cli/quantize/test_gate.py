"""`--fail-if` says when a result is not good enough."""

from __future__ import annotations

import math

import pytest

from llmctl.cli.quantize.gate import METRICS, parse_gate
from llmctl.kernels.errors import UsageError


@pytest.mark.parametrize(
    ("text", "value", "fails"),
    [
        ("kl>0.05", 0.06, True), ("kl>0.05", 0.05, False), ("kl>=0.05", 0.05, True), ("top1 < 0.9", 0.8, True),
        ("ppl_ratio<=1e1", 10.0, True), ("speed<1", 1.5, False), ("kl>1", math.nan, True),
    ],
)  # fmt: skip
def test_a_limit_holds_or_not(text: str, value: float, fails: bool) -> None:
    gate = parse_gate(text)
    assert gate.fails(dict.fromkeys(METRICS, value)) is fails


@pytest.mark.parametrize("text", ["", "kl", "kl>", "kl>x", "kl=1", "loss>1", "1<kl", "kl>1.2.3", "kl > 1 and ppl > 2"])
def test_what_is_no_limit_is_refused_with_the_names_that_are_known(text: str) -> None:
    with pytest.raises(UsageError, match="--fail-if is") as caught:
        parse_gate(text)
    assert "ppl_ratio" in caught.value.hint
