"""Linear layers on CUDA as lists of calls: which kernels run for these sizes, and with what.

Addresses and sizes in, calls out: nothing here needs a GPU, so that tests run the same calls on the emulator.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from ..errors import UsageError
from ..formats import WeightFormat
from . import pack
from .arguments import i32, i64, ptr
from .call import Call
from .linear_tiles import SHARED_LIMIT, UNIT, Tile, choose_splits, choose_tile, shared_bytes, tiles_within
from .source import Kernel
from .types import ACTIVATIONS, ELEMENT_BYTES, ELEMENTS

End = Literal["store", "add", "silu", "gelu"]
WEIGHTS = {
    "int4": "WeightInt4",
    "nf4": "WeightNf4",
    "int8": "WeightInt8",
    "fp8_e4m3": "WeightE4m3",
    **{kind: ELEMENTS[kind] for kind in ACTIVATIONS},
}
ENDS = {"store": "End::kStore", "add": "End::kStore", "silu": "End::kSilu", "gelu": "End::kGelu"}
VECTOR_WARPS = 8
FMA_THREADS = REDUCE_THREADS = GATHER_THREADS = 128
FMA_ROWS, FMA_PANELS, FMA_SHARED = 32, 4, 4 * (32 + 64) * 68  # linear_fma.cuh
ZEROS = {"none": "Zero::kNone", "int": "Zero::kInt", "min": "Zero::kMin"}


@dataclass(frozen=True, slots=True)
class Linear:
    """What a linear layer is, without its addresses.

    dtype    f16 | bf16 | f32: of x, y, bias and residual
    outputs  rows of the weight: for the gated ends, gates and ups together
    stride   values from one row of y (and of the residual) to the next, even; 0: as many as it has columns
    """

    dtype: str
    weight: WeightFormat
    outputs: int
    inputs: int
    end: End = "store"
    stride: int = 0

    @property
    def width(self) -> int:
        """Values from one row of y to the next: even, so that they can be written in pairs."""
        if self.stride:
            return self.stride
        columns = self.outputs // 2 if self.end in ("silu", "gelu") else self.outputs
        return columns + columns % 2

    @property
    def panels(self) -> int:
        return -(-self.outputs // pack.PANEL)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where everything lies. bias is padded to an even number of outputs; 0 for what there is not.

    sums  float32 workspace of `workspace_bytes`, if the inputs are split
    """

    y: int
    x: int
    weight: int
    bias: int = 0
    residual: int = 0
    sums: int = 0


def refusal(layer: Linear) -> str | None:
    """Why no kernel serves this layer, None if one does."""
    try:
        pack.check_layout(layer.weight, layer.inputs)
    except UsageError as error:
        return str(error)
    if layer.inputs % 8 != 0:
        return f"{layer.inputs} inputs are no multiple of 8"
    if layer.dtype not in ACTIVATIONS:
        return f"activations are {layer.dtype}; known are {', '.join(ACTIVATIONS)}"
    if layer.weight.is_float and layer.dtype not in (layer.weight.kind, "f32"):
        return f"a {layer.weight.kind} weight with {layer.dtype} activations"
    if layer.end in ("silu", "gelu") and layer.outputs % pack.PANEL != 0:
        return f"{layer.outputs} outputs of gates and ups are no multiple of {pack.PANEL}"
    return None


def linear_calls(
    layer: Linear, rows: int, at: Addresses, processors: int, *, deterministic: bool, shared_limit: int = SHARED_LIMIT
) -> list[Call]:
    """What computes the layer for this many rows on a GPU with so many SMs, and so much shared memory for a block.

    deterministic  a row gives the same bits however many there are: one kernel for all, and splits by the inputs alone
    """
    if rows == 1 and not deterministic and vector_shared(layer) <= shared_limit:
        return [vector_call(layer, rows, at)]
    if layer.dtype == "f32":
        return [fma_call(layer, rows, at)]
    return mma_calls(layer, rows, at, *_cut(layer, rows, processors, deterministic, shared_limit))


@functools.lru_cache(1024)  # every layer of a model asks, and few differ
def linear_workspace(
    layer: Linear, rows: int, processors: int, *, deterministic: bool, shared_limit: int = SHARED_LIMIT
) -> int:
    """Bytes that `Addresses.sums` must have for any number of rows up to this one."""
    if layer.dtype == "f32":
        return 0
    # More rows may need less: they take larger tiles, and fewer splits. Where neither changes, the last row decides.
    table = tiles_within(layer.weight, shared_limit)
    ends = (*(tile.rows for tile in table), *range(table[-1].rows, rows, table[-1].rows))
    counts = (*(count for count in ends if count < rows), rows)
    return max(
        workspace_bytes(layer, count, _cut(layer, count, processors, deterministic, shared_limit)[1])
        for count in counts
    )


def _cut(layer: Linear, rows: int, processors: int, deterministic: bool, shared_limit: int) -> tuple[Tile, int, int]:
    tile = choose_tile(rows, layer.weight, shared_limit)
    splits = choose_splits(
        tile, rows, layer.outputs, layer.inputs, layer.weight, processors, deterministic=deterministic
    )
    return tile, *splits


def mma_kernel(layer: Linear, tile: Tile, *, grouped: bool = False) -> Kernel:
    """The specialization of linear_mma for this layer and tile."""
    shape = f"{tile.tiles_m}, {tile.tiles_n}, {tile.warps_m}, {tile.warps_n}, {tile.stages}"
    return Kernel(
        "linear_mma.cuh",
        f"linear_mma<{_types(layer)}, {shape}, {ENDS[layer.end]}, {'true' if grouped else 'false'}>",
    )


def vector_kernel(layer: Linear) -> Kernel:
    return Kernel("linear_vector.cuh", f"linear_vector<{_types(layer)}, {VECTOR_WARPS}, {ENDS[layer.end]}>")


def fma_kernel(layer: Linear, *, grouped: bool = False) -> Kernel:
    assert layer.dtype == "f32", layer.dtype
    types = _types(layer).removeprefix("float, ")
    return Kernel("linear_fma.cuh", f"linear_fma<{types}, {ENDS[layer.end]}, {'true' if grouped else 'false'}>")


def vector_shared(layer: Linear) -> int:
    """Dynamic shared memory of linear_vector: the row, and a panel's sums of each warp."""
    return -(-layer.inputs // UNIT) * UNIT * ELEMENT_BYTES[layer.dtype] + 4 * pack.PANEL * VECTOR_WARPS


def vector_in_flight(layer: Linear) -> int:
    """Bytes of the weight that a block of linear_vector asks for before it multiplies: kAhead units of each warp."""
    unit = pack.unit_bytes(layer.weight.kind)
    return VECTOR_WARPS * unit * (4 if unit == 512 else 2)


def vector_call(layer: Linear, rows: int, at: Addresses) -> Call:
    """Each row by itself, from a weight that is read as often."""
    arguments = (
        ptr(at.y), ptr(at.x), *weight_arguments(layer, at.weight), ptr(at.bias), ptr(at.residual),
        i32(layer.outputs), i32(layer.inputs), i32(layer.width),
    )  # fmt: skip
    return Call(vector_kernel(layer), (layer.panels, rows, 1), 32 * VECTOR_WARPS, vector_shared(layer), arguments)


def fma_call(layer: Linear, rows: int, at: Addresses) -> Call:
    """float32 throughout."""
    arguments = (
        ptr(at.y), ptr(at.x), *weight_arguments(layer, at.weight), ptr(at.bias), ptr(at.residual),
        i32(rows), i32(layer.outputs), i32(layer.inputs), i32(layer.width),
        ptr(0), ptr(0), i32(1), i64(0), i64(0), i64(0),
    )  # fmt: skip
    grid = (-(-layer.panels // FMA_PANELS), -(-rows // FMA_ROWS), 1)
    return Call(fma_kernel(layer), grid, FMA_THREADS, FMA_SHARED, arguments)


def reduce_kernel(layer: Linear) -> Kernel:
    return Kernel("linear_mma.cuh", f"linear_reduce<{ELEMENTS[layer.dtype]}, {ENDS[layer.end]}>")


def mma_calls(layer: Linear, rows: int, at: Addresses, tile: Tile, splits: int, steps_per_split: int) -> list[Call]:
    """linear_mma, and the sum over splits if there are several."""
    assert layer.dtype != "f32" and (splits == 1 or at.sums), (layer.dtype, splits)
    grid = (-(-layer.panels // tile.panels), -(-rows // tile.rows), splits)
    group = kernel_group(layer.weight)
    arguments = (
        ptr(at.y), ptr(at.sums), ptr(at.x), *weight_arguments(layer, at.weight), ptr(at.bias), ptr(at.residual),
        i32(rows), i32(layer.outputs), i32(layer.inputs), i32(layer.width), i32(steps_per_split),
        ptr(0), ptr(0), i32(1), i64(0), i64(0), i64(0),
    )  # fmt: skip
    shared = shared_bytes(tile, layer.weight, group, grouped=False)
    calls = [Call(mma_kernel(layer, tile), grid, tile.threads, shared, arguments)]
    if splits > 1:
        calls.append(reduce_call(layer, rows, at, splits))
    return calls


def reduce_call(layer: Linear, rows: int, at: Addresses, splits: int) -> Call:
    """The sum over splits, ended."""
    arguments = (
        ptr(at.y), ptr(at.sums), ptr(at.bias), ptr(at.residual),
        i32(rows), i32(layer.outputs), i32(layer.width), i32(splits),
    )  # fmt: skip
    return Call(reduce_kernel(layer), (-(-layer.panels * 4 // REDUCE_THREADS), rows, 1), REDUCE_THREADS, 0, arguments)


def workspace_bytes(layer: Linear, rows: int, splits: int) -> int:
    """float32 sums of every split."""
    return 4 * splits * rows * layer.panels * pack.PANEL if splits > 1 else 0


def kernel_group(weight: WeightFormat) -> int:
    """The group as the kernels' template parameter: 0 if there is one per output, or none."""
    return weight.group if weight.group in pack.GROUPS else 0


def _types(layer: Linear) -> str:
    weight = layer.weight
    scale = "float" if weight.is_float or weight.scales == "f32" else "Half"
    element = ELEMENTS[layer.dtype]
    return f"{element}, {WEIGHTS[weight.kind]}, {kernel_group(weight)}, {ZEROS[weight.zero]}, {scale}"


def weight_arguments(layer: Linear, address: int) -> tuple[ptr, ptr, ptr]:
    """Where codes, scales and zeros of the weight lie."""
    where = pack.parts(layer.weight, layer.outputs, layer.inputs)
    return ptr(address), ptr(address + where.scales.start), ptr(address + where.zeros.start)


def gather_call(dtype: str, rows: int, inputs: int, *, out: int, x: int, order: int) -> Call:
    """out[:, j] = x[:, order[j]], for a weight whose groups are of scattered inputs; order int32 [inputs], even."""
    arguments = (ptr(out), ptr(x), ptr(order), i32(inputs))
    return Call(gather_kernel(dtype), (-(-inputs // 256), rows, 1), GATHER_THREADS, 0, arguments)


def gather_kernel(dtype: str) -> Kernel:
    return Kernel("gather.cuh", f"gather_inputs<{ELEMENTS[dtype]}>")
