"""What a text comes to inside of a model: what attention sees, layer by layer, and what linears read.

The model runs op by op with a float32 cache, and stands still where a layer has stored its K and V.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...kernels.formats import KVFormat
from ...kernels.ops import ROWS, SEQS, F32Array, make_batch
from ..kv_groups import KVGroup
from ..load.packed import PackedModel
from ..models.decoder import Limits, Reader
from ..plan import Plan
from .cache import BlockShape, allocate

_BLOCK = 32


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One layer's: q [tokens, heads, head_dim]; k and v [kv_heads, tokens, head_dim]. Valid until the next layer."""

    q: F32Array
    k: F32Array
    v: F32Array

    @property
    def largest(self) -> F32Array:
        """[2, kv_heads]: the largest magnitude of K and of V."""
        return np.stack([np.abs(x).max(axis=(1, 2)) for x in (self.k, self.v)])


class LayerWatch:
    """A model that reads texts of at most `longest` tokens. For our own decoder, whose K and V have heads."""

    def __init__(self, model: PackedModel, plan: Plan, longest: int) -> None:
        spec = self._spec = model.spec
        layers = tuple(range(spec.num_layers))
        self._blocks = -(-longest // _BLOCK)
        shape = BlockShape(_BLOCK, spec.num_kv_heads, spec.head_dim, (KVFormat("f32"),) * len(layers))
        group = KVGroup(layers=layers, bytes_per_token=shape.offsets[-1] // _BLOCK, num_blocks=self._blocks)
        self._cache = allocate(0, group, shape, plan.kernels)
        self._batch = make_batch(longest, 1, 1, (np.arange(self._blocks, dtype=np.int32)[None],))
        limits = Limits(longest, 1, longest, plan.threads)
        self._decoder = model.build(self._batch, self._cache.layers, limits, plan.kernels)

    def readers(self, tokens: Sequence[int]) -> Iterator[Reader]:
        """Each linear of the layers when it is about to read what this text comes to there.

        Only the first rows of its Act, one for each token, are of this text, and only until the next.
        """
        self._begin(tokens)
        readers = {reader.op: reader for reader in self._decoder.readers}
        for index, op in enumerate(self._decoder.ops):
            if (reader := readers.get(index)) is not None:
                yield reader
            op.run()

    def read(self, tokens: Sequence[int]) -> Iterator[Seen]:
        """What each layer sees of this text, in their order."""
        spec, count, layer = self._spec, len(tokens), 0
        queries = self._decoder.queries
        assert queries is not None, "our own decoder has them"
        self._begin(tokens)
        stored = self._cache.arena.view(np.float32).reshape(self._blocks, spec.num_layers, spec.num_kv_heads, 2, -1)
        for op, kind in zip(self._decoder.ops, self._decoder.kinds, strict=True):
            op.run()
            if kind == "rope_store":
                halves = stored[:, layer].transpose(2, 1, 0, 3)  # [K and V, kv_heads, blocks, values]
                k = halves[0].reshape(spec.num_kv_heads, self._blocks, spec.head_dim, _BLOCK).transpose(0, 1, 3, 2)
                k, v = (x.reshape(spec.num_kv_heads, -1, spec.head_dim)[:, :count] for x in (k, halves[1]))
                q = queries[:count, : spec.num_heads * spec.head_dim].reshape(count, spec.num_heads, -1)
                yield Seen(q, k, v)
                layer += 1

    def _begin(self, tokens: Sequence[int]) -> None:
        batch, count = self._batch, len(tokens)
        batch.counts[[ROWS, SEQS]] = count, 1
        batch.token[:count], batch.position[:count], batch.seq_rows[0] = tokens, np.arange(count), count
