"""One token for each logits row: penalties, bias, temperature, truncation, then the largest score with Gumbel noise.

In numpy, with full sorts. Scores are float32, sums and noise float64. What the order in `SampleArgs` leaves open:
- A truncation keeps a prefix of the order (score descending, id ascending). Top-p keeps the shortest prefix whose
  share of the probability kept by top-k reaches p; min-p keeps scores of at least the largest plus log(min_p).
- A row that is not finite gets token -1 and logprob 0; unused top entries get id -1 and -inf.
- Tokens outside the vocabulary are ignored in penalties and biases. If every token is banned, the lowest id is taken.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..ops import MAX_TOP, F32Array, I32Array, SampleArgs
from .philox import gumbel, token_words

BoolArray = npt.NDArray[np.bool_]
Record = np.void  # one SAMPLE_ROW


@dataclass(frozen=True, slots=True)
class Sample:
    args: SampleArgs

    def __call__(self, rows: int) -> None:
        for row in range(rows):
            self._sample(row)

    def _sample(self, row: int) -> None:
        args = self.args
        params: Record = args.rows[row]
        logits = args.logits[row, : args.vocab_size]
        args.token[row], args.logprob[row] = -1, 0
        args.top_ids[row], args.top_logprobs[row] = -1, -np.inf
        args.finite[row] = np.isfinite(logits).all()
        if not args.finite[row]:
            return
        scores = adjusted(logits, params)
        if params["temperature"] == 0:
            token = int(np.argmax(scores))
        else:
            scores = scores / params["temperature"]
            kept = truncated(scores, int(params["top_k"]), float(params["top_p"]), float(params["min_p"]))
            noise = gumbel(token_words(int(params["seed"]), int(params["length"]), args.vocab_size))
            token = int(np.argmax(np.where(kept, scores.astype(np.float64) + noise, -np.inf)))
        args.token[row] = token
        wanted = int(params["logprobs"])
        if wanted >= 0:
            logprobs = log_softmax(logits)
            args.logprob[row] = logprobs[token]
            best = _descending(logits)[: min(wanted, MAX_TOP)]
            args.top_ids[row, : len(best)], args.top_logprobs[row, : len(best)] = best, logprobs[best]


def log_softmax(logits: F32Array) -> npt.NDArray[np.float64]:
    """Natural-log probabilities."""
    shifted = logits.astype(np.float64) - logits.max()
    logprobs: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return logprobs


def adjusted(logits: F32Array, params: Record) -> F32Array:
    """Scores after penalties and bias, in float32."""
    scores = logits.copy()
    tokens = _int32_at(int(params["tokens"]), int(params["length"]))
    output = tokens[int(params["prompt_len"]) :]
    seen = np.unique(tokens[(tokens >= 0) & (tokens < len(scores))])
    repetition = params["repetition_penalty"]
    scores[seen] = np.where(scores[seen] > 0, scores[seen] / repetition, scores[seen] * repetition)
    used, counts = np.unique(output[(output >= 0) & (output < len(scores))], return_counts=True)
    scores[used] -= params["frequency_penalty"] * counts.astype(np.float32)
    scores[used] -= params["presence_penalty"]
    ids = _int32_at(int(params["bias_ids"]), int(params["num_bias"]))
    values = _int32_at(int(params["bias_values"]), int(params["num_bias"])).view(np.float32)
    for token, value in zip(ids, values):
        if 0 <= token < len(scores):
            scores[token] += value
    return scores


def truncated(scores: F32Array, top_k: int, top_p: float, min_p: float) -> BoolArray:
    """Which tokens may be sampled: top-k, then top-p of the rest, then min-p."""
    order = _descending(scores)
    if 0 < top_k < len(order):
        order = order[:top_k]
    largest = scores[order[0]]
    if top_p < 1 and np.isfinite(largest):
        mass = np.cumsum(np.exp(scores[order].astype(np.float64) - largest))
        order = order[: int(np.searchsorted(mass, top_p * mass[-1])) + 1]
    kept: BoolArray = np.zeros(len(scores), np.bool_)
    kept[order] = True
    if min_p > 0:
        kept &= scores >= largest + np.float32(np.log(np.float32(min_p)))
    return kept


def _descending(scores: F32Array) -> I32Array:
    """Ids by descending score, ties by ascending id."""
    order: I32Array = np.argsort(-scores, kind="stable").astype(np.int32)
    return order


def _int32_at(address: int, count: int) -> I32Array:
    """A view of int32 memory that the caller keeps alive."""
    if count == 0:
        return np.zeros(0, np.int32)
    return np.frombuffer(memoryview((ctypes.c_int32 * count).from_address(address)), np.int32)


def build(args: SampleArgs) -> Sample:
    """A sampler for these buffers."""
    return Sample(args)
