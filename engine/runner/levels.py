"""What makes K easier to round before steering sees it: a layer's centres and levels, from K of a text.

A few channels of K can be a hundred times what the others are, and nearly the same for every token: the bias of the
projection. With one scale for a token and head they set the step of all; in fp8 their own error, which is relative, is
large. Two changes cost readers nothing:

- Softmax does not notice a vector that is taken off all keys of a head. A pair of dimensions has one, its mean, where
  that is most of it. The mean is over the positions that the rotation may turn it to: of a pair that turns often it
  is near nothing, and left. Where a pair varies it has none either: steering needs values that are small by chance, and
  with a centre for every pair whose mean is twice its deviation SmolLM2-135M loses half as much again in fp8.
- A pair may be divided by its level, if queries are multiplied by it. Levels, powers of two, bring all pairs to about
  the range of the largest, which is the best that one scale can do: an error is at least as large as the step of the
  largest. The largest itself has level 1, so that nothing comes nearer to where a float format loses its bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...kernels.ops import F32Array

MOST_POSITIONS = 8192  # that a centre is good for; beyond, K is as exact as the step that it then needs
_WORTH = 30.0  # a centre has to be so many times the variance about it
_STEPS = 8  # positions that a text is thought to be at
_MOST = 0.99  # of K is within the range that a level makes
_LEAST_LEVEL = 2.0**-16  # a pair that is smaller yet counts for nothing beside the others

_C128 = npt.NDArray[np.complex128]


def as_pairs(k: F32Array) -> _C128:
    """K [..., head_dim] as complex numbers [..., head_dim / 2], which a rotation multiplies."""
    a, b = np.split(k.astype(np.float64), 2, axis=-1)
    return a + 1j * b


def find_centre(unturned: _C128, turns: _C128) -> _C128:
    """Of one head, [pairs]: K [tokens, pairs] without its rotation, and rotations [positions, pairs] it may have."""
    centre: _C128 = unturned.mean(axis=0) * turns.mean(axis=0)
    energy = (np.abs(unturned) ** 2).mean(axis=0) * (np.abs(turns) ** 2).mean(axis=0)
    size = np.abs(centre) ** 2
    return np.where(size > _WORTH * (energy - size), centre, 0)


def find_levels(unturned: _C128, turns: _C128, centre: _C128) -> F32Array:
    """Of one head, [pairs]: powers of two, 1 for the pair of the largest range."""
    steps = turns[np.linspace(0, len(turns) - 1, _STEPS).astype(int)]
    k = unturned[:, None] * steps - centre
    size = np.maximum(np.abs(k.real), np.abs(k.imag)).reshape(-1, k.shape[-1])
    ranges = np.quantile(size, _MOST, axis=0)
    if not (np.isfinite(ranges).all() and ranges.max() > 0):
        return np.ones(k.shape[-1], np.float32)
    shares = np.maximum(ranges / ranges.max(), _LEAST_LEVEL)
    levels: F32Array = np.exp2(np.round(np.log2(shares))).astype(np.float32)
    return levels
