"""A packed weight as torch tensors: its codes and scales, or its values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..cpu.pack import e8m0_values, unpack
from ..ops import PackedWeight


@dataclass(frozen=True, slots=True)
class Groups:
    """An integer weight: value = (code - zero) * scale + minimum, each for one output and group of inputs.

    codes [n, groups, group];  scales, zeros, minima [n, groups]; all float64, in which they are exact.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    minima: torch.Tensor


def float_values(weight: PackedWeight) -> torch.Tensor:
    """The values [n, k] of a float weight in its own dtype."""
    data = torch.from_numpy(unpack(weight)[0])
    return data.view(torch.bfloat16) if weight.format.kind == "bf16" else data


def integer_groups(weight: PackedWeight) -> Groups:
    """Codes and scales of an integer weight."""
    format = weight.format
    data, scales, zeros = unpack(weight)
    assert scales is not None
    codes = torch.from_numpy(data).double().reshape(weight.n, -1, format.group)
    if format.scales == "e8m0":
        scales = e8m0_values(scales)
    scale = torch.from_numpy(scales).double()
    none = torch.zeros_like(scale)
    if zeros is None:
        return Groups(codes, scale, none + (8 if format.kind == "int4" else 0), none)
    given = torch.from_numpy(zeros).double()
    return Groups(codes, scale, none, given) if format.zero == "min" else Groups(codes, scale, given, none)


def dequantize(weight: PackedWeight) -> torch.Tensor:
    """The values [n, k] as float32, rounded once."""
    if weight.format.is_float:
        return float_values(weight).float()
    groups = integer_groups(weight)
    values = (groups.codes - groups.zeros[:, :, None]) * groups.scales[:, :, None] + groups.minima[:, :, None]
    return values.reshape(weight.n, weight.k).float()
