"""When requests are sent: as fast as they are answered, or at a rate of their own."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from ...kernels.errors import UsageError


@dataclass(frozen=True, slots=True)
class Load:
    """How requests arrive.

    max_concurrency  open requests at most, 0 for no limit
    request_rate     requests per second, inf: each as soon as there is room
    burstiness       shape of the gaps between arrivals: 1 is a Poisson process, below it burstier, inf evenly spaced
    """

    max_concurrency: int = 0
    request_rate: float = math.inf
    burstiness: float = 1.0

    @property
    def open_loop(self) -> bool:
        """Whether requests arrive on a schedule that does not wait for answers."""
        return math.isfinite(self.request_rate)

    def check(self) -> None:
        """Raise UsageError for values that cannot work."""
        if self.max_concurrency < 0:
            raise UsageError(f"--max-concurrency is {self.max_concurrency}, it must be at least 1, or 0 for no limit")
        for name, value in (("--request-rate", self.request_rate), ("--burstiness", self.burstiness)):
            if not value > 0:
                raise UsageError(f"{name} is {value}, it must be above 0")

    def arrivals(self, count: int, rng: random.Random) -> tuple[float, ...]:
        """Seconds after the start at which each of `count` requests is due, the first at once."""
        if not self.open_loop:
            return (0.0,) * count
        times = [0.0]
        for _ in range(count - 1):
            times.append(times[-1] + self._gap(rng))
        return tuple(times[:count])

    def _gap(self, rng: random.Random) -> float:
        mean = 1 / self.request_rate
        if math.isinf(self.burstiness):
            return mean
        return rng.gammavariate(self.burstiness, mean / self.burstiness)
