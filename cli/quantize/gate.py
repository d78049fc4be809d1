"""`--fail-if "kl>0.05"`: limits on what was measured, so that a script need not read the table."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...kernels.errors import UsageError

# What can be tested, by name, and what it is.
METRICS = {
    "kl": "mean KL divergence to the original, in nats per token",
    "kl_p99": "its 99th percentile",
    "ppl": "perplexity of the result",
    "ppl_ratio": "perplexity relative to the original's",
    "top1": "share of tokens with the same likeliest successor, 0 to 1",
    "bits": "bits per weight",
    "speed": "decode speed relative to the original's",
}
METRIC_NAMES = ", ".join(METRICS)
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_GATE = re.compile(r"\s*(\w+)\s*(>=|<=|>|<)\s*([0-9.eE+-]+)\s*")


@dataclass(frozen=True, slots=True)
class Gate:
    """A condition under which the run counts as failed."""

    metric: str
    sign: str
    limit: float

    def fails(self, metrics: Mapping[str, float]) -> bool:
        """Whether the condition holds; also for a metric that is no number, which proves nothing."""
        value = metrics[self.metric]
        return value != value or _OPERATORS[self.sign](value, self.limit)

    def __str__(self) -> str:
        return f"{self.metric}{self.sign}{self.limit:g}"


def parse_gate(text: str) -> Gate:
    """The condition that the text says; UsageError if it says none."""
    match = _GATE.fullmatch(text)
    try:
        if match is None or match[1] not in METRICS:
            raise ValueError
        return Gate(match[1], match[2], float(match[3]))
    except ValueError:
        raise UsageError(f"--fail-if is `{text}`", f'write it like "kl>0.05"; known are {METRIC_NAMES}') from None
