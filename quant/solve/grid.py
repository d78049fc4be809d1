"""The values that 4-bit codes can take, and the nearest one for each weight.

A group's grid is (q - z) * scale for q in 0..15, with the scale rounded to float16 before anything is rounded to the
grid, because that is what is stored. Zero is always on the grid: a zero weight costs nothing, and an input that is
always zero stays harmless.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.errors import CheckpointError
from ...kernels.formats import WeightFormat
from ..tensor import WeightTensor

LEVELS = 15
_SMALLEST = 2.0**-24  # the least positive float16


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """One grid per group: `scale` float32 that float16 holds exactly, `zero` float32 of 0..15, both [n, groups, 1]."""

    scale: torch.Tensor
    zero: torch.Tensor

    def codes(self, weights: torch.Tensor) -> torch.Tensor:
        """float32 of 0..15: the nearest grid point of each of the weights [n, groups, group]."""
        return (weights / self.scale).round_().add_(self.zero).clamp_(0, LEVELS)

    def values(self, codes: torch.Tensor) -> torch.Tensor:
        """The weights that the codes mean, as `WeightTensor.dequantize` computes them."""
        return (codes - self.zero) * self.scale

    def nearest(self, weights: torch.Tensor) -> torch.Tensor:
        """The grid point nearest to each weight."""
        return self.codes(weights).sub_(self.zero).mul_(self.scale)


def grouped(weight: torch.Tensor, format: WeightFormat) -> torch.Tensor:
    """[n, k] float32 seen as [n, groups, group]."""
    assert format.kind == "int4" and weight.shape[1] % format.group == 0, (format.name, weight.shape)
    return weight.float().reshape(weight.shape[0], -1, format.group)


def full_range(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(lowest, highest) [n, groups, 1] of each group, zero included."""
    return weights.amin(-1, keepdim=True).clamp(max=0), weights.amax(-1, keepdim=True).clamp(min=0)


def make_grid(low: torch.Tensor, high: torch.Tensor, format: WeightFormat) -> Grid:
    """The grid that covers low..high (low <= 0 <= high) with the smallest scale."""
    if format.zero == "none":
        scale = _storable(torch.maximum(high / 7, low / -8))
        return Grid(scale, torch.full_like(scale, 8))
    scale = _storable((high - low) / LEVELS)
    return Grid(scale, torch.round(-low / scale).clamp_(0, LEVELS))


def to_tensor(weights: torch.Tensor, grid: Grid, format: WeightFormat) -> WeightTensor:
    """The codes of weights [n, groups, group] on their grid, as stored."""
    n = weights.shape[0]
    codes = grid.codes(weights).to(torch.uint8).reshape(n, -1).numpy()
    scales = grid.scale.squeeze(-1).half().numpy()
    zeros = grid.zero.squeeze(-1).to(torch.uint8).numpy() if format.zero == "int" else None
    return WeightTensor(format, codes, scales, zeros)


def _storable(scale: torch.Tensor) -> torch.Tensor:
    stored = scale.half().float().clamp_(min=_SMALLEST)
    if not bool(torch.isfinite(stored).all()):
        raise CheckpointError(
            "a weight is NaN, infinite, or too large for a float16 scale", "the model is broken: check where it is from"
        )
    return stored
