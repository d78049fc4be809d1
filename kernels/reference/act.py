"""Rows of activations, and how they are quantized for the linears that read them."""

from __future__ import annotations

import numpy as np
import torch

from ..ops import LOGIT_ROWS, ROWS, Act, Batch, I32Array

Q_MAX = {"i8": 127.0, "i16": 2047.0}


def batch_rows(batch: Batch, logit_rows_only: bool) -> I32Array:
    """Which rows of the batch an op is over, ascending."""
    if logit_rows_only:
        return batch.logit_rows[: int(batch.counts[LOGIT_ROWS])]
    return np.arange(int(batch.counts[ROWS]), dtype=np.int32)


def quantize(values: torch.Tensor, kind: str, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes float32 [rows, k], scales float32 [rows, groups], sums float32 [rows, groups]) of float32 values.

    A group of zeros has scale 0 and codes 0.
    """
    rows, k = values.shape
    grouped = values.reshape(rows, k // group, group)
    scales = grouped.abs().amax(dim=2) / Q_MAX[kind]
    codes = torch.round(grouped / scales[:, :, None])  # rounds half to even
    codes = torch.where(scales[:, :, None] == 0, torch.zeros_like(codes), codes)
    return codes.reshape(rows, k), scales, codes.sum(dim=2)


def write_act(act: Act, values: torch.Tensor) -> None:
    """Store rows of float32 values [rows, k] and all their quantized forms."""
    rows = values.shape[0]
    torch.from_numpy(act.values)[:rows] = values
    for form in act.forms:
        read = values if form.order is None else values[:, torch.from_numpy(form.order).long()]
        codes, scales, sums = quantize(read, form.kind, form.group)
        stored = torch.from_numpy(form.codes)
        stored[:rows] = codes.to(stored.dtype)
        torch.from_numpy(form.scales)[:rows] = scales
        torch.from_numpy(form.sums)[:rows] = sums.to(torch.int32)
