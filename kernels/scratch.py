"""The memory that kernels of the CPU take beside the buffers that they are given.

`plan` counts it before any op is built, so the arithmetic of `cpu/stages.hpp`, `cpu/latent_stages.hpp`,
`cpu/screen_stages.hpp` and `cpu/table.hpp` stands here once more; `tests/kernels/test_scratch.py` and `test_screen.py`
hold the two together.
"""

from __future__ import annotations

from .ops import ATTEND_SPLIT, PANEL

_TILE_ROWS = 6  # score rows of a query tile
_TILES_PER_THREAD = 16  # with fewer tiles, splits of the context are spread over the threads
_PARTIAL_EXTRA = 8  # floats of a partial result behind its output
_LANES = 16
_LATENT_HEADS = 16  # heads that are lanes together
_LATENT_ROWS = 4  # rows that pass over the context together
_LATENT_TASKS_PER_THREAD = 4
_MOST_SCREENED_ROWS = 128
_LEAST_GROUP = 32
_COARSE_ROWS = 4
_COARSE_GROUP = 352  # bytes of a group of a panel
_MOST_LATENT_PARTIALS = 4 << 20  # floats, where one row does not need more


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


def latent_scratch_bytes(
    num_heads: int, rank: int, rope_dim: int, max_positions: int, max_rows: int, threads: int
) -> int:
    """Bytes of the queries of all rows, brought to where latents are, and of partial results as above."""
    chunks = -(-num_heads // _LATENT_HEADS)
    queries = max_rows * chunks * _LATENT_HEADS * (rank + rope_dim)
    one = num_heads * -(-max_positions // ATTEND_SPLIT) * (rank + _PARTIAL_EXTRA)
    rows = min(max_rows, _LATENT_TASKS_PER_THREAD * threads * _LATENT_ROWS // chunks + 1)
    return 4 * (queries + min(rows * one, max(one, _MOST_LATENT_PARTIALS)))


def sample_scratch_bytes(vocab_size: int, threads: int) -> int:
    """Bytes that threads sample in: a score, an id and a count for each token of the vocabulary."""
    return threads * 3 * 4 * (-(-vocab_size // _LANES) * _LANES)


def screen_scratch_bytes(vocab_size: int, hidden_size: int, logit_rows: int) -> int:
    """Bytes of a screened head: the upper bits of its weights, their lengths, a bound for each panel and row, rows."""
    panels, rows, groups = -(-vocab_size // PANEL), min(logit_rows, _MOST_SCREENED_ROWS), hidden_size // _LEAST_GROUP
    coarse = groups * (panels * _COARSE_GROUP + _COARSE_ROWS * (2 * _LEAST_GROUP + 12))
    return coarse + 4 * panels * (PANEL + rows) + rows * (hidden_size + 8 * groups + 8)
