"""The error of an engine that does not fit: what it would have needed as a table, and the smallest change that fits."""

from __future__ import annotations

from dataclasses import dataclass

from ..kernels.errors import CapacityError
from .sizes import format_bytes


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
        return CapacityError(f"{message}\n{self._table(kv)}", hint)

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
