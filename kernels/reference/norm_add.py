"""RMS norm of rows, added to other rows: how the half of a layer that ends in a norm joins the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..ops import ROWS, NormAddArgs
from .norm import rms_norm


@dataclass(frozen=True, slots=True)
class NormAdd:
    args: NormAddArgs

    def run(self) -> None:
        args = self.args
        rows, width = int(args.batch.counts[ROWS]), args.weight.size
        normed = rms_norm(torch.from_numpy(args.x)[:rows, :width], torch.from_numpy(args.weight), args.eps)
        torch.from_numpy(args.out)[:rows, :width] += normed


def build(args: NormAddArgs) -> NormAdd:
    """An op for these buffers."""
    return NormAdd(args)
