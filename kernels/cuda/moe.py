"""Mixture of experts as calls: routing, sorting rows by expert, the experts' linear layers, and their sum (moe.cuh)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..formats import WeightFormat
from . import pack
from .arguments import f32, i32, i64, ptr
from .call import Call
from .linear import (
    FMA_PANELS,
    FMA_ROWS,
    FMA_SHARED,
    FMA_THREADS,
    Addresses,
    Linear,
    fma_kernel,
    kernel_group,
    mma_kernel,
    reduce_call,
    weight_arguments,
)
from .linear_tiles import Tile, shared_bytes, tiles_of
from .source import Kernel
from .types import ELEMENTS

HEADER = "moe.cuh"
ROUTE_THREADS = COMBINE_THREADS = 128
GROUP_THREADS = 512
MAX_EXPERTS = 512
TILE_ROWS = (16, 32, 64, 128)
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
    score: str = "softmax"  # a key of SCORES
    normalize: bool = True
    scale: float = 1.0


def refusal(routing: Routing) -> str | None:
    """Why no kernel serves this routing, None if one does."""
    if routing.score not in SCORES:
        return f"scores by {routing.score}; {', '.join(SCORES)} are known"
    if not 0 < routing.experts <= MAX_EXPERTS:
        return f"{routing.experts} experts are more than {MAX_EXPERTS}"
    if not 0 < routing.choices <= min(MAX_CHOICES, routing.experts):
        return f"{routing.choices} experts per token: from 1 to {min(MAX_CHOICES, routing.experts)} are possible"
    return None


def max_tiles(routing: Routing, tokens: int, tile_rows: int) -> int:
    """Tiles of rows that there can be at most: each expert's last may not be full."""
    pairs = tokens * routing.choices
    return pairs // tile_rows + min(routing.experts, pairs)


def choose_rows(
    routing: Routing, tokens: int, weights: Sequence[WeightFormat], shared_limit: int, most: int = 4
) -> int:
    """Rows of a tile: enough for those that an expert has on average, where one of the first `most` tiles that fit has.

    Tiles share one arithmetic, so a token's bits do not depend on the choice.
    """
    if routing.dtype == "f32":
        return FMA_ROWS
    rows = TILE_ROWS[0]
    mean = -(-tokens * routing.choices // routing.experts)
    for place, larger in enumerate(TILE_ROWS[1:most], 1):
        tiles = [(tiles_of(weight)[place], weight) for weight in weights]
        room = max(shared_bytes(tile, weight, kernel_group(weight), grouped=True) for tile, weight in tiles)
        if rows >= mean or room > shared_limit:
            break
        rows = larger
    return rows


def tile_of(weight: WeightFormat, rows: int) -> Tile:
    """The tile with so many rows that a weight of this format is multiplied with on tensor cores."""
    return next(tile for tile in tiles_of(weight) if tile.rows == rows)


def route_kernel(routing: Routing) -> Kernel:
    return Kernel(HEADER, f"moe_route<{ELEMENTS[routing.dtype]}, {SCORES[routing.score]}>")


def group_kernel(tile_rows: int) -> Kernel:
    return Kernel(HEADER, f"moe_group<{tile_rows}>")


def combine_kernel(dtype: str, *, add: bool) -> Kernel:
    return Kernel(HEADER, f"moe_combine<{ELEMENTS[dtype]}, {'true' if add else 'false'}>")


def route_call(
    routing: Routing, tokens: int, *, ids: int, weights: int, logits: int, count: int, bias: int = 0
) -> Call:
    """ids int32 and weights float32 [tokens, choices] of logits [tokens, experts]; bias float32 [experts] or 0.

    `count`, here and below, is the address of an int32: how many tokens there are, at most `tokens`.
    """
    arguments = (
        ptr(ids), ptr(weights), ptr(logits), ptr(bias), ptr(count), i32(routing.experts), i32(routing.choices),
        i32(routing.normalize), f32(routing.scale),
    )  # fmt: skip
    return Call(route_kernel(routing), (-(-tokens // 4), 1, 1), ROUTE_THREADS, 0, arguments)


def group_call(
    routing: Routing, tokens: int, tile_rows: int, *, row_ids: int, tile_expert: int, ids: int, count: int
) -> Call:
    """row_ids int32 [max_tiles, tile_rows] and tile_expert int32 [max_tiles]."""
    arguments = (
        ptr(row_ids), ptr(tile_expert), ptr(ids), ptr(count),
        i32(routing.choices), i32(routing.experts), i32(max_tiles(routing, tokens, tile_rows)),
    )  # fmt: skip
    return Call(group_kernel(tile_rows), (1, 1, 1), GROUP_THREADS, 8 * routing.experts, arguments)


def experts_calls(
    layer: Linear,
    routing: Routing,
    tokens: int,
    at: Addresses,
    tile_rows: int,
    *,
    row_ids: int,
    tile_expert: int,
    row_divisor: int,
    splits: int = 1,
    steps_per_split: int = 1 << 24,
) -> list[Call]:
    """The layer of every expert, on its rows: y [tokens * choices, width].

    row_divisor  pairs that read one row of x: `choices` where x is the tokens', 1 where it is the pairs'
    The experts' packed weights lie one behind the other, as do their biases.
    """
    assert splits == 1 or at.sums, splits
    pairs, stride = tokens * routing.choices, pack.parts(layer.weight, layer.outputs, layer.inputs).num_bytes
    sizes = i32(pairs), i32(layer.outputs), i32(layer.inputs), i32(layer.width)
    grouped = ptr(row_ids), ptr(tile_expert), i32(row_divisor), *(i64(stride),) * 3
    weight, ends = weight_arguments(layer, at.weight), (ptr(at.bias), ptr(at.residual))
    tiles = max_tiles(routing, tokens, tile_rows)
    if layer.dtype == "f32":
        assert splits == 1 and tile_rows == FMA_ROWS, (splits, tile_rows)
        grid = (-(-layer.panels // FMA_PANELS), tiles, 1)
        plain = (ptr(at.y), ptr(at.x), *weight, *ends, *sizes, *grouped)
        return [Call(fma_kernel(layer, grouped=True), grid, FMA_THREADS, FMA_SHARED, plain)]
    tile = tile_of(layer.weight, tile_rows)
    arguments = (ptr(at.y), ptr(at.sums), ptr(at.x), *weight, *ends, *sizes, i32(steps_per_split), *grouped)
    grid = (-(-layer.panels // tile.panels), tiles, splits)
    shared = shared_bytes(tile, layer.weight, kernel_group(layer.weight), grouped=True)
    calls = [Call(mma_kernel(layer, tile, grouped=True), grid, tile.threads, shared, arguments)]
    if splits > 1:
        assert not at.bias, "the sum over splits does not know a row's expert"
        calls.append(reduce_call(layer, pairs, at, splits))
    return calls


def combine_call(
    dtype: str, tokens: int, choices: int, width: int, *, out: int, y: int, weights: int, count: int, residual: int = 0
) -> Call:
    """out [tokens, width] from y [tokens * choices, width]; `width` is even."""
    arguments = (ptr(out), ptr(y), ptr(weights), ptr(residual), ptr(count), i32(choices), i32(width))
    grid = (-(-width // 256), tokens, 1)
    return Call(combine_kernel(dtype, add=residual != 0), grid, COMBINE_THREADS, 0, arguments)
