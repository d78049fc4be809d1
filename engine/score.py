"""Logits and hidden states of given tokens: what a model makes of a text, by the same kernels and steps that generate.

Every token is known beforehand, so a Step names them all and nothing is sampled. By the engine's promise the size of
the steps does not show in the logits, and those of a prompt and its answer are those that made the answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from ..kernels.errors import CapacityError, UsageError
from ..kernels.ops import F32Array
from .config import NO_SPECULATION, EngineConfig
from .load.packed import PackedModel
from .plan import resolve
from .pools import blocks_for
from .runner.runner import Runner
from .schedule.step import Admit, Chunk, SlotSampling, Step, TableDelta

ROWS = 128  # positions computed in one step
_UNSAMPLED = SlotSampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, -1)


class Scorer:
    """A model with a cache for one text of at most `max_tokens` tokens. Not thread-safe."""

    def __init__(self, model: PackedModel, max_tokens: int, config: EngineConfig) -> None:
        """`config` says with which kernels, threads and KV format; its sizes are not used."""
        blocks = blocks_for(max_tokens, config.block_size)
        sized = msgspec.structs.replace(
            config,
            max_model_len=max_tokens,
            max_num_seqs=ROWS,
            max_num_batched_tokens=ROWS,
            num_gpu_blocks_override=blocks,
            kv_cache_memory_bytes=0,
            async_depth=1,
            device="cpu",
            swap_space=0.0,
            preemption_mode="auto",
            speculative_config=NO_SPECULATION,
        )
        self.max_tokens = max_tokens
        self._vocab_size = model.spec.vocab_size
        self._hidden_size, self._norm_eps = model.spec.hidden_size, model.spec.norm_eps
        self._norm = model.vectors["model.norm.weight"]
        self._table = TableDelta(0, 0, tuple(range(blocks)))
        self._runner = Runner(model, resolve(sized, model, split_windows=False)[0])

    def logits(self, tokens: Sequence[int]) -> F32Array:
        """[len(tokens), vocabulary]: row i is about what follows tokens[: i + 1].

        CapacityError for more than `max_tokens` of them, UsageError for none or for one outside the vocabulary.
        """
        out = np.empty((self._checked(tokens), self._vocab_size), np.float32)
        for start, logits in self._steps(tokens, with_logits=True):
            out[start : start + len(logits)] = logits[:, : self._vocab_size]
        return out

    def hidden_states(self, tokens: Sequence[int]) -> F32Array:
        """[len(tokens), hidden size]: the last hidden state at each position, after the final norm.

        That is what the head reads, and transformers' `last_hidden_state`. The norm is computed here in float32: what
        the kernels hand to a quantized head is rounded besides. Errors as for `logits`.
        """
        out = np.empty((self._checked(tokens), self._hidden_size), np.float32)
        for start, _ in self._steps(tokens, with_logits=False):
            rows = out[start : start + ROWS]
            rows[:] = self._runner.decoder.hidden[: len(rows), : self._hidden_size]
            rows *= self._norm[: self._hidden_size] / np.sqrt(np.mean(rows**2, axis=1, keepdims=True) + self._norm_eps)
        return out

    def _checked(self, tokens: Sequence[int]) -> int:
        count = len(tokens)
        if count > self.max_tokens:
            raise CapacityError(f"{count} tokens to score, there is room for {self.max_tokens}")
        if not count or not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            raise UsageError(f"{count} tokens to score, all of which must be from 0 to {self._vocab_size - 1}")
        return count

    def _steps(self, tokens: Sequence[int], *, with_logits: bool) -> Iterator[tuple[int, F32Array]]:
        """Compute all positions, a step at a time: (the step's first position, the logits of its rows if wanted)."""
        count = len(tokens)
        admit = Admit(0, np.asarray(tokens, "<i4").tobytes(), count, _UNSAMPLED)
        self._runner.forward(Step(0, drop=(0,), admit=(admit,), tables=(self._table,)))
        for start in range(0, count, ROWS):
            rows = min(ROWS, count - start)
            yield start, self._runner.forward(Step(0, chunks=(Chunk(0, start, rows, 0 if with_logits else rows),)))
