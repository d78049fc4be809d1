"""Tiles and splits for any sizes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmctl.kernels.cuda.linear import Linear, kernel_group, linear_workspace, workspace_bytes
from llmctl.kernels.cuda.linear_tiles import SHARED_LIMIT, choose_splits, choose_tile, shared_bytes, tiles_of
from llmctl.kernels.formats import WeightFormat

FORMATS = [
    WeightFormat("int4", 32, "min"),
    WeightFormat("int4", 128, "int"),
    WeightFormat("nf4", 64, "none", "f32"),
    WeightFormat("int8", 1 << 20),
    WeightFormat("bf16"),
]


@given(
    st.integers(1, 5000), st.integers(1, 40000), st.integers(1, 30000), st.sampled_from(FORMATS),
    st.sampled_from([8, 46, 132]), st.booleans(),
)  # fmt: skip
def test_splits_cover_the_inputs_once_in_whole_groups(rows, outputs, inputs, weight, processors, deterministic) -> None:
    tile = choose_tile(rows, weight)
    splits, each = choose_splits(tile, rows, outputs, inputs, weight, processors, deterministic=deterministic)
    steps = -(-inputs // 64)
    assert (splits - 1) * each < steps <= splits * each
    assert weight.group != 128 or splits == 1 or each % 2 == 0


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(16, 20000), st.integers(64, 20000))
def test_deterministic_splits_do_not_depend_on_the_rows(first, second, outputs, inputs) -> None:
    weight = FORMATS[1]
    splits = {
        choose_splits(choose_tile(rows, weight), rows, outputs, inputs, weight, processors, deterministic=True)
        for rows in (first, second)
        for processors in (60, 132)
    }
    assert len(splits) == 1


@given(st.integers(1, 600), st.sampled_from([16, 576, 4096, 14336]), st.sampled_from([64, 576, 4096, 14336]))
def test_the_workspace_is_enough_for_any_fewer_rows(rows, outputs, inputs) -> None:
    layer = Linear("bf16", FORMATS[1], outputs, inputs)
    enough = linear_workspace(layer, rows, 132, deterministic=False)
    for fewer in range(1, rows + 1, 7):
        tile = choose_tile(fewer, layer.weight)
        splits, _ = choose_splits(tile, fewer, outputs, inputs, layer.weight, 132, deterministic=False)
        assert workspace_bytes(layer, fewer, splits) <= enough


def test_every_tile_fits_into_the_shared_memory_of_every_architecture() -> None:
    for weight in FORMATS:
        for tile in tiles_of(weight):
            for grouped in (False, True):
                assert shared_bytes(tile, weight, kernel_group(weight), grouped=grouped) <= SHARED_LIMIT


def test_a_tile_takes_all_rows_at_once_if_one_can() -> None:
    for rows in (1, 16, 17, 64, 128):
        tile = choose_tile(rows, FORMATS[0])
        assert tile.rows >= rows
        assert all(other.rows < rows or other.rows >= tile.rows for other in tiles_of(FORMATS[0]))
