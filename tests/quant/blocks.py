"""A small decoder block of torch's own, for tests of the walk: quant knows blocks by their face only."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from llmctl.quant.sites import ScaleSite

WIDTH, FFN = 64, 96


class TinyBlock(nn.Module):
    """A norm, gate and up, their product, down; the second input channel in 16 is large, as in real models."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.RMSNorm(WIDTH)
        self.norm.weight.data = torch.rand(WIDTH) + 0.2
        self.norm.weight.data[1::16] *= 20
        self.gate, self.up = nn.Linear(WIDTH, FFN, bias=False), nn.Linear(WIDTH, FFN)
        self.down = nn.Linear(FFN, WIDTH, bias=False)
        self.requires_grad_(False)

    @property
    def sites(self) -> tuple[ScaleSite, ...]:
        return ScaleSite("norm", ("gate", "up")), ScaleSite("up", ("down",))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        y = self.norm(attend(x, x, x, 0))
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def no_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    return v
