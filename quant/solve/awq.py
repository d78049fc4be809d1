"""Activation-aware weight quantization (Lin et al., arXiv 2306.00978), from second moments.

Multiplying column j of a weight by s[j] and dividing its input by s[j] changes nothing, but moves the rounding error
away from inputs that matter. The division is folded into whatever produces the input, so that the result is an ordinary
checkpoint. Scales are tried of the form rms(x)^a / mean|w|^b, as AutoAWQ does; a candidate is judged by the error of
the outputs, tr(E M E^T) with M the inputs' second moment, which is exact where AutoAWQ samples tokens. No scaling is
always a candidate, so the search is never worse than rounding to nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...kernels.formats import WeightFormat
from ..observe import InputStats, output_error
from ..tensor import WeightTensor
from .clip import search_range
from .grid import Grid, full_range, grouped, make_grid, to_tensor

_EXPONENTS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_REFINED = (0.1, 0.05)  # steps to both sides of the best one so far
_JUDGED = 256  # outputs of each Linear by which candidates are judged, evenly spread: all of them share the scales
_ROWS = 2048  # outputs that are computed at a time, which bounds the temporaries
_LIMIT = 1e3  # scales stay within 1 / _LIMIT .. _LIMIT, so that a norm divided by them stays within float16


def search_scales(
    weights: Sequence[torch.Tensor], stats: InputStats, format: WeightFormat, shared: tuple[int, int] | None = None
) -> torch.Tensor:
    """float32 [k]: the scales with which these Linears, which read the same inputs, lose least; all ones at worst.

    Linears count by their error relative to their outputs' energy, so that none drowns the others. `shared` is
    (heads per KV head, head_dim) where the inputs are attention's outputs: heads that read one value head get the same
    scales, because these are folded into that head.
    """
    judge = _Judge(weights, stats, format)
    rms, magnitude = stats.rms, _mean_magnitude(weights, format)

    def attempt(exponent: float, by_weight: bool) -> tuple[float, float, bool]:
        return judge.loss(_scales(rms, magnitude, exponent, by_weight, shared)), exponent, by_weight

    found = min(attempt(exponent, by_weight) for by_weight in (False, True) for exponent in _EXPONENTS)
    for step in _REFINED:
        found = min(found, attempt(found[1] - step, found[2]), attempt(found[1] + step, found[2]))
    _, exponent, by_weight = found
    best, plain = _scales(rms, magnitude, exponent, by_weight, shared), torch.ones_like(rms)
    return best if judge.prefers(best, plain) else plain


def quantize(weight: torch.Tensor, stats: InputStats, format: WeightFormat, search_clip: bool = True) -> WeightTensor:
    """The weight [n, k], already scaled, rounded with the range of each group searched for the least output error.

    `stats` are of the inputs that the scaled weight gets. Each output keeps the searched ranges only if they serve the
    output as a whole: the search judges groups one by one.
    """
    weights = grouped(weight, format)
    plain = make_grid(*full_range(weights), format)
    if not search_clip:
        return to_tensor(weights, plain, format)
    group = format.group
    blocks = [stats.moment[i : i + group, i : i + group] for i in range(0, weight.shape[1], group)]
    searched = search_range(weights, torch.stack(blocks), format)
    errors = [output_error((grid.nearest(weights) - weights).flatten(1), stats) for grid in (searched, plain)]
    keep = (errors[0] < errors[1])[:, None, None]
    grid = Grid(torch.where(keep, searched.scale, plain.scale), torch.where(keep, searched.zero, plain.zero))
    return to_tensor(weights, grid, format)


def scaled_stats(stats: InputStats, scales: torch.Tensor) -> InputStats:
    """The statistics of the same inputs divided by `scales`."""
    return InputStats(stats.moment / scales / scales[:, None], stats.rows)


class _Judge:
    """The loss of scales: the output error relative to the outputs' energy, summed over Linears."""

    def __init__(self, weights: Sequence[torch.Tensor], stats: InputStats, format: WeightFormat) -> None:
        self.stats, self.format, self.weights = stats, format, weights
        self.sampled = [weight[:: -(-weight.shape[0] // _JUDGED)] for weight in weights]
        self.energies = [
            _by_rows(weight, lambda rows: output_error(rows, stats)) / len(weight) for weight in self.sampled
        ]

    def loss(self, scales: torch.Tensor) -> float:
        """By a sample of the outputs."""
        return self._relative(self.sampled, scales)

    def prefers(self, scales: torch.Tensor, others: torch.Tensor) -> bool:
        """Whether all outputs together lose less with `scales` than with `others`."""
        return self._relative(self.weights, scales) < self._relative(self.weights, others)

    def _relative(self, weights: Sequence[torch.Tensor], scales: torch.Tensor) -> float:
        """The mean error of these outputs of each Linear relative to the sample's energy, summed over Linears."""
        errors = [self._error(weight, scales) / len(weight) for weight in weights]
        return sum(error / energy for error, energy in zip(errors, self.energies) if energy > 0)

    def _error(self, weight: torch.Tensor, scales: torch.Tensor) -> float:
        def error(rows: torch.Tensor) -> torch.Tensor:
            weights = grouped(rows * scales, self.format)
            rounded = make_grid(*full_range(weights), self.format).nearest(weights).flatten(1) / scales
            return output_error(rounded - rows, self.stats)

        return _by_rows(weight, error)


def _by_rows(weight: torch.Tensor, error: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """The sum of an error over all outputs, a bounded number of them at a time."""
    return sum(float(error(rows.float()).sum()) for rows in torch.split(weight, _ROWS))


def _mean_magnitude(weights: Sequence[torch.Tensor], format: WeightFormat) -> torch.Tensor:
    """float32 [k]: the mean over all outputs of |w| relative to the largest of its group."""
    total = torch.zeros(weights[0].shape[1])
    for weight in weights:
        for rows in torch.split(weight, _ROWS):
            magnitude = grouped(rows, format).abs()
            total += (magnitude / magnitude.amax(-1, keepdim=True).clamp(min=1e-12)).flatten(1).sum(0)
    return total / sum(weight.shape[0] for weight in weights)


def _scales(
    rms: torch.Tensor, magnitude: torch.Tensor, exponent: float, by_weight: bool, shared: tuple[int, int] | None
) -> torch.Tensor:
    """The candidate rms^exponent, over magnitude^(1 - exponent) if `by_weight`, around 1; dead inputs get 1."""
    log = exponent * rms.clamp(min=1e-12).log()
    if by_weight:
        log -= (1 - exponent) * magnitude.clamp(min=1e-12).log()
    alive = (rms > 0) & (magnitude > 0)
    log = torch.where(alive, log - log[alive].mean(), 0.0) if bool(alive.any()) else torch.zeros_like(log)
    if shared is not None:
        heads, head_dim = shared
        log = log.reshape(-1, heads, head_dim).mean(1, keepdim=True).expand(-1, heads, -1).reshape(-1)
    return log.exp().clamp(1 / _LIMIT, _LIMIT)
