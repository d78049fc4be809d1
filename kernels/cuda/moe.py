"""Mixture of experts as calls: routing, sorting rows by expert, the experts' linear layers, and their sum (moe.cuh)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

from . import pack
from .call import Call
from .linear import Addresses, Linear, kernel_group, mma_kernel, reduce_call, weight_arguments
from .linear_tiles import Tile, shared_bytes
from .source import Kernel
from .types import ELEMENTS

HEADER = "moe.cuh"
ROUTE_THREADS = COMBINE_THREADS = 128
GROUP_THREADS = 512
MAX_EXPERTS = 512
MAX_CHOICES = 32  # a lane of a warp holds each
SCORES = {"softmax": "Score::kSoftmax", "sigmoid": "Score::kSigmoid"}


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts are chosen.

    normalize  weights are divided by their sum;  scale: then multiplied with it
    """

    dtype: str
    experts: int
    choices: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0


def refusal(routing: Routing) -> str | None:
    """Why no kernel serves this routing, None if one does."""
    if not 0 < routing.experts <= MAX_EXPERTS:
        return f"{routing.experts} experts are more than {MAX_EXPERTS}"
    if not 0 < routing.choices <= min(MAX_CHOICES, routing.experts):
        return f"{routing.choices} experts per token: from 1 to {min(MAX_CHOICES, routing.experts)} are possible"
    return None


def max_tiles(routing: Routing, tokens: int, tile: Tile) -> int:
    """Tiles of rows that there can be at most: each expert's last may not be full."""
    pairs = tokens * routing.choices
    return pairs // tile.rows + min(routing.experts, pairs)


def route_kernel(routing: Routing) -> Kernel:
    return Kernel(HEADER, f"moe_route<{ELEMENTS[routing.dtype]}, {SCORES[routing.score]}>")


def group_kernel(tile: Tile) -> Kernel:
    return Kernel(HEADER, f"moe_group<{tile.rows}>")


def combine_kernel(dtype: str, *, add: bool) -> Kernel:
    return Kernel(HEADER, f"moe_combine<{ELEMENTS[dtype]}, {'true' if add else 'false'}>")


def route_call(routing: Routing, tokens: int, *, ids: int, weights: int, logits: int, bias: int = 0) -> Call:
    """ids int32 and weights float32 [tokens, choices] of logits [tokens, experts]; bias float32 [experts] or 0."""
    arguments = (
        _p(ids), _p(weights), _p(logits), _p(bias), _i(tokens), _i(routing.experts), _i(routing.choices),
        _i(routing.normalize), ctypes.c_float(routing.scale),
    )  # fmt: skip
    return Call(route_kernel(routing), (-(-tokens // 4), 1, 1), ROUTE_THREADS, 0, arguments)


def group_call(routing: Routing, tokens: int, tile: Tile, *, row_ids: int, tile_expert: int, ids: int) -> Call:
    """row_ids int32 [max_tiles, tile.rows] and tile_expert int32 [max_tiles]."""
    arguments = (
        _p(row_ids), _p(tile_expert), _p(ids),
        _i(tokens * routing.choices), _i(routing.experts), _i(max_tiles(routing, tokens, tile)),
    )  # fmt: skip
    return Call(group_kernel(tile), (1, 1, 1), GROUP_THREADS, 8 * routing.experts, arguments)


def experts_calls(
    layer: Linear,
    routing: Routing,
    tokens: int,
    at: Addresses,
    tile: Tile,
    *,
    row_ids: int,
    tile_expert: int,
    row_divisor: int,
    splits: int = 1,
    steps_per_split: int,
) -> list[Call]:
    """The layer of every expert, on its rows: y [tokens * choices, width].

    row_divisor  pairs that read one row of x: `choices` where x is the tokens', 1 where it is the pairs'
    The experts' packed weights lie one behind the other, as do their biases.
    """
    assert splits == 1 or at.sums, splits
    pairs, stride = tokens * routing.choices, pack.parts(layer.weight, layer.outputs, layer.inputs).num_bytes
    arguments = (
        _p(at.y), _p(at.sums), _p(at.x), *weight_arguments(layer, at.weight), _p(at.bias), _p(at.residual),
        _i(pairs), _i(layer.outputs), _i(layer.inputs), _i(layer.width), _i(steps_per_split),
        _p(row_ids), _p(tile_expert), _i(row_divisor), *(ctypes.c_int64(stride),) * 3,
    )  # fmt: skip
    grid = (-(-layer.panels // tile.panels), max_tiles(routing, tokens, tile), splits)
    shared = shared_bytes(tile, layer.weight, kernel_group(layer.weight), grouped=True)
    calls = [Call(mma_kernel(layer, tile, grouped=True), grid, tile.threads, shared, arguments)]
    if splits > 1:
        assert not at.bias, "the sum over splits does not know a row's expert"
        calls.append(reduce_call(layer, pairs, at, splits))
    return calls


def combine_call(
    dtype: str, tokens: int, choices: int, width: int, *, out: int, y: int, weights: int, residual: int = 0
) -> Call:
    """out [tokens, width] from y [tokens * choices, width]; `width` is even."""
    arguments = (_p(out), _p(y), _p(weights), _p(residual), _i(choices), _i(width))
    grid = (-(-width // 256), tokens, 1)
    return Call(combine_kernel(dtype, add=residual != 0), grid, COMBINE_THREADS, 0, arguments)


def _p(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def _i(value: int) -> ctypes.c_int32:
    return ctypes.c_int32(value)
