"""Which tile of linear_mma.cuh serves which sizes, and into how many splits the inputs are cut. Pure functions.

Tiles share one arithmetic, so they follow the number of rows freely. Splits do not: each is a sum of its own. They
follow the number of rows only outside of `deterministic`, where a row must give the same bits in any company.

What decides: with few rows a layer takes as long as reading its weight, so every SM must have weight under way; with
many rows it takes as long as multiplying, so a code should be decoded once for as many rows as registers allow.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..formats import WeightFormat
from .jit import architecture
from .tiles import SMS

UNIT = 64  # inputs of one step
SHARED_LIMIT = 99 << 10  # what a block may have on every architecture from sm_80 on
DETERMINISTIC_SPLIT = 2048  # inputs


@dataclass(frozen=True, slots=True)
class Tile:
    """tiles of 16 rows and panels of 16 outputs per warp, warps along each, stages of the ring."""

    tiles_m: int
    tiles_n: int
    warps_m: int
    warps_n: int
    stages: int

    @property
    def rows(self) -> int:
        return 16 * self.tiles_m * self.warps_m

    @property
    def panels(self) -> int:
        return self.tiles_n * self.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n


TILES = (
    Tile(1, 1, 1, 4, 4),  # up to 16 rows
    Tile(2, 1, 1, 4, 4),
    Tile(4, 1, 1, 4, 4),
    Tile(4, 2, 2, 4, 3),  # 128 rows and outputs
)
FLOAT_TILES = (*TILES[:3], Tile(4, 2, 2, 4, 2))  # 16-bit weights: two stages of the largest are 64 KiB
NARROW_TILES = (*TILES[:3], Tile(4, 1, 2, 4, 3))  # half as many outputs


def shared_limit(capability: tuple[int, int]) -> int:
    """Shared memory that a block of a linear layer may have on a GPU of this compute capability."""
    return min(SHARED_LIMIT, SMS[architecture(*capability)].block_shared)


def expert_tiles(arch: str) -> int:
    """How many of `tiles_of` serve experts: the largest would not stay in registers on the oldest."""
    return 3 if arch == "sm_75" else 4


def tiles_of(weight: WeightFormat) -> tuple[Tile, ...]:
    """Every tile that a weight is multiplied with, in ascending order of rows.

    Minima, and scales of two groups in a step, take registers that the largest tile has not got.
    """
    if weight.is_float:
        return FLOAT_TILES
    return NARROW_TILES if weight.zero == "min" or weight.group == 32 else TILES


def tiles_within(weight: WeightFormat, shared_limit: int) -> tuple[Tile, ...]:
    """Those of `tiles_of` that fit into so much shared memory; the smallest always does."""
    group = weight.group if weight.group in (32, 64, 128) else 0
    return tuple(t for t in tiles_of(weight) if shared_bytes(t, weight, group, grouped=False) <= shared_limit)


def choose_tile(rows: int, weight: WeightFormat, shared_limit: int = SHARED_LIMIT) -> Tile:
    """The smallest tile that takes all rows at once, or the largest that there is shared memory for."""
    table = tiles_within(weight, shared_limit)
    return next((tile for tile in table if tile.rows >= rows), table[-1])


def choose_splits(
    tile: Tile, rows: int, outputs: int, inputs: int, weight: WeightFormat, processors: int, *, deterministic: bool
) -> tuple[int, int]:
    """(splits, steps of UNIT inputs in each). Splits hold whole groups, and none is empty.

    processors  how many SMs the GPU has
    """
    steps = -(-inputs // UNIT)
    quantum = 2 if weight.group == 128 else 1
    if deterministic:
        wanted = -(-inputs // DETERMINISTIC_SPLIT)
    else:
        blocks = -(-rows // tile.rows) * -(-outputs // (16 * tile.panels))
        # Few rows: four blocks per SM, whose warps wait for each other; else two, which take all registers. Each has at
        # least two rounds of its ring to do, and partial sums stay small.
        per_processor = 4 if rows <= 64 else 2
        wanted = max(1, min(per_processor * processors // blocks, steps // (2 * tile.stages), 16 if rows <= 64 else 4))
    each = -(-steps // wanted)
    each = -(-each // quantum) * quantum
    return -(-steps // each), each


def shared_bytes(tile: Tile, weight: WeightFormat, kernel_group: int, *, grouped: bool) -> int:
    """Dynamic shared memory of linear_mma."""
    return tile.stages * stage_bytes(tile, weight, kernel_group) + (4 * tile.rows if grouped else 0)


def stage_bytes(tile: Tile, weight: WeightFormat, kernel_group: int) -> int:
    """What one step takes in shared memory, as StageLayout of linear_mma.cuh says."""
    bits = {"int4": 4, "nf4": 4, "int8": 8, "fp8_e4m3": 8}.get(weight.kind, 16)
    stage = tile.rows * UNIT * 2 + tile.panels * 128 * bits
    if kernel_group > 0 and not weight.is_float:
        groups = max(1, UNIT // kernel_group)
        scale = groups * 16 * (2 if weight.scales == "f16" else 4)
        stage += tile.panels * (scale + {"none": 0, "int": groups * 16, "min": scale}[weight.zero])
    return stage
