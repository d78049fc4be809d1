"""Every registered specialization of the linear layers, of experts and adapters, for table.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ..formats import WeightFormat
from . import linear, lora, moe
from .linear import End, Linear
from .linear_tiles import TILES, Tile, shared_bytes, stage_bytes, tiles_of
from .listed import Listed
from .source import Kernel
from .types import ACTIVATIONS, ELEMENTS

# One group per output has no size of its own in a kernel: any that is not in pack.GROUPS stands for it.
WHOLE = 4096
# What checkpoints hold: of those with minima, GGUF's alone.
CODES = (
    *(WeightFormat("int4", group, zero) for group in (32, 64, 128, WHOLE) for zero in ("none", "int")),
    WeightFormat("int4", 32, "min"),
    WeightFormat("nf4", 64, "none", "f32"),
    *(WeightFormat("int8", group) for group in (32, 128, WHOLE)),
    *(WeightFormat("fp8_e4m3", group, "none", "f32") for group in (128, WHOLE)),
    WeightFormat("int8", 64),
    *(WeightFormat("nf4", group, "none", "f32") for group in (32, 128, WHOLE)),
    *(WeightFormat("fp8_e4m3", group, "none", "f32") for group in (32, 64)),
)


def linear_kernels(dtype: str, formats: Iterable[WeightFormat]) -> Iterator[Listed]:
    """What linear layers of these formats launch, whatever their number of rows, and with a residual or without."""
    for weight in formats:
        layer = Linear(dtype, weight, WHOLE, WHOLE)
        if weight.is_float and dtype not in (weight.kind, "f32"):
            continue
        yield _vector(layer)
        if dtype == "f32":
            yield Listed(linear.fma_kernel(layer), linear.FMA_THREADS, linear.FMA_SHARED)
        else:
            yield from (_mma(layer, tile) for tile in tiles_of(weight))
            yield Listed(linear.reduce_kernel(layer), linear.REDUCE_THREADS)


def all_linears(dtypes: Sequence[str] = ACTIVATIONS, *, expert_tiles: int = 4) -> Iterator[Listed]:
    """Every combination of storage with activations of these types; of experts, so many of the tiles."""
    for dtype in dtypes:
        yield from linear_kernels(dtype, (*CODES, *map(WeightFormat, ACTIVATIONS)))
        yield Listed(linear.gather_kernel(dtype), linear.GATHER_THREADS)
        yield from _adapters(dtype, lora.RANKS)
        formats = map(WeightFormat, ACTIVATIONS if dtype == "f32" else (dtype,))
        yield from expert_kernels(dtype, (*CODES, *formats), expert_tiles)


def linear_representatives(act: str) -> Iterator[Listed]:
    """At least one of each template, and of linear_mma the storage that each decoding has."""
    for weight, tile in ((CODES[3], 0), (CODES[3], 3), (CODES[8], 1), (CODES[9], 0), (CODES[12], 0), (CODES[13], 2)):
        yield _mma(Linear(act, weight, WHOLE, WHOLE), tiles_of(weight)[tile])
    yield _mma(Linear("f16", CODES[5], WHOLE, WHOLE, "silu"), TILES[0])
    yield _mma(Linear(act, WeightFormat(act), WHOLE, WHOLE), tiles_of(WeightFormat(act))[3])
    layer = Linear(act, CODES[3], WHOLE, WHOLE, "add")
    yield Listed(linear.reduce_kernel(layer), linear.REDUCE_THREADS)
    yield _vector(layer)
    plain = Linear("f32", WeightFormat("f32"), WHOLE, WHOLE)
    yield Listed(linear.fma_kernel(plain), linear.FMA_THREADS, linear.FMA_SHARED)
    yield Listed(linear.gather_kernel(act), linear.GATHER_THREADS)
    yield from _adapters(act, (16,))
    yield from itertools.islice(expert_kernels(act, (CODES[3],)), 5)
    yield Listed(linear.fma_kernel(replace(plain, end="silu"), grouped=True), linear.FMA_THREADS, linear.FMA_SHARED)


def _vector(layer: Linear) -> Listed:
    in_flight = linear.vector_in_flight(layer)
    return Listed(linear.vector_kernel(layer), 32 * linear.VECTOR_WARPS, linear.vector_shared(layer), in_flight)


def _mma(layer: Linear, tile: Tile, *, grouped: bool = False) -> Listed:
    group = linear.kernel_group(layer.weight)
    shared = shared_bytes(tile, layer.weight, group, grouped=grouped)
    # The step being computed has arrived; one is being asked for.
    in_flight = (tile.stages - 1) * stage_bytes(tile, layer.weight, group)
    return Listed(linear.mma_kernel(layer, tile, grouped=grouped), tile.threads, shared, in_flight)


def expert_kernels(dtype: str, formats: Iterable[WeightFormat], most_tiles: int = 4) -> Iterator[Listed]:
    """What experts of these formats launch besides the linear layer of their scores."""
    for score in moe.SCORES:
        yield Listed(Kernel(moe.HEADER, f"moe_route<{ELEMENTS[dtype]}, {moe.SCORES[score]}>"), moe.ROUTE_THREADS)
    yield Listed(moe.combine_kernel(dtype, add=True), moe.COMBINE_THREADS)
    yield Listed(moe.group_kernel(TILES[0].rows), moe.GROUP_THREADS, 8 * moe.MAX_EXPERTS)
    ends: tuple[End, ...] = ("store", "silu")
    for weight, end in itertools.product(formats, ends):
        layer = Linear(dtype, weight, WHOLE, WHOLE, end)
        if dtype == "f32":
            yield Listed(linear.fma_kernel(layer, grouped=True), linear.FMA_THREADS, linear.FMA_SHARED)
        else:
            yield from (_mma(layer, tile, grouped=True) for tile in tiles_of(weight)[:most_tiles])
    for rows in moe.TILE_ROWS[:most_tiles]:
        yield Listed(moe.group_kernel(rows), moe.GROUP_THREADS, 8 * moe.MAX_EXPERTS)


def _adapters(dtype: str, ranks: Iterable[int]) -> Iterator[Listed]:
    for rank in ranks:
        shrink, expand = lora.Lora(dtype, rank, WHOLE, WHOLE, WHOLE).kernels
        yield Listed(shrink, lora.THREADS)
        yield Listed(expand, lora.THREADS, 4 * rank)
