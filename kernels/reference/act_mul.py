"""The gated activation of a feed-forward layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..ops import ROWS, ActMulArgs
from .act import write_act

ACTIVATIONS = ("silu", "gelu_tanh")


@dataclass(frozen=True, slots=True)
class ActMul:
    args: ActMulArgs

    def run(self) -> None:
        rows, k = int(self.args.batch.counts[ROWS]), self.args.act.k
        gate = torch.from_numpy(self.args.gate)[:rows, :k].double()
        up = torch.from_numpy(self.args.up)[:rows, :k].double()
        active = F.silu(gate) if self.args.activation == "silu" else F.gelu(gate, approximate="tanh")
        write_act(self.args.act, (active * up).float())


def build(args: ActMulArgs) -> ActMul:
    """An op for these buffers."""
    return ActMul(args)
