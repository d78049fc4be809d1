"""Linear layers: float weights times float activations, integer weights times quantized activations.

Sums are taken in float64, so that a comparison shows a kernel's own rounding and not ours. Each row gives the same
bits in any company: integer sums are exact in float64, and float rows are multiplied one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..ops import ActForm, LinearArgs, act_form_of, find_form
from .act import batch_rows, whole_codes
from .weight import Groups, float_values, integer_groups


@dataclass(frozen=True, slots=True)
class FloatLinear:
    args: LinearArgs
    weight: torch.Tensor  # [n, k] as stored

    def run(self) -> None:
        rows = _rows(self.args)
        x = torch.from_numpy(self.args.act.values)[:rows].double()
        weight = self.weight.double()
        _write(self.args, [torch.mv(weight, x[row]) for row in range(rows)])


@dataclass(frozen=True, slots=True)
class IntegerLinear:
    args: LinearArgs
    form: ActForm
    weight: Groups

    def run(self) -> None:
        rows = _rows(self.args)
        codes = whole_codes(self.form, rows).double()
        scales = torch.from_numpy(self.form.scales)[:rows].double()
        w, group = self.weight, self.form.group
        total = torch.zeros((rows, self.args.weight.n), dtype=torch.float64)
        for g in range(scales.shape[1]):
            x = codes[:, g * group : (g + 1) * group]
            products = x @ (w.codes[:, g] - w.zeros[:, g : g + 1]).T  # [rows, n]
            sums = x.sum(dim=1, keepdim=True)
            total += (products * w.scales[:, g] + sums * w.minima[:, g]) * scales[:, g : g + 1]
        _write(self.args, list(total))


def build(args: LinearArgs) -> FloatLinear | IntegerLinear:
    """An op for these buffers, with the weight unpacked."""
    wanted = act_form_of(args.weight.format)
    if wanted is None:
        return FloatLinear(args, float_values(args.weight))
    form = find_form(args.act, args.weight)
    assert form is not None, f"activations have no form {wanted} for weight format {args.weight.format.name}"
    return IntegerLinear(args, form, integer_groups(args.weight))


def _rows(args: LinearArgs) -> int:
    return len(batch_rows(args.batch, args.logit_rows_only))


def _write(args: LinearArgs, results: list[torch.Tensor]) -> None:
    out = torch.from_numpy(args.out)
    for row, result in enumerate(results):
        if args.bias is not None:
            result = result + torch.from_numpy(args.bias)[: args.weight.n].double()
        if args.add:
            result = result + out[row, : args.weight.n].double()
        out[row, : args.weight.n] = result.float()
