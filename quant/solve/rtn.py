"""Round to nearest: the baseline, and what a module gets when nothing is known about its inputs."""

from __future__ import annotations

import torch

from ...kernels.formats import WeightFormat
from ..tensor import WeightTensor
from .clip import search_range
from .grid import full_range, grouped, make_grid, to_tensor


def quantize(weight: torch.Tensor, format: WeightFormat, search_clip: bool = False) -> WeightTensor:
    """The weight [n, k] with every element at the nearest point of its group's grid.

    The grid reaches from the group's smallest to its largest weight, or, with `search_clip`, over the range that gives
    the least squared error of the weights. That is not always the better model: large weights tend to matter most
    (SmolLM2-135M, 4 bits, groups of 64: KL to the original 0.34 without, 0.37 with it).
    """
    weights = grouped(weight, format)
    grid = search_range(weights, None, format) if search_clip else make_grid(*full_range(weights), format)
    return to_tensor(weights, grid, format)
