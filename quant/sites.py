"""Where per-channel scales can go in a decoder block, and how they are folded away.

The scales that multiply a Linear's columns divide the outputs of what produces its inputs: a norm's weight, or the rows
of the Linear before it. After folding the block computes the same function, and its checkpoint is an ordinary one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class ScaleSite:
    """Linears that read the same inputs, and the module whose outputs, channel by channel, these inputs are.

    shared    (query heads per KV head, head_dim) if `previous` makes value heads and the Linears read the outputs of
              query heads
    offset    what `previous`, if it is a norm, adds to its stored weight
    """

    previous: str
    linears: tuple[str, ...]
    shared: tuple[int, int] | None = None
    offset: float = 0.0


def fold_scales(
    previous: nn.Module,
    linears: Sequence[nn.Linear],
    scales: torch.Tensor,
    shared: tuple[int, int] | None,
    offset: float = 0.0,
) -> torch.Tensor:
    """Divide the outputs of `previous` by `scales` and multiply the columns of `linears`; the scales used are returned.

    A norm's weight will be stored in float16, so it is rounded here and its Linears are multiplied by what really came
    of it: the rounding costs nothing. The last rows of a fused Linear are its values, as in AutoAWQ.
    """
    weight, bias = previous.get_parameter("weight"), dict(previous.named_parameters()).get("bias")
    if weight.ndim == 1:
        exact = weight.data + offset
        stored = (exact / scales - offset).half().float()
        factor = stored + offset
        scales = torch.where((factor == 0) | ~torch.isfinite(factor), scales, exact / factor)
        weight.data = stored
        if bias is not None:
            bias.data = bias.data / scales
    else:
        rows = scales
        if shared is not None:
            heads, head_dim = shared
            rows = scales.reshape(-1, heads, head_dim)[:, 0].reshape(-1)
        weight.data[-len(rows) :] /= rows[:, None]
        if bias is not None:
            bias.data[-len(rows) :] /= rows
    for linear in linears:
        linear.weight.data = linear.weight.data * scales
    return scales
