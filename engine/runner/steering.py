"""Where the errors of an 8-bit K cache go: a layer's `KeySteering`, found from what its queries looked for in a text.

Attention sees K only through queries. Rounding K leaves an error vector e per token, and a query q notices q . e: on
average over queries e^T M e, with M the second moment of the queries that attend to the token. M is far from a multiple
of one: queries share a few directions. Rounding one pair of dimensions after another, and letting each make good what
the earlier ones did wrong as far as M can tell, leaves a fraction of the error of rounding to nearest, at the same
bytes and with nothing to do for readers. It is the error feedback of GPTQ, with keys for weights.

M is taken in the frame of the token: queries are turned back by the token's own rotation, so that only distances count
and one matrix serves all positions. Each pair of query and token weighs as its error does in the output of attention:
weight^2 |v - output|^2. Pairs with large values come first: their steps are the coarse ones of a float format, and
small values behind them have the fine steps to make them good. All this is of K as it is stored: `levels.py` comes
first, for what is large in K whatever the token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...kernels.ops import F32Array, KeySteering, steering_width
from .levels import as_pairs, find_centre, find_levels

_EVERY = 8  # tokens of the text of which one is looked at
_FLOOR = 0.1  # of M's mean, added to its diagonal: what queries of other texts may look for besides

_LARGEST_FOLLOW = float(np.finfo(np.float16).max)

_F64 = npt.NDArray[np.float64]


def find_steering(q: F32Array, k: F32Array, v: F32Array, cos: F32Array, sin: F32Array, window: int) -> KeySteering:
    """From a layer's queries [tokens, heads, head_dim], K and V [kv_heads, tokens, head_dim] of one sequence.

    All as attention reads them: queries and K rotated, queries scaled. `cos` and `sin` may be of more positions, for
    which centres and levels are found as well.
    """
    kv_heads, tokens, head_dim = k.shape
    per_kv, half = q.shape[1] // kv_heads, head_dim // 2
    turns = cos.astype(np.float64) + 1j * sin
    stretch = np.float32(cos[0, 0] ** 2 + sin[0, 0] ** 2)  # what turning back and forth comes to; not 1 with YaRN
    orders, follows, levels, centres = [], [], [], []
    for head in range(kv_heads):
        queries = q[:, head * per_kv : (head + 1) * per_kv].transpose(1, 0, 2)
        seen = _second_moment(queries, k[head], v[head], cos, sin, window)
        unturned = as_pairs(k[head]) * turns[:tokens].conj() / stretch
        mean = find_centre(unturned, turns)
        level, centre = find_levels(unturned, turns, mean), np.concatenate([mean.real, mean.imag]).astype(np.float32)
        both = np.tile(level, 2)
        energy = ((k[head] - centre).astype(np.float64) ** 2).mean(axis=0)
        order = np.argsort(-(energy[:half] + energy[half:]), kind="stable")
        orders.append(order.astype(np.int32))
        follows.append(_feedback(_raised(seen) * np.outer(both, both), order))
        levels.append(level)
        centres.append(centre)
    return KeySteering(np.stack(orders), np.stack(follows) / stretch, np.stack(levels), np.stack(centres))


def _second_moment(queries: F32Array, k: F32Array, v: F32Array, cos: F32Array, sin: F32Array, window: int) -> _F64:
    """M of one KV head, [head_dim, head_dim]: of its queries [heads, tokens, head_dim] as its tokens see them."""
    tokens, head_dim = k.shape
    scores = queries @ k.T
    ages = np.arange(tokens)[:, None] - np.arange(tokens)[None, :]
    scores[:, (ages < 0) | (ages >= (window or tokens))] = -np.inf
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    outputs = weights @ v
    far = (v**2).sum(axis=1) + (outputs**2).sum(axis=2)[:, :, None] - 2 * (outputs @ v.T)
    weigh = weights * np.sqrt(np.maximum(far, 0))
    total = np.zeros((head_dim, head_dim))
    for token in (0, *range(_EVERY // 2, tokens - 1, _EVERY)):
        seen = (queries[:, token:] * weigh[:, token:, token, None]).reshape(-1, head_dim)
        times = _EVERY if token else 1  # the first token, which many heads look at most, stands for itself
        total += times * _turned_back((seen.T @ seen).astype(np.float64), cos[token], sin[token])
    return total


def _turned_back(moment: _F64, cos: F32Array, sin: F32Array) -> _F64:
    """The second moment of vectors turned back by a rotation, from that of the vectors."""
    half = len(cos)
    for _ in range(2):  # the rows, then, transposed, the columns
        a, b = moment[:half], moment[half:]
        c, s = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
        moment = np.concatenate([a * c + b * s, b * c - a * s]).T
    return moment


def _raised(seen: _F64) -> _F64:
    """M with more on its diagonal, so that there is something in every direction."""
    mean = np.trace(seen) / len(seen)
    return seen + (_FLOOR * mean if mean > 0 else 1.0) * np.eye(len(seen))


def _feedback(seen: _F64, order: npt.NDArray[np.intp]) -> F32Array:
    """`KeySteering.follow` of one head: M = B^T D B, with D in blocks of a pair and B a unit triangle of such blocks.

    Then e^T M e is the sum over pairs of (B e)_i^T D_i (B e)_i, and pair i has to make good what B has of the pairs
    before it. Rounded to float16, so that the order in which a library sums does not show. All 0, which is rounding to
    the nearest, where K or queries are so large or small that this has no answer in numbers.
    """
    half, head_dim = len(order), len(seen)
    places = np.stack([order, order + half], axis=1).reshape(-1)
    moment = seen[np.ix_(places, places)]
    follow = np.zeros((half, 4, steering_width(head_dim)), np.float32)
    try:
        upper = np.linalg.cholesky(moment[::-1, ::-1])[::-1, ::-1]
    except np.linalg.LinAlgError:
        return follow
    lower = (upper / np.diagonal(upper)).T
    lower[1::2] -= lower[1::2, 0::2][np.arange(half), np.arange(half), None] * lower[0::2]
    if not np.abs(lower).max() <= _LARGEST_FOLLOW:
        return follow
    for target in (0, 1):
        for source in (0, 1):
            follow[:, 2 * target + source, :half] = np.triu(lower[target::2, source::2].T, 1)
    return follow.astype(np.float16).astype(np.float32)
