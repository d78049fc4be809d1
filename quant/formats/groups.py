"""Groups of inputs that share a scale, made equal and consecutive without changing a value.

Kernels want one group size per weight, of a few kinds, and the inputs of a group side by side. Checkpoints also have a
short last group (576 inputs in groups of 128), large groups, one scale for everything, or inputs assigned to groups in
any order. A scale that is repeated for parts of its group, and a permutation of inputs, express all of these exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...kernels.errors import CheckpointError
from ..tensor import Array

I32Array = npt.NDArray[np.int32]

_KERNEL_SIZES = (128, 64, 32)


class Groups(NamedTuple):
    """Inputs in stored order: `sizes[i]` of them belong to group i; `order` as in `WeightTensor`."""

    sizes: npt.NDArray[np.int64]
    order: I32Array | None = None

    @property
    def common_size(self) -> int:
        """The largest size that divides every group and that kernels read, or the whole weight if it is one group.

        Where there is none of these, the greatest common divisor.
        """
        divisor = int(np.gcd.reduce(self.sizes))
        if divisor == int(self.sizes.sum()):
            return divisor
        return next((size for size in _KERNEL_SIZES if divisor % size == 0), divisor)


def consecutive_groups(k: int, group_size: int) -> Groups:
    """Groups of `group_size` inputs, the last one shorter if need be; -1 or more than k is one group."""
    size = k if group_size == -1 or group_size > k else group_size
    count = -(-k // size)
    sizes = np.full(count, size, np.int64)
    sizes[-1] = k - size * (count - 1)
    return Groups(sizes)


def indexed_groups(module: str, g_idx: Array, count: int) -> Groups:
    """The groups of a `g_idx` tensor, which gives the group of each input."""
    index = g_idx.astype(np.int64)
    if index.size and (index.min() < 0 or index.max() >= count):
        raise CheckpointError(
            f"`{module}` assigns inputs to groups {index.min()}..{index.max()}, but has scales for {count} groups",
            "the file is broken: fetch the model again",
        )
    order = None if (np.diff(index) >= 0).all() else np.argsort(index, kind="stable").astype(np.int32)
    return Groups(np.bincount(index, minlength=count), order)


def equal_groups(groups: Groups, *per_group: Array) -> tuple[int, tuple[Array, ...]]:
    """The groups' common size, and the arrays [n, groups] with a column for each part of that size."""
    group = groups.common_size
    repeats = groups.sizes // group
    if (repeats == 1).all():
        return group, per_group
    return group, tuple(np.repeat(array, repeats, axis=1) for array in per_group)
