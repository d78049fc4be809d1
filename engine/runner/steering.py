"""Where the errors of an 8-bit K cache go: each layer's `KeySteering`, found from a probe text.

Attention sees K only through queries. Rounding K leaves an error vector e per token, and a query q notices q . e: on
average over queries e^T M e, with M the second moment of the queries that attend to the token. M is far from a multiple
of one: queries share a few directions. Rounding one pair of dimensions after another, and letting each make good what
the earlier ones did wrong as far as M can tell, leaves a fraction of the error of rounding to nearest, at the same
bytes and with nothing to do for readers. It is the error feedback of GPTQ, with keys for weights.

M is taken in the frame of the token: queries are turned back by the token's own rotation, so that only distances count
and one matrix serves all positions. Each pair of query and token weighs as its error does in the output of attention:
weight^2 |v - output|^2. Pairs with large values come first: their steps are the coarse ones of a float format, and
small values behind them have the fine steps to make them good.

The text is fixed, so a steering is a function of the weights and the kernels; it is kept beside the packed weights.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from ...kernels import registry
from ...kernels.formats import KVFormat
from ...kernels.ops import ROWS, SEQS, F32Array, KeySteering, make_batch, steering_width
from ..load.model import Model
from ..models.arch import DecoderSpec
from ..models.decoder import Limits
from ..models.rope import rope_tables
from ..plan import Plan
from ..tokenizer import Tokenizer
from .cache import KVGroup, allocate
from .probe_text import PROBE_TEXT

log = logging.getLogger(__name__)

VERSION = 1
PROBE_TOKENS = 512
_EVERY = 8  # tokens of the probe of which one is looked at
_FLOOR = 0.1  # of M's mean, added to its diagonal: what queries of other texts may look for besides
_BLOCK = 32

_F64 = npt.NDArray[np.float64]


def key_steerings(model: Model, plan: Plan) -> dict[int, KeySteering]:
    """The steering of each layer, from beside the packed weights or made now; none if the plan has no use for it.

    Only our own decoder is steered: of transformers' modules nobody knows where they rotate.
    """
    if KVFormat(plan.kv_format).bytes_per_value > 1 or model.implementation != "llmctl":
        return {}
    spec = model.spec
    made_with = VERSION, PROBE_TOKENS, PROBE_TEXT, plan.isa, plan.bits, registry.build_id()
    key = hashlib.sha256(msgspec.json.encode(made_with)).hexdigest()[:16]
    path = model.folder / f"steering-{key}.npz"
    found = _read(path, spec)
    if found is None:
        log.info("%s: looking where queries look, for the 8-bit KV cache", model.name)
        found = _measure(model, plan)
        _keep(path, found)
    return found


def _read(path: Path, spec: DecoderSpec) -> dict[int, KeySteering] | None:
    """What `_keep` left, None if it did not or it is not whole."""
    if not path.exists():
        return None
    half = spec.head_dim // 2
    try:
        with np.load(path) as file:
            orders, follows = file["orders"], file["follows"]
    except (OSError, ValueError, KeyError, EOFError) as error:
        log.warning("%s is made anew: %s", path, error)
        return None
    shape = spec.num_layers, spec.num_kv_heads, half
    if orders.shape != shape or follows.shape != (*shape, 4, steering_width(spec.head_dim)):
        log.warning("%s is made anew: it has the shapes %s and %s", path, orders.shape, follows.shape)
        return None
    return {
        layer: KeySteering(np.ascontiguousarray(order, np.int32), follow.astype(np.float32))
        for layer, (order, follow) in enumerate(zip(orders, follows, strict=True))
    }


def _keep(path: Path, steerings: Mapping[int, KeySteering]) -> None:
    """Write them beside the weights for the next start; a folder that cannot be written to is left alone."""
    data = io.BytesIO()
    layers = range(len(steerings))
    np.savez(
        data,
        orders=np.stack([steerings[layer].order for layer in layers]),
        follows=np.stack([steerings[layer].follow for layer in layers]).astype(np.float16),
    )
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".steering-", delete=False) as file:
            file.write(data.getvalue())
        os.replace(file.name, path)
    except OSError as error:
        log.warning("the steering of the KV cache is made at every start: cannot write %s: %s", path, error)


def _measure(model: Model, plan: Plan) -> dict[int, KeySteering]:
    """Run the probe text, op by op, and look at each layer's queries, K and V."""
    spec = model.spec
    tokens = Tokenizer(model.folder).encode(PROBE_TEXT)[: min(PROBE_TOKENS, spec.context_length)]
    count = len(tokens)
    layers = tuple(range(spec.num_layers))
    group = KVGroup(
        "full", layers, _BLOCK, spec.num_kv_heads, spec.head_dim, (KVFormat("f32"),) * len(layers)
    )  # fmt: skip
    blocks = -(-count // _BLOCK)
    cache = allocate(0, group, blocks, plan.kernels)
    batch = make_batch(count, 1, 1, (np.arange(blocks, dtype=np.int32)[None],))
    batch.counts[[ROWS, SEQS]] = count, 1
    batch.token[:], batch.position[:], batch.seq_rows[0] = tokens, np.arange(count), count
    decoder = model.build(batch, cache.layers, Limits(count, 1, count, plan.threads), plan.kernels)
    assert decoder.queries is not None, "our own decoder has them"
    found: dict[int, KeySteering] = {}
    for op, kind in zip(decoder.ops, decoder.kinds, strict=True):
        op.run()
        if kind == "rope_store":
            layer = len(found)
            stored = cache.arena.view(np.float32).reshape(blocks, spec.num_layers, spec.num_kv_heads, 2, -1)[:, layer]
            k = stored[:, :, 0].reshape(blocks, spec.num_kv_heads, spec.head_dim, _BLOCK).transpose(1, 0, 3, 2)
            v = stored[:, :, 1].reshape(blocks, spec.num_kv_heads, _BLOCK, spec.head_dim).transpose(1, 0, 2, 3)
            k, v = (x.reshape(spec.num_kv_heads, -1, spec.head_dim)[:, :count] for x in (k, v))
            q = decoder.queries[:count, : spec.num_heads * spec.head_dim]
            cos, sin = rope_tables(spec.rope_of(layer), spec.head_dim, count)
            found[layer] = _steering(q.reshape(count, spec.num_heads, -1), k, v, cos, sin, spec.window(layer))
    return found


def _steering(q: F32Array, k: F32Array, v: F32Array, cos: F32Array, sin: F32Array, window: int) -> KeySteering:
    """From a layer's queries [tokens, heads, head_dim], K and V [kv_heads, tokens, head_dim] of one sequence."""
    kv_heads, _, head_dim = k.shape
    per_kv = q.shape[1] // kv_heads
    orders, follows = [], []
    for head in range(kv_heads):
        queries = q[:, head * per_kv : (head + 1) * per_kv].transpose(1, 0, 2)
        energy = (k[head].astype(np.float64) ** 2).mean(axis=0)
        order = np.argsort(-(energy[: head_dim // 2] + energy[head_dim // 2 :]), kind="stable")
        seen = _second_moment(queries, k[head], v[head], cos, sin, window)
        orders.append(order.astype(np.int32))
        follows.append(_feedback(seen, order))
    return KeySteering(np.stack(orders), np.stack(follows))


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


def _feedback(seen: _F64, order: npt.NDArray[np.intp]) -> F32Array:
    """`KeySteering.follow` of one head: M = B^T D B, with D in blocks of a pair and B a unit triangle of such blocks.

    Then e^T M e is the sum over pairs of (B e)_i^T D_i (B e)_i, and pair i has to make good what B has of the pairs
    before it. Rounded to float16, so that the order in which a library sums does not show.
    """
    half, head_dim = len(order), len(seen)
    places = np.stack([order, order + half], axis=1).reshape(-1)
    moment = seen[np.ix_(places, places)]
    mean = np.trace(moment) / head_dim
    moment += (_FLOOR * mean if mean > 0 else 1.0) * np.eye(head_dim)
    upper = np.linalg.cholesky(moment[::-1, ::-1])[::-1, ::-1]
    lower = (upper / np.diagonal(upper)).T
    lower[1::2] -= lower[1::2, 0::2][np.arange(half), np.arange(half), None] * lower[0::2]
    follow = np.zeros((half, 4, steering_width(head_dim)), np.float32)
    for target in (0, 1):
        for source in (0, 1):
            follow[:, 2 * target + source, :half] = np.triu(lower[target::2, source::2].T, 1)
    return follow.astype(np.float16).astype(np.float32)
