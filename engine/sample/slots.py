"""What a runner remembers of each slot between steps: the sequence's tokens, its block tables, how it samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...kernels.ops import SAMPLE_ROW, I32Array

FloatArray = npt.NDArray[np.float32]
Bias = tuple[I32Array, FloatArray]


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """Per-slot state at fixed addresses.

    tokens        int32 [slots, max positions + 1]: the sequence so far, drafts included while they are checked
    tables        per KV group int32 [slots, max blocks]
    table_len     per KV group int32 [slots]
    sampling      SAMPLE_ROW [slots]: everything but `length`; it points to `bias`
    largest_only  bool [slots]: whether of its logits only the largest is looked at
    banned_until  int32 [slots]: generated tokens before which `banned_bias` applies instead of `bias`
    bias          (ids, values) of each slot, kept alive here because SAMPLE_ROW holds their addresses
    banned_bias   the same of the slots that have a `banned_until`
    """

    tokens: I32Array
    tables: tuple[I32Array, ...]
    table_len: tuple[I32Array, ...]
    sampling: npt.NDArray[np.void]
    largest_only: npt.NDArray[np.bool_]
    banned_until: I32Array
    bias: dict[int, Bias]
    banned_bias: dict[int, Bias]


def make_slots(max_slots: int, max_positions: int, max_blocks: tuple[int, ...]) -> Slots:
    """Empty slots for sequences of at most `max_positions` tokens."""
    return Slots(
        np.zeros((max_slots, max_positions + 1), np.int32),
        tuple(np.zeros((max_slots, blocks), np.int32) for blocks in max_blocks),
        tuple(np.zeros(max_slots, np.int32) for _ in max_blocks),
        np.zeros(max_slots, SAMPLE_ROW),
        np.zeros(max_slots, np.bool_),
        np.zeros(max_slots, np.int32),
        {},
        {},
    )


def point_to_bias(row: np.void, bias: Bias) -> None:
    """Let a SAMPLE_ROW have this bias, whose arrays must outlive it."""
    ids, values = bias
    row["num_bias"], row["bias_ids"], row["bias_values"] = len(ids), ids.ctypes.data, values.ctypes.data
