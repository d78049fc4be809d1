"""Our kernels as modules in a tree of transformers' modules: Linear, Embedding, and attention over the paged cache.

Each stands for one module, copies its inputs to buffers at fixed addresses, runs bound ops, and hands out a copy of
the results: modules keep the tensors they were given for as long as they like, and buffers are shared.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from ...kernels import registry
from ...kernels.formats import WeightFormat
from ...kernels.ops import (
    ROWS,
    Act,
    AttendArgs,
    Batch,
    EmbedArgs,
    F32Array,
    KVLayer,
    LinearArgs,
    PackedWeight,
    RopeStoreArgs,
    make_act,
    make_batch,
    make_rows,
)

_MOST = 1 << 22  # values in the output buffer of a module: 16 MiB


class Buffers:
    """The buffers that replaced modules share, by width, and a batch of their own.

    `batch` only counts rows: a module may be called with other rows than the step has (experts, chosen logits).
    """

    def __init__(self, max_rows: int, threads: int, kernels: str) -> None:
        self.max_rows, self.threads, self.kernels = max_rows, threads, kernels
        self.batch: Batch = make_batch(max_rows, 1, 1, ())
        self._acts: dict[tuple[int, WeightFormat | None], Act] = {}
        self._rows: dict[tuple[str, int], F32Array] = {}

    def act(self, width: int, format: WeightFormat | None) -> Act:
        """Activations that weights of this format read."""
        key = width, format
        if key not in self._acts:
            self._acts[key] = make_act(width, self.max_rows, self.threads, () if format is None else (format,))
        return self._acts[key]

    def rows(self, role: str, width: int) -> F32Array:
        """`max_rows` plain rows for one role."""
        return self._make(role, width, self.max_rows)

    def outputs(self, width: int) -> F32Array:
        """Plain rows for the results of one module at a time: `max_rows`, or fewer where they are very wide."""
        return self._make("outputs", width, max(1, min(self.max_rows, _MOST // width)))

    def _make(self, role: str, width: int, rows: int) -> F32Array:
        key = role, width
        if key not in self._rows:
            self._rows[key] = make_rows(width, rows)
        return self._rows[key]


class PackedLinear(nn.Module):
    """x @ weight.T + bias on a packed weight, for any number of rows."""

    def __init__(self, weight: PackedWeight, bias: F32Array | None, buffers: Buffers) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.k, weight.n
        act, out = buffers.act(weight.k, weight.format), buffers.outputs(weight.n)
        self._batch, self._max_rows = buffers.batch, len(out)
        padded = None if bias is None else np.pad(bias, (0, -len(bias) % 16))
        args = LinearArgs(buffers.batch, act, weight, padded, out, False, False)
        self._ops = registry.bind("linear", args, kernels=buffers.kernels)
        self._inputs, self._outputs = torch.from_numpy(act.values), torch.from_numpy(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        out = torch.empty((len(rows), self.out_features), dtype=x.dtype)
        for start in range(0, len(rows), self._max_rows):
            part = rows[start : start + self._max_rows]
            self._inputs[: len(part)] = part
            self._batch.counts[ROWS] = len(part)
            for op in self._ops:
                op.run()
            out[start : start + len(part)] = self._outputs[: len(part), : self.out_features]
        return out.reshape(*x.shape[:-1], self.out_features)


class PackedEmbedding(nn.Module):
    """Rows of a packed weight as float32, for any number of ids."""

    def __init__(self, weight: PackedWeight, buffers: Buffers) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = weight.n, weight.k
        out = buffers.outputs(weight.k)
        self._batch, self._max_rows = buffers.batch, len(out)
        self._ops = registry.bind("embed", EmbedArgs(buffers.batch, weight, out), kernels=buffers.kernels)
        self._tokens, self._outputs = torch.from_numpy(buffers.batch.token), torch.from_numpy(out)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        flat = ids.reshape(-1)
        out = torch.empty((len(flat), self.embedding_dim))
        for start in range(0, len(flat), self._max_rows):
            part = flat[start : start + self._max_rows]
            self._tokens[: len(part)] = part
            self._batch.counts[ROWS] = len(part)
            for op in self._ops:
                op.run()
            out[start : start + len(part)] = self._outputs[: len(part), : self.embedding_dim]
        return out.reshape(*ids.shape, self.embedding_dim)


class PagedAttention:
    """One layer's attention for the rows of the step's batch. Queries and keys come rotated already.

    K and V are stored in the cache first and read only from there, as stored, like in our own decoder.
    """

    def __init__(
        self,
        batch: Batch,
        kv: KVLayer,
        num_heads: int,
        scale: float,
        window: int,
        max_positions: int,
        buffers: Buffers,
        compute: str = "",
    ) -> None:
        width, kv_width = num_heads * kv.head_dim, kv.num_kv_heads * kv.head_dim
        q, k, v = buffers.rows("query", width), buffers.rows("key", kv_width), buffers.rows("value", kv_width)
        mixed = buffers.act(width, None)
        store = RopeStoreArgs(batch, q, k, v, None, None, 1.0, None, None, num_heads, scale, kv)
        attend = AttendArgs(batch, q, num_heads, kv, window, max_positions, mixed, compute=compute)
        self._ops = (
            *registry.bind("rope_store", store, kernels=buffers.kernels),
            *registry.bind("attend", attend, kernels=buffers.kernels),
        )
        self._batch, self._shape = batch, (num_heads, kv.head_dim)
        self._inputs = tuple(torch.from_numpy(rows) for rows in (q, k, v))
        self._mixed = torch.from_numpy(mixed.values)

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[1, rows, heads, head_dim] from query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, ...]."""
        rows = query.shape[2]
        assert rows == int(self._batch.counts[ROWS]), (rows, int(self._batch.counts[ROWS]))
        for given, buffer in zip((query, key, value), self._inputs, strict=True):
            flat = given[0].transpose(0, 1).reshape(rows, -1)
            buffer[:rows, : flat.shape[1]] = flat
        for op in self._ops:
            op.run()
        return self._mixed[:rows].reshape(1, rows, *self._shape).to(query.dtype, copy=True)
