"""The memory that kernels of the CPU take beside the buffers that they are given.

`plan` counts it before our extension is loaded, so the arithmetic of `cpu/stages.hpp` and `cpu/table.hpp` stands here
once more; `tests/kernels/cpu/test_scratch.py` holds the two together.
"""

from __future__ import annotations

from .ops import ATTEND_SPLIT

_TILE_ROWS = 6  # score rows of a query tile
_TILES_PER_THREAD = 16  # with fewer tiles, splits of the context are spread over the threads
_PARTIAL_EXTRA = 8  # floats of a partial result behind its output
_LANES = 16


def attend_scratch_bytes(
    num_heads: int, num_kv_heads: int, head_dim: int, max_positions: int, max_rows: int, threads: int
) -> int:
    """Bytes of the partial results of attention: one for each row, query head and split of the longest context.

    Only steps of few tiles have them, which bounds the rows.
    """
    heads_per_kv = num_heads // num_kv_heads
    head_chunks = -(-heads_per_kv // _TILE_ROWS)
    queries = _TILE_ROWS // -(-heads_per_kv // head_chunks)
    rows = _TILES_PER_THREAD * threads // (num_kv_heads * head_chunks) * queries
    splits = -(-max_positions // ATTEND_SPLIT)
    return 4 * min(rows, max_rows) * num_heads * splits * (head_dim + _PARTIAL_EXTRA)


def sample_scratch_bytes(vocab_size: int, threads: int) -> int:
    """Bytes that threads sample in: a score, an id and a count for each token of the vocabulary."""
    return threads * 3 * 4 * (-(-vocab_size // _LANES) * _LANES)
