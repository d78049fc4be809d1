"""Logits to tokens for one step: fills the sampler's rows, runs it, and checks drafts by match.

A token is a pure function of (its logits row, the tokens before it, the sequence's seed), so drafts are verified by
sampling at every draft position with the target's own noise: a draft stands if and only if it is the token that would
have been sampled. Speculation therefore changes no token at any temperature.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...kernels import registry
from ...kernels.ops import LOGIT_ROWS, MAX_TOP, SAMPLE_ROW, Batch, F32Array, I32Array, SampleArgs, U8Array
from ..schedule.step import Chunk, ChunkResult
from .slots import Slots, point_to_bias

_CERTAIN = np.full(1, np.inf, np.float32)


class Sampler:
    """Samples the logits rows of the chunks that are laid out in `batch`, and writes the new tokens into the slots."""

    def __init__(self, batch: Batch, logits: F32Array, vocab_size: int, slots: Slots, kernels: str) -> None:
        rows = len(logits)
        self._batch, self._slots = batch, slots
        self._rows: npt.NDArray[Any] = np.zeros(rows, SAMPLE_ROW)
        self._args = SampleArgs(
            logits,
            vocab_size,
            self._rows,
            np.zeros(rows, np.int32),
            np.zeros(rows, np.float32),
            np.zeros((rows, MAX_TOP), np.int32),
            np.zeros((rows, MAX_TOP), np.float32),
            np.zeros(rows, np.uint8),
        )
        self._sample = registry.bind("sample", self._args, kernels=kernels)

    def sample(self, chunks: tuple[Chunk, ...]) -> tuple[ChunkResult, ...]:
        """One result per chunk, in order."""
        count = int(self._batch.counts[LOGIT_ROWS]) if chunks else 0
        if count:
            slot = self._fill(count)
            self._force(chunks)
            self._sample(count)
            self._keep(slot)
        args = self._args
        return chunk_results(
            chunks,
            Sampled(
                args.token[:count], args.finite[:count], args.logprob, args.top_ids, args.top_logprobs,
                self._rows["logprobs"][:count],
            ),
        )  # fmt: skip

    def _fill(self, count: int) -> I32Array:
        """Say how each of the batch's rows with logits is sampled; their slots."""
        batch, slots = self._batch, self._slots
        rows = self._rows[:count]
        where = batch.logit_rows[:count]
        slot = batch.slot[where]
        rows[:] = slots.sampling[slot]
        rows["length"] = batch.position[where] + 1
        if slots.banned_bias:
            generated = rows["length"] - rows["prompt_len"]
            until = slots.banned_until[slot]
            for row in np.flatnonzero((until > 0) & (generated < until)):  # inside a prompt `generated` is below 0
                point_to_bias(rows[row], slots.banned_bias[int(slot[row])])
        return slot

    def _force(self, chunks: tuple[Chunk, ...]) -> None:
        """Let the rows before known tokens choose these, which stand in the slots.

        The kernel reports the logprob of what it chooses, from the raw logits: so a known token's logprob has the bits
        that it would have if it had been sampled.
        """
        tokens, first = self._slots.tokens, 0
        for chunk in chunks:
            if chunk.known:
                rows = self._rows[first : first + chunk.known]
                rows["temperature"] = 0.0
                rows["repetition_penalty"] = 1.0
                rows["presence_penalty"] = rows["frequency_penalty"] = 0.0
                rows["num_bias"] = 1
                rows["bias_ids"] = tokens[chunk.slot].ctypes.data + rows["length"] * np.intp(tokens.strides[1])
                rows["bias_values"] = _CERTAIN.ctypes.data
            first += chunk.count - chunk.logits_from

    def _keep(self, slot: I32Array) -> None:
        """Write what was sampled behind the tokens of its slot; 0 where nothing was: a step in flight may feed it.

        Also behind drafts that failed. What stands there is void, and written again before it is used.
        """
        args, count = self._args, len(slot)
        lengths: I32Array = self._rows["length"][:count]
        self._slots.tokens[slot, lengths] = args.token[:count]
        if not args.finite[:count].all():
            bad = args.finite[:count] == 0
            self._slots.tokens[slot[bad], lengths[bad]] = 0


class Sampled(NamedTuple):
    """What a step sampled, a row each; as in SampleArgs. `num_top`: top ones that are asked for, -1: no logprob."""

    token: I32Array
    finite: U8Array
    logprob: F32Array
    top_ids: I32Array
    top_logprobs: F32Array
    num_top: I32Array


def chunk_results(chunks: tuple[Chunk, ...], sampled: Sampled) -> tuple[ChunkResult, ...]:
    """One result per chunk, in order, its drafts checked."""
    token, finite = sampled.token.tolist(), sampled.finite.tolist()
    num_top: list[int] = sampled.num_top.tolist()
    results, row = [], 0
    for chunk in chunks:
        wanted, accepted, good = chunk.count - chunk.logits_from, 0, True
        while accepted < wanted and (good := bool(finite[row + accepted])):
            accepted += 1
            place = accepted - 1 - chunk.known  # of the draft; known rows have none, nor has one for logits alone
            last = token[row + accepted - 1]
            if accepted < wanted and place >= 0 and chunk.drafts[place : place + 1] != (last,):
                break
        tokens = tuple(token[row : row + accepted])
        if wanted and num_top[row] >= 0:
            results.append(_with_logprobs(sampled, chunk.slot, tokens, good, row, num_top[row]))
        else:
            results.append(ChunkResult(chunk.slot, tokens, good))
        row += wanted
    return tuple(results)


def _with_logprobs(
    sampled: Sampled, slot: int, tokens: tuple[int, ...], finite: bool, row: int, num_top: int
) -> ChunkResult:
    span = slice(row, row + len(tokens))
    return ChunkResult(
        slot,
        tokens,
        finite,
        tuple(sampled.logprob[span].tolist()),
        _tuples(sampled.top_ids[span, :num_top]),
        _tuples(sampled.top_logprobs[span, :num_top]),
    )


def _tuples(rows: npt.NDArray[Any]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(row) for row in rows.tolist())
