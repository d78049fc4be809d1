"""From Steps to the `Batch` arrays: deltas applied to the slots, and one step's rows laid out."""

from __future__ import annotations

import numpy as np

from ...kernels.ops import LOGIT_ROWS, ROWS, SEQS, Batch, I32Array
from ..sample.slots import FloatArray, Slots
from ..schedule.step import Admit, Chunk, SlotSampling, Step, TableDelta


def apply_deltas(slots: Slots, step: Step) -> None:
    """Bring the slots up to date with the step's drops, admissions and table deltas."""
    for slot in step.drop:
        for table_len in slots.table_len:
            table_len[slot] = 0
        slots.bias.pop(slot, None)
        slots.banned_bias.pop(slot, None)
    for admit in step.admit:
        _admit(slots, admit)
    for delta in step.tables:
        _extend_table(slots, delta)


def fill_batch(batch: Batch, slots: Slots, chunks: tuple[Chunk, ...]) -> None:
    """Lay out the chunks' rows one after the other; `chunk.drafts` become the tokens of its last positions."""
    row = logit = 0
    for sequence, chunk in enumerate(chunks):
        tokens, start, end = slots.tokens[chunk.slot], chunk.start, chunk.start + chunk.count
        if chunk.drafts:
            tokens[end - len(chunk.drafts) : end] = chunk.drafts
        last = row + chunk.count
        batch.token[row:last] = tokens[start:end]
        batch.position[row:last] = range(start, end) if chunk.count < 8 else np.arange(start, end, dtype=np.int32)
        batch.slot[row:last] = chunk.slot
        batch.seq_first[sequence], batch.seq_rows[sequence] = row, chunk.count
        wanted = chunk.count - chunk.logits_from
        if wanted:
            batch.logit_rows[logit : logit + wanted] = range(row + chunk.logits_from, last)
            logit += wanted
        row = last
    batch.counts[ROWS], batch.counts[SEQS], batch.counts[LOGIT_ROWS] = row, len(chunks), logit


def _admit(slots: Slots, admit: Admit) -> None:
    slot, sampling = admit.slot, admit.sampling
    tokens = np.frombuffer(admit.tokens, "<i4")
    slots.tokens[slot, : len(tokens)] = tokens
    for table_len in slots.table_len:
        table_len[slot] = 0
    row = slots.sampling[slot]
    for name in _SAME_NAMES:
        row[name] = getattr(sampling, name)
    row["seed"] = sampling.seed & 0xFFFFFFFFFFFFFFFF
    row["prompt_len"] = admit.prompt_len
    row["tokens"] = slots.tokens[slot].ctypes.data
    slots.banned_until[slot] = sampling.banned_until
    slots.bias[slot] = _bias(sampling, banned=False)
    slots.banned_bias[slot] = _bias(sampling, banned=True)


_SAME_NAMES = (
    "top_k", "logprobs", "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


def _bias(sampling: SlotSampling, *, banned: bool) -> tuple[I32Array, FloatArray]:
    values = dict(zip(sampling.bias_ids, sampling.bias_values, strict=True))
    if banned:
        values |= dict.fromkeys(sampling.banned_ids, float("-inf"))
    return np.array(list(values), np.int32), np.array(list(values.values()), np.float32)


def _extend_table(slots: Slots, delta: TableDelta) -> None:
    table_len = slots.table_len[delta.group]
    first = int(table_len[delta.slot])
    slots.tables[delta.group][delta.slot, first : first + len(delta.blocks)] = delta.blocks
    table_len[delta.slot] = first + len(delta.blocks)
