"""The error of an engine that does not fit: what it would have needed as a table, and the smallest change that fits."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..kernels.errors import CapacityError
from .sizes import format_bytes

_MOST_SHARE = 0.95  # of the memory that an engine should be told to take


@dataclass(frozen=True, slots=True)
class Demand:
    """The bytes that were asked for beside the KV cache. `utilization` is the share that the user gave, or 0."""

    available: int
    weights: int
    workspace: int
    reserve: int
    utilization: float

    def refused(self, message: str, hint: str, kv: int = 0) -> CapacityError:
        """The error, with the plan as a table below its message; `kv` are the bytes of a KV cache that does not fit."""
        return CapacityError(f"{message}\n{self._table(kv)}", self._hint(hint, kv))

    def _table(self, kv: int) -> str:
        needed = self.weights + self.workspace + kv + self.reserve
        less = needed > self.available
        kept = f"what `--gpu-memory-utilization {self.utilization:g}` leaves" if self.utilization else "for the machine"
        rows = [
            ("weights", self.weights, ""),
            ("workspace", self.workspace, "activations, logits and tables"),
            *([("KV cache", kv, "")] if kv else []),
            ("reserve", self.reserve, kept),
            ("together", needed, ""),
            ("available", self.available, f"{format_bytes(needed - self.available)} less" if less else ""),
        ]
        return "\n".join(f"  {name:<10}{format_bytes(size):>10}  {note}".rstrip() for name, size, note in rows)

    def _hint(self, hint: str, kv: int) -> str:
        """The hint, after a larger share of the memory where that alone is enough."""
        share = math.ceil(100 * (self.weights + self.workspace + kv + 1) / self.available) / 100
        if self.utilization and share <= _MOST_SHARE:
            return f"use `--gpu-memory-utilization {share:g}`" + (f", or {hint}" if hint else "")
        return hint
