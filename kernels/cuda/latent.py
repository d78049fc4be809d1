"""Attention on latents: its specializations, and its calls out of addresses and sizes (latent.cuh).

A query meets latents by `up`'s part for keys, which brings it to where they are; what it gives comes back by the part
for values. Both are linear layers of each head by itself, so nothing is expanded for each position.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import NoKernel
from . import pack
from .arguments import Argument, i32, i64, ptr
from .attend import COMPUTE, MERGE_THREADS
from .call import Call
from .jit import architecture
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
    weight_arguments,
)
from .linear_tiles import expert_tiles, shared_bytes, shared_limit, tiles_of
from .source import Kernel
from .tiles import SMS, missing
from .types import ELEMENT_BYTES, ELEMENTS, LEAST_BLOCK

HEADER = "latent.cuh"
STORE_THREADS = 128
MAX_RANK, MAX_ROPE = 512, 128
# (tiles of 16 rows, tokens per step), in order of preference where heads fill as many rows.
_CUTS = ((4, 32), (4, 16), (2, 64), (2, 32), (2, 16), (1, 64), (1, 32), (1, 16))


@dataclass(frozen=True, slots=True)
class LatentShape:
    """One specialization of `latent_attend`. Queries, latents and results are of one type, `act`."""

    act: str
    rank: int
    rope: int
    tiles_m: int
    tile: int
    stages: int = 2

    @property
    def kernel(self) -> Kernel:
        element = ELEMENTS[self.act]
        return Kernel(
            HEADER,
            f"latent_attend<{element}, {COMPUTE[self.act]}, {self.rank}, {self.rope}, {self.tiles_m}, {self.warps}, "
            f"{self.tile}, {self.stages}>",
        )

    @property
    def merge_kernel(self) -> Kernel:
        return Kernel(HEADER, f"attend_merge<{ELEMENTS[self.act]}, {self.rank}, {self.rows}>")

    @property
    def merge_shared_bytes(self) -> int:
        """Dynamic shared memory of `attend_merge`: a row of each warp, and the sum of its weights."""
        return (self.rank + 1) * 4 * (MERGE_THREADS // 32)

    @property
    def rows(self) -> int:
        return 16 * self.tiles_m

    @property
    def warps(self) -> int:
        """As many as the latent's values can be divided among, 16 for each at least."""
        return next(warps for warps in (8, 4, 2) if self.rank % (16 * warps) == 0)

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def stage_bytes(self) -> int:
        return self.tile * self._stride

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: queries, the steps in flight, scores, and three numbers of each row."""
        return self.rows * self._stride + self.stages * self.stage_bytes + 4 * self.rows * (self.tile + 4 + 3)

    @property
    def _stride(self) -> int:
        row = (self.rank + self.rope) * ELEMENT_BYTES[self.act]
        return row + (16 if row // 16 % 2 == 0 else 0)


def refusal(heads: int, rank: int, rope: int, nope: int, value_dim: int, block_size: int) -> str | None:
    """Why there are no kernels for these sizes, None if there are."""
    if rank % 32 != 0 or not 32 <= rank <= MAX_RANK:
        return f"latents of rank {rank}; multiples of 32 up to {MAX_RANK} are known"
    if rope % 32 != 0 or not 32 <= rope <= MAX_ROPE:
        return f"rotated keys of {rope} values; multiples of 32 up to {MAX_ROPE} are known"
    if nope % 8 != 0 or value_dim % 8 != 0 or heads * (nope + rope) % 16 != 0 or heads * value_dim % 16 != 0:
        return f"{heads} heads of {nope} + {rope} and {value_dim} values, no multiples of 8"
    if block_size < LEAST_BLOCK or block_size & (block_size - 1):
        return f"blocks of {block_size} tokens; powers of two from {LEAST_BLOCK} on are known"
    return None


def choose_latent(arch: str, act: str, heads: int, rank: int, rope: int) -> LatentShape:
    """The specialization for these sizes: as many rows as there are heads to fill them, and steps that fit beside them.

    Raises NoKernel if the architecture has not enough shared memory for any.
    """
    if (reason := missing(arch, act)) is not None:
        raise NoKernel(f"no attention on latents on a GPU: {reason}", "choose another `--dtype`, or a CPU")
    for tiles_m, tile in _CUTS:
        shape = LatentShape(act, rank, rope, tiles_m, tile)
        # Sums of results stay in registers: 64 of each thread at most.
        sums = tiles_m * rank // shape.warps // 8 * 4
        if (tiles_m == 1 or shape.rows <= heads) and sums <= 64 and shape.shared_bytes <= SMS[arch].block_shared:
            return shape
    raise NoKernel(
        f"attention on latents of {rank} + {rope} values of {act} does not fit into the {SMS[arch].block_shared} bytes "
        f"of shared memory of {arch}",
        "use `--dtype bfloat16` or `float16`, or a CPU",
    )


def store_kernel(act: str) -> Kernel:
    return Kernel(HEADER, f"latent_store<{ELEMENTS[act]}>")


def heads_calls(layer: Linear, heads: int, rows: int, at: Addresses, capability: tuple[int, int]) -> list[Call]:
    """The layer of every head, on its values of each row: x [rows, heads, inputs], y [rows, heads, layer.width].

    The heads' packed weights lie one behind the other. Tiles are those of experts.
    """
    stride = pack.parts(layer.weight, layer.outputs, layer.inputs).num_bytes
    # No list of rows: those of one head are every `heads`th.
    batched: tuple[Argument, ...] = (ptr(0), ptr(0), i32(heads), *(i64(stride),) * 3)
    sizes = i32(rows), i32(layer.outputs), i32(layer.inputs), i32(layer.width)
    weight, none = weight_arguments(layer, at.weight), (ptr(0), ptr(0))
    if layer.dtype == "f32":
        grid = (-(-layer.panels // FMA_PANELS), heads * -(-rows // FMA_ROWS), 1)
        plain = (ptr(at.y), ptr(at.x), *weight, *none, *sizes, *batched)
        return [Call(fma_kernel(layer, grouped=True), grid, FMA_THREADS, FMA_SHARED, plain)]
    group, most = kernel_group(layer.weight), expert_tiles(architecture(*capability))
    known = [
        tile
        for tile in tiles_of(layer.weight)[:most]
        if shared_bytes(tile, layer.weight, group, grouped=True) <= shared_limit(capability)
    ]
    tile = next((tile for tile in known if tile.rows >= rows), known[-1])
    grid = (-(-layer.panels // tile.panels), heads * -(-rows // tile.rows), 1)
    shared = shared_bytes(tile, layer.weight, group, grouped=True)
    arguments = (ptr(at.y), ptr(0), ptr(at.x), *weight, *none, *sizes, i32(1 << 24), *batched)
    return [Call(mma_kernel(layer, tile, grouped=True), grid, tile.threads, shared, arguments)]
