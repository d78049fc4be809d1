"""What is learned about a Linear's inputs: their second moment.

The squared error that a change E of the weights causes in the outputs is, summed over all inputs x,
sum (E x)^2 = tr(E (sum x x^T) E^T). So one [k, k] matrix replaces the inputs themselves, and a search over thousands of
candidates costs the same for a thousand calibration tokens as for a million.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ROWS = 4096  # rows that are multiplied at a time, which bounds the copy in float32
_PANEL = 384  # rows of the moment that are computed together, from their diagonal on: the rest is their mirror image


@dataclass(frozen=True, slots=True, eq=False)
class InputStats:
    """`moment` float32 [k, k]: the mean of x x^T over `rows` inputs x."""

    moment: torch.Tensor
    rows: int

    @property
    def is_usable(self) -> bool:
        """Whether there were inputs and all of them were finite."""
        return self.rows > 0 and bool(torch.isfinite(self.moment).all())

    @property
    def rms(self) -> torch.Tensor:
        """float32 [k]: the root mean square of each input."""
        return self.moment.diagonal().clamp(min=0).sqrt()


class InputObserver:
    """Adds inputs up to an InputStats. Holds one [k, k] matrix in float32, whatever the number of inputs."""

    def __init__(self, k: int) -> None:
        self._sum = torch.zeros(k, k)
        self._rows = 0

    def add(self, x: torch.Tensor) -> None:
        """Take in inputs [..., k] of any float dtype."""
        flat = x.detach().reshape(-1, x.shape[-1])
        k = flat.shape[-1]
        for rows in torch.split(flat, _ROWS):
            part = rows.float()
            for start in range(0, k, _PANEL):
                stop = min(start + _PANEL, k)
                self._sum[start:stop, start:].addmm_(part[:, start:stop].T, part[:, start:])
        self._rows += len(flat)

    def stats(self) -> InputStats:
        """The statistics of everything added so far."""
        upper = self._sum.triu() / max(self._rows, 1)
        return InputStats(upper + upper.triu(1).T, self._rows)


def output_error(error: torch.Tensor, stats: InputStats) -> torch.Tensor:
    """float32 [n]: the mean squared error of each output if the weights [n, k] are off by `error`."""
    return torch.einsum("nk,nk->n", error @ stats.moment, error).clamp(min=0)
