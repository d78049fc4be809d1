"""Logits of given tokens: what a model makes of a text, by the same kernels and steps that generate.

Every token is known beforehand, so a Step names them all and nothing is sampled. By the engine's promise the size of
the steps does not show in the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from ..kernels.errors import CapacityError, UsageError
from ..kernels.ops import F32Array
from .budget import blocks_for
from .config import EngineConfig
from .load.packed import PackedModel
from .plan import resolve
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
        )
        self.max_tokens = max_tokens
        self._vocab_size = model.spec.vocab_size
        self._table = TableDelta(0, 0, tuple(range(blocks)))
        self._runner = Runner(model, resolve(sized, model)[0])

    def logits(self, tokens: Sequence[int]) -> F32Array:
        """[len(tokens), vocabulary]: row i is about what follows tokens[: i + 1].

        CapacityError for more than `max_tokens` of them, UsageError for none or for one outside the vocabulary.
        """
        count = len(tokens)
        if count > self.max_tokens:
            raise CapacityError(f"{count} tokens to score, there is room for {self.max_tokens}")
        if not count or not 0 <= min(tokens) <= max(tokens) < self._vocab_size:
            raise UsageError(f"{count} tokens to score, all of which must be from 0 to {self._vocab_size - 1}")
        out = np.empty((count, self._vocab_size), np.float32)
        admit = Admit(0, np.asarray(tokens, "<i4").tobytes(), count, _UNSAMPLED)
        self._runner.forward(Step(0, drop=(0,), admit=(admit,), tables=(self._table,)))
        for start in range(0, count, ROWS):
            rows = min(ROWS, count - start)
            found = self._runner.forward(Step(0, chunks=(Chunk(0, start, rows, 0),)))
            out[start : start + rows] = found[:, : self._vocab_size]
        return out
