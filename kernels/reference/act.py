"""Rows of activations, and how they are quantized for the linears that read them."""

from __future__ import annotations

import numpy as np
import torch

from ..ops import LOGIT_ROWS, NO_QUAD, ROWS, WIDE_TOP, Act, ActForm, Batch, I32Array, U8Array

Q_MAX = {"i8": 127.0, "i12": 2047.0, "i14": 8191.0}


def batch_rows(batch: Batch, logit_rows_only: bool) -> I32Array:
    """Which rows of the batch an op is over, ascending."""
    if logit_rows_only:
        return batch.logit_rows[: int(batch.counts[LOGIT_ROWS])]
    return np.arange(int(batch.counts[ROWS]), dtype=np.int32)


def quantize(
    values: torch.Tensor, kind: str, group: int, wide: U8Array | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes float32 [rows, k], scales float32 [rows, groups], sums float32 [rows, groups]) of float32 values.

    A group of zeros has scale 0 and codes 0, one with a NaN or Inf such a scale and codes 0. Codes of wide quads are
    whole, not cut into parts.
    """
    rows, k = values.shape
    grouped = values.reshape(rows, k // group, group)
    tops = torch.full((k // group, group), Q_MAX[kind])
    for g, quad in enumerate(() if wide is None else wide.tolist()):
        if quad != NO_QUAD:
            tops[g, 4 * quad : 4 * quad + 4] = WIDE_TOP
    narrow, broad = (torch.where(tops == top, grouped.abs(), 0).amax(dim=2) / top for top in (Q_MAX[kind], WIDE_TOP))
    scales = torch.maximum(narrow, broad)  # keeps NaN
    codes = torch.round(grouped / scales[:, :, None])  # rounds half to even
    some = torch.isfinite(scales) & (scales != 0)
    codes = torch.where(some[:, :, None], codes, torch.zeros_like(codes))
    return codes.reshape(rows, k), scales, codes.sum(dim=2)


def write_act(act: Act, values: torch.Tensor) -> None:
    """Store rows of float32 values [rows, k] and all their quantized forms."""
    rows = values.shape[0]
    torch.from_numpy(act.values)[:rows] = values
    for form in act.forms:
        read = values if form.order is None else values[:, torch.from_numpy(form.order).long()]
        codes, scales, sums = quantize(read, form.kind, form.group, form.wide)
        if form.wide is not None and form.high is not None:
            codes, high = cut(codes, form.wide, form.group)
            torch.from_numpy(form.high)[:rows] = high
        stored = torch.from_numpy(form.codes)
        stored[:rows] = codes.to(stored.dtype)
        torch.from_numpy(form.scales)[:rows] = scales
        torch.from_numpy(form.sums)[:rows] = sums.to(torch.int32)


def cut(codes: torch.Tensor, wide: U8Array, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [rows, k] with the low parts of wide quads, and their high parts, as bytes, int32 [rows, groups]."""
    rows, k = codes.shape
    high = torch.zeros((rows, k // group), dtype=torch.int32)
    whole = torch.where(torch.isfinite(codes), codes, 0).to(torch.int32).reshape(rows, k // group, group)
    for g, quad in enumerate(wide.tolist()):
        if quad == NO_QUAD:
            continue
        part = whole[:, g, 4 * quad : 4 * quad + 4]
        upper = (part + 8) >> 4
        high[:, g] = upper.to(torch.int8).contiguous().view(torch.int32)[:, 0]
        part -= upper << 4
    return whole.reshape(rows, k).float(), high


def whole_codes(form: ActForm, rows: int) -> torch.Tensor:
    """Codes int32 [rows, k] of the first rows, those of wide quads with their high parts."""
    codes = torch.from_numpy(form.codes)[:rows].to(torch.int32)
    if form.wide is None or form.high is None:
        return codes
    grouped = codes.reshape(rows, -1, form.group)
    high = torch.from_numpy(form.high)[:rows].contiguous().view(torch.int8).reshape(rows, -1, 4).to(torch.int32)
    for g, quad in enumerate(form.wide.tolist()):
        if quad != NO_QUAD:
            grouped[:, g, 4 * quad : 4 * quad + 4] += high[:, g] << 4
    return grouped.reshape(rows, -1)
