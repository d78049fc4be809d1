"""How each row with logits is sampled, as the GPU's sampler reads it (sample.cuh)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ...kernels.ops import LOGIT_ROWS, Batch, F32Array, I32Array
from ..sample.slots import Bias, Slots
from ..schedule.step import Chunk

# As SampleRow of sample.cuh.
SAMPLE_ROW = np.dtype(
    [
        ("seed", np.uint64),
        *((name, np.int32) for name in ("position", "seen_first", "seen_count", "bias_first", "bias_count")),
        *((name, np.int32) for name in ("top_k", "logprobs")),
        *((name, np.float32) for name in ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")),
        ("reserved", np.int32),
    ]
)
_SAME = ("seed", "top_k", "logprobs", "temperature", "top_p", "min_p")
_RENAMED = {"repetition": "repetition_penalty", "presence": "presence_penalty", "frequency": "frequency_penalty"}
_CERTAIN = np.full(1, np.inf, np.float32)
FIRST_CAPACITY = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class SampleLists:
    """Buffers with twins on the GPU: a SAMPLE_ROW for each row, and what they refer to. See `sample` in sample.cuh."""

    rows: npt.NDArray[np.void]
    seen_ids: I32Array
    seen_outputs: I32Array
    bias_ids: I32Array
    bias_values: F32Array


def make_lists(max_rows: int, seen: int = FIRST_CAPACITY, bias: int = FIRST_CAPACITY) -> SampleLists:
    """Empty buffers for so many rows, ids that were seen and ids with a bias."""
    return SampleLists(
        np.zeros(max_rows, SAMPLE_ROW),
        np.zeros(seen, np.int32),
        np.zeros(seen, np.int32),
        np.zeros(bias, np.int32),
        np.zeros(bias, np.float32),
    )


@dataclass(frozen=True, slots=True, eq=False)
class AskedRows:
    """How the rows of one step are sampled; the fields are those of SampleLists, as long as needed."""

    rows: npt.NDArray[np.void]
    seen_ids: I32Array
    seen_outputs: I32Array
    bias_ids: I32Array
    bias_values: F32Array

    def fits(self, lists: SampleLists) -> bool:
        return len(self.seen_ids) <= len(lists.seen_ids) and len(self.bias_ids) <= len(lists.bias_ids)


def looks_back(slots: Slots, chunks: tuple[Chunk, ...]) -> bool:
    """Whether sampling needs to know tokens that a step in flight may still have to sample."""
    asked = slots.sampling[[chunk.slot for chunk in chunks if chunk.logits_from < chunk.count]]
    return bool(_penalized(asked).any())


def asked_rows(batch: Batch, slots: Slots, chunks: tuple[Chunk, ...]) -> AskedRows:
    """What is asked of the batch's rows with logits, of these chunks. Tokens before them are known if they matter."""
    count = int(batch.counts[LOGIT_ROWS])
    where = batch.logit_rows[:count]
    slot, length = batch.slot[where], batch.position[where] + 1
    asked: npt.NDArray[Any] = slots.sampling[slot]
    rows: npt.NDArray[Any] = np.zeros(count, SAMPLE_ROW)
    for name in _SAME:
        rows[name] = asked[name]
    for name, theirs in _RENAMED.items():
        rows[name] = asked[theirs]
    rows["position"] = length
    known = _known(chunks)
    seen: list[tuple[I32Array, I32Array]] = []
    biases: list[Bias] = []
    first_seen = first_bias = 0
    special = (asked["num_bias"] > 0) | _penalized(asked)
    if slots.banned_bias:
        special |= slots.banned_until[slot] > 0
    special[known] = True
    for row in np.flatnonzero(special):
        at, size = int(slot[row]), int(length[row])
        if row in known:
            rows[row]["temperature"], rows[row]["repetition"] = 0.0, 1.0
            rows[row]["presence"] = rows[row]["frequency"] = 0.0
            bias: Bias = (slots.tokens[at, size : size + 1], _CERTAIN)
        else:
            generated = size - int(asked[row]["prompt_len"])
            banned = at in slots.banned_bias and generated < int(slots.banned_until[at])
            bias = (slots.banned_bias if banned else slots.bias)[at]
            if bool(_penalized(asked[row])):
                ids, outputs = _history(slots.tokens[at, :size], int(asked[row]["prompt_len"]))
                rows[row]["seen_first"], rows[row]["seen_count"] = first_seen, len(ids)
                seen.append((ids, outputs))
                first_seen += len(ids)
        rows[row]["bias_first"], rows[row]["bias_count"] = first_bias, len(bias[0])
        biases.append(bias)
        first_bias += len(bias[0])
    return AskedRows(rows, *_joined(seen, np.int32), *_joined(biases, np.float32))


def _penalized(asked: Any) -> Any:
    return (asked["repetition_penalty"] != 1) | (asked["presence_penalty"] != 0) | (asked["frequency_penalty"] != 0)


def _known(chunks: tuple[Chunk, ...]) -> list[int]:
    """The rows with logits after which the token is known."""
    found: list[int] = []
    first = 0
    for chunk in chunks:
        found += range(first, first + chunk.known)
        first += chunk.count - chunk.logits_from
    return found


def _history(tokens: I32Array, prompt_len: int) -> tuple[I32Array, I32Array]:
    """The tokens of a sequence, each once, and how often each was generated."""
    ids, places = np.unique(tokens, return_inverse=True)
    outputs = np.bincount(places[prompt_len:], minlength=len(ids))
    return ids.astype(np.int32), outputs.astype(np.int32)


def _joined(pairs: list[tuple[Any, Any]], kind: type[np.generic]) -> tuple[Any, Any]:
    if not pairs:
        return np.zeros(0, np.int32), np.zeros(0, kind)
    return np.concatenate([first for first, _ in pairs]), np.concatenate([second for _, second in pairs])
