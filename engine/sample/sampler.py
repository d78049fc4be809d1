"""Logits to tokens for one step: fills the sampler's rows, runs it, and checks drafts by match.

A token is a pure function of (its logits row, the tokens before it, the sequence's seed), so drafts are verified by
sampling at every draft position with the target's own noise: a draft stands if and only if it is the token that would
have been sampled. Speculation therefore changes no token at any temperature.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...kernels import registry
from ...kernels.ops import MAX_TOP, SAMPLE_ROW, F32Array, SampleArgs
from ..schedule.step import Chunk, ChunkResult
from .slots import Slots


class Sampler:
    """Samples the logits rows of a step's chunks and writes the new tokens into the slots."""

    def __init__(self, logits: F32Array, vocab_size: int, slots: Slots, kernels: str) -> None:
        rows = len(logits)
        self._slots = slots
        self._args = SampleArgs(
            logits,
            vocab_size,
            np.zeros(rows, SAMPLE_ROW),
            np.zeros(rows, np.int32),
            np.zeros(rows, np.float32),
            np.zeros((rows, MAX_TOP), np.int32),
            np.zeros((rows, MAX_TOP), np.float32),
            np.zeros(rows, np.uint8),
        )
        self._sample = registry.bind("sample", self._args, kernels=kernels)

    def sample(self, chunks: tuple[Chunk, ...]) -> tuple[ChunkResult, ...]:
        """One result per chunk, in order."""
        count = self._fill(chunks)
        if count:
            self._sample(count)
        results, row = [], 0
        for chunk in chunks:
            wanted = chunk.count - chunk.logits_from
            results.append(self._accept(chunk, row, wanted))
            row += wanted
        return tuple(results)

    def _fill(self, chunks: tuple[Chunk, ...]) -> int:
        slots, rows, row = self._slots, self._args.rows, 0
        for chunk in chunks:
            for offset in range(chunk.logits_from, chunk.count):
                rows[row] = slots.sampling[chunk.slot]
                record = rows[row]
                length = chunk.start + offset + 1
                generated = length - int(record["prompt_len"])
                banned = generated < slots.banned_until[chunk.slot]
                ids, values = (slots.banned_bias if banned else slots.bias)[chunk.slot]
                record["length"] = length
                record["num_bias"] = len(ids)
                record["bias_ids"], record["bias_values"] = ids.ctypes.data, values.ctypes.data
                row += 1
        return row

    def _accept(self, chunk: Chunk, row: int, wanted: int) -> ChunkResult:
        if not wanted:
            return ChunkResult(chunk.slot)
        args, accepted = self._args, 0
        first = chunk.start + chunk.logits_from + 1  # position of the first sampled token
        tokens = self._slots.tokens[chunk.slot]
        while finite := bool(args.finite[row + accepted]):
            accepted += 1
            if accepted == wanted or args.token[row + accepted - 1] != tokens[first + accepted - 1]:
                break
        sampled = args.token[row : row + accepted].tolist()
        tokens[first : first + accepted] = sampled
        if not finite:
            tokens[first + accepted] = 0  # whatever was sampled: a step in flight may feed it
        num_top = int(self._slots.sampling[chunk.slot]["logprobs"])
        if num_top < 0:
            return ChunkResult(chunk.slot, tuple(sampled), finite)
        span = slice(row, row + accepted)
        return ChunkResult(
            chunk.slot,
            tuple(sampled),
            finite,
            tuple(args.logprob[span].tolist()),
            _tuples(args.top_ids[span, :num_top]),
            _tuples(args.top_logprobs[span, :num_top]),
        )


def _tuples(rows: npt.NDArray[Any]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(row) for row in rows.tolist())
