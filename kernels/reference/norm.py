"""RMS norm into activations and their quantized forms."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..ops import NormArgs
from .act import batch_rows, write_act


@dataclass(frozen=True, slots=True)
class Norm:
    args: NormArgs

    def run(self) -> None:
        args = self.args
        rows = batch_rows(args.batch, args.logit_rows_only)
        x = torch.from_numpy(args.x)[torch.from_numpy(rows).long(), : args.act.k]
        write_act(args.act, rms_norm(x, torch.from_numpy(args.weight)[: args.act.k], args.eps))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float64, as float32."""
    x = x.double()
    normed: torch.Tensor = x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight.double()
    return normed.float()


def build(args: NormArgs) -> Norm:
    """An op for these buffers."""
    return Norm(args)
