"""Mixture of experts, one token after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..ops import ROWS, ExpertsArgs, PackedWeight
from .weight import dequantize


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """The weights' values are kept in float64: `router` [experts, hidden], and each expert's three."""

    args: ExpertsArgs
    router: torch.Tensor
    weights: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...]

    def run(self) -> None:
        args, rows, hidden = self.args, int(self.args.batch.counts[ROWS]), self.router.shape[1]
        x = torch.from_numpy(args.act.values)[:rows, :hidden].double()
        out = torch.from_numpy(args.out)
        for row in range(rows):
            ids, weights = self._choose(x[row])
            total = torch.zeros(hidden, dtype=torch.float64)
            for expert, weight in zip(ids, weights, strict=True):
                gate, up, down = self.weights[expert]
                gated = gate @ x[row]
                active = F.silu(gated) if args.activation == "silu" else F.gelu(gated, approximate="tanh")
                total += weight * (down @ (active * (up @ x[row])))
            out[row, :hidden] += total.float()

    def _choose(self, x: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        """The token's experts, best first, and their weights."""
        args, logits = self.args, self.router @ x
        scores = torch.softmax(logits, dim=0) if args.score == "softmax" else torch.sigmoid(logits)
        rank = scores if args.bias is None else scores + torch.from_numpy(args.bias).double()
        ids = torch.sort(rank, descending=True, stable=True).indices[: args.choices]
        weights = scores[ids]
        if args.normalize:
            weights = weights / weights.sum()
        return ids.tolist(), weights * args.scale


def build(args: ExpertsArgs) -> Experts:
    """An op for these buffers."""
    experts = zip(args.gate, args.up, args.down, strict=True)
    weights = tuple((_values(gate), _values(up), _values(down)) for gate, up, down in experts)
    return Experts(args, _values(args.router), weights)


def _values(weight: PackedWeight) -> torch.Tensor:
    """[n, k], column j of input j."""
    values = dequantize(weight).double()
    if weight.order is None:
        return values
    ordered = torch.empty_like(values)
    ordered[:, torch.from_numpy(weight.order).long()] = values
    return ordered
