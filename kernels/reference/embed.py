"""Embedding rows from a packed weight, scaled."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..ops import ROWS, EmbedArgs
from .weight import dequantize


@dataclass(frozen=True, slots=True)
class Embed:
    args: EmbedArgs
    weight: torch.Tensor  # float32 [vocab, hidden]

    def run(self) -> None:
        rows = int(self.args.batch.counts[ROWS])
        tokens = torch.from_numpy(self.args.batch.token[:rows]).long()
        scale = torch.tensor(self.args.scale, dtype=torch.float32)
        torch.from_numpy(self.args.out)[:rows, : self.args.weight.k] = self.weight[tokens] * scale


def build(args: EmbedArgs) -> Embed:
    """An op for these buffers, with the weight as float32."""
    return Embed(args, dequantize(args.weight))
