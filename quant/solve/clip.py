"""The range of each group, searched: clipping a few large weights makes the grid finer for all others.

Every group has its own best range, and the error of a range is a quadratic form of the group's own rounding errors:
with the second moment of its inputs it is the error of the outputs as far as this group causes it (AWQ's clipping,
which AutoAWQ estimates from sampled tokens), with an identity matrix the plain squared error of the weights. Both ends
are searched apart, because outliers tend to be on one side: coarsely over all pairs, then finely around the best one.
"""

from __future__ import annotations

import itertools

import torch

from ...kernels.formats import WeightFormat
from .grid import Grid, full_range, make_grid

_COARSE = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
_FINE = (0.0, -0.05, 0.05)
_WEIGHTS_AT_ONCE = 1 << 18  # bounds the temporaries, so that they stay in a cache


def search_range(weights: torch.Tensor, moments: torch.Tensor | None, format: WeightFormat) -> Grid:
    """The best grid found for each group of weights [n, groups, group].

    moments    float32 [groups, group, group], the second moment of each group's inputs; None is the identity
    """
    rows = max(1, _WEIGHTS_AT_ONCE // weights[0].numel())
    parts = [_search(part, moments, format) for part in torch.split(weights, rows)]
    return Grid(torch.cat([part.scale for part in parts]), torch.cat([part.zero for part in parts]))


def _search(weights: torch.Tensor, moments: torch.Tensor | None, format: WeightFormat) -> Grid:
    low, high = full_range(weights)
    ones = torch.ones_like(low)
    best_down, best_up, least = ones, ones, torch.full_like(low, torch.inf)
    for steps in (_COARSE, _FINE):
        pairs = [(step, step) for step in steps] if format.zero == "none" else itertools.product(steps, steps)
        start_down, start_up = (0 * ones, 0 * ones) if steps is _COARSE else (best_down, best_up)
        for down, up in pairs:
            if down == up == 0:
                continue  # what the coarse search found
            downs, ups = (start_down + down).clamp(max=1), (start_up + up).clamp(max=1)
            error = _error(weights, make_grid(low * downs, high * ups, format), moments)
            better = error < least
            least = torch.where(better, error, least)
            best_down, best_up = torch.where(better, downs, best_down), torch.where(better, ups, best_up)
    return make_grid(low * best_down, high * best_up, format)


def _error(weights: torch.Tensor, grid: Grid, moments: torch.Tensor | None) -> torch.Tensor:
    """float32 [n, groups, 1]: what each group loses."""
    off = grid.nearest(weights).sub_(weights)
    if moments is None:
        return off.square_().sum(-1, keepdim=True)
    by_group = off.transpose(0, 1)  # [groups, n, group]
    return torch.bmm(by_group, moments).mul_(by_group).sum(-1).T.unsqueeze(-1)
