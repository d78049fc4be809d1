"""From Steps to the `Batch` arrays: deltas applied to the slots, and one step's rows laid out."""

from __future__ import annotations

import numpy as np

from ...kernels.ops import LARGEST_ONLY, LOGIT_ROWS, ROWS, SEQS, Batch
from ..sample.slots import Bias, Slots, point_to_bias
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


def fill_batch(batch: Batch, slots: Slots, chunks: tuple[Chunk, ...], *, sampled: bool = False) -> None:
    """Lay out the chunks' rows one after the other; `chunk.drafts` become the tokens of its last positions.

    `sampled`: nobody but the sampler reads the logits.
    """
    for chunk in chunks:
        if chunk.drafts:
            end = chunk.start + chunk.count
            slots.tokens[chunk.slot, end - len(chunk.drafts) : end] = chunk.drafts
    each = np.array([(chunk.slot, chunk.start, chunk.count, chunk.logits_from) for chunk in chunks], np.intp)
    slot, start, count, logits_from = each.T
    ends, logit_ends = count.cumsum(), (count - logits_from).cumsum()
    rows, sequences, logits = int(ends[-1]), len(chunks), int(logit_ends[-1])
    first, position, first_logit = ends - count, start, ends - logit_ends
    batch.seq_first[:sequences], batch.seq_rows[:sequences] = first, count
    if rows > sequences or logits != rows:  # not one token of each, which is what most steps are
        position = np.arange(rows) + np.repeat(start - first, count)
        slot = slot.repeat(count)
        first_logit = first_logit.repeat(count - logits_from)
    batch.token[:rows] = slots.tokens[slot, position]
    batch.position[:rows], batch.slot[:rows] = position, slot
    batch.logit_rows[:logits] = np.arange(logits) + first_logit
    batch.counts[ROWS], batch.counts[SEQS], batch.counts[LOGIT_ROWS] = rows, sequences, logits
    largest_only = sampled and slots.largest_only[each[:, 0]].all() and not any(chunk.known for chunk in chunks)
    batch.counts[LARGEST_ONLY] = largest_only


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
    slots.largest_only[slot] = _is_largest_only(sampling)
    slots.bias[slot] = _bias(sampling, banned=False)
    point_to_bias(row, slots.bias[slot])
    if sampling.banned_until:
        slots.banned_bias[slot] = _bias(sampling, banned=True)


def _is_largest_only(sampling: SlotSampling) -> bool:
    """Whether a token is the one with the largest logit, and no other logit is asked for."""
    plain = sampling.repetition_penalty == 1 and sampling.presence_penalty == sampling.frequency_penalty == 0
    unbiased = not sampling.bias_ids and not sampling.banned_until
    return sampling.temperature == 0 and sampling.logprobs < 0 and plain and unbiased


_SAME_NAMES = (
    "top_k", "logprobs", "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip


def _bias(sampling: SlotSampling, *, banned: bool) -> Bias:
    values = dict(zip(sampling.bias_ids, sampling.bias_values, strict=True))
    if banned:
        values |= dict.fromkeys(sampling.banned_ids, float("-inf"))
    return np.array(list(values), np.int32), np.array(list(values.values()), np.float32)


def _extend_table(slots: Slots, delta: TableDelta) -> None:
    table_len = slots.table_len[delta.group]
    first = int(table_len[delta.slot])
    slots.tables[delta.group][delta.slot, first : first + len(delta.blocks)] = delta.blocks
    table_len[delta.slot] = first + len(delta.blocks)
