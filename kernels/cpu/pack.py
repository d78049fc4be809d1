"""The layout in which CPU kernels read a weight, both ways, in numpy.

A [n, k] weight is padded with zeros to whole panels of 16 outputs. Panels follow one another, and each is one stream
along k, so that a kernel walks a panel with a single pointer and threads share a weight out by panels:

    f32, f16   [k][16] values
    bf16       [k][8][2] values: column j and column j + 8 side by side, so that a shift and a mask widen a pair
    int16      [groups][16] exponents of scales, with zeros up to a multiple of 64 bytes, so codes fill cache lines;
               then [k / 2][16][2] codes: two consecutive inputs for one multiply-add
    int8       per group: 16 float16 scales, then [group / 2][16][2] codes: two consecutive inputs for one multiply-add
    nf4, fp8   as int4 and int8 but with float32 scales: only stored in this layout, for a GPU to be packed anew
    int4       per group: 16 float16 scales, with zeros also 16 float16 minima or zero points, then for every 8
               consecutive inputs [16][4] bytes: byte i of a column holds input i in its low nibble and input i + 4 in
               its high one

Every case is a transpose of words of one size, which is all that packing costs. Weights are handled a few panels at a
time, so that the temporaries stay small however large the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..errors import UsageError
from ..formats import FLOAT_BYTES, INT16, WeightFormat
from ..ops import PANEL, AnyArray, F32Array, PackedWeight, U8Array

LAYOUT_VERSION = "panel16.2"
GROUPS = (32, 64, 128)  # and the whole of k
STORED_ONLY = ("nf4", "fp8_e4m3")
_CHUNK_ELEMENTS = 1 << 21
_LINE = 64  # bytes of a cache line
_BYTES = ("int8", "fp8_e4m3")


def check_layout(format: WeightFormat, k: int) -> None:
    """Raise UsageError if a weight with k inputs cannot be stored in this format."""
    if format.is_float:
        return
    group = format.group
    if format == INT16 and k % group == 0:
        return
    if format.kind not in ("int8", "int4") or (format.kind == "int8" and format.zero != "none"):
        raise UsageError(f"no CPU layout for weight format {format.name}", "int8 is symmetric; int4 may have zeros")
    if group not in GROUPS and (group != k or group % 32 != 0):
        raise UsageError(f"group {group} has no CPU layout", "use 32, 64, 128, or one group per output if k % 32 is 0")
    if k % group != 0:
        raise UsageError(f"{k} inputs are no multiple of group {group}", "use a smaller group, at least 32")


def check_stored(format: WeightFormat, k: int) -> None:
    """As `check_layout`, for what is stored here, which is more than CPU kernels read."""
    if format.kind not in STORED_ONLY:
        check_layout(format, k)
        return
    unit = 8 if format.kind == "nf4" else 2
    if format.zero != "none" or format.scales != "f32" or format.group % unit or k % format.group:
        raise UsageError(
            f"no layout for weight format {format.name} with {k} inputs",
            f"groups of a multiple of {unit} inputs that divide them, with float32 scales, can be stored",
        )


def packed_bytes(format: WeightFormat, n: int, k: int) -> int:
    """Size in bytes of a packed [n, k] weight."""
    check_stored(format, k)
    panels = -(-n // PANEL)
    if format.is_float:
        return panels * PANEL * k * FLOAT_BYTES[format.kind]
    if format == INT16:
        return panels * _wide_record(k).itemsize
    return panels * (k // format.group) * _group_record(format).itemsize


def pack(
    format: WeightFormat, data: AnyArray, scales: AnyArray | None = None, zeros: AnyArray | None = None
) -> U8Array:
    """The bytes of a [n, k] weight in panel layout; arguments as in `quant.tensor.WeightTensor`."""
    n, k = data.shape
    out = np.zeros(packed_bytes(format, n, k), np.uint8)
    if format.is_float:
        _pack_floats(format, data, out)
    else:
        assert scales is not None and (zeros is not None) == (format.zero != "none"), format.name
        if format == INT16:
            _pack_wide(data, scales, out)
            return out
        _pack_groups(format, data, scales, zeros, out)
    return out


def unpack(weight: PackedWeight) -> tuple[AnyArray, AnyArray | None, AnyArray | None]:
    """Exactly the (data, scales, zeros) that `pack` was given. bfloat16 comes as its bits in uint16."""
    size = packed_bytes(weight.format, weight.n, weight.k)
    assert weight.data.size == size, (weight.data.size, size, weight.format.name, weight.n, weight.k)
    if weight.format.is_float:
        return _unpack_floats(weight), None, None
    if weight.format == INT16:
        return *_unpack_wide(weight), None
    return _unpack_groups(weight)


def e8m0_values(exponents: AnyArray) -> F32Array:
    """The power of two, 2 ** (byte - 127), of each byte; infinity for 255."""
    return (exponents.astype(np.uint32) << np.uint32(23)).view(np.float32)


def _pack_floats(format: WeightFormat, data: AnyArray, out: U8Array) -> None:
    n, k = data.shape
    words = _float_words(format, out, k)
    for rows, panels in _chunks(n, k):
        block = _padded(data[rows]).view(words.dtype).reshape(-1, PANEL, k)
        if format.kind == "bf16":
            block = block.reshape(-1, 2, PANEL // 2, k).transpose(0, 2, 1, 3).reshape(-1, PANEL, k)
        words[panels] = block.transpose(0, 2, 1)


def _unpack_floats(weight: PackedWeight) -> AnyArray:
    format, n, k = weight.format, weight.n, weight.k
    words = _float_words(format, weight.data, k)
    bits = np.empty((n, k), words.dtype)
    for rows, panels in _chunks(n, k):
        block = words[panels].transpose(0, 2, 1)
        if format.kind == "bf16":
            block = block.reshape(-1, PANEL // 2, 2, k).transpose(0, 2, 1, 3)
        bits[rows] = block.reshape(-1, k)[: rows.stop - rows.start]
    return bits.view({"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[format.kind])


def _pack_wide(data: AnyArray, scales: AnyArray, out: U8Array) -> None:
    n, k = data.shape
    records = out.view(_wide_record(k))
    groups = scales.shape[1]
    for rows, panels in _chunks(n, k):
        block = records[panels]
        block["scales"][:, :groups] = _padded(scales[rows]).reshape(-1, PANEL, groups).transpose(0, 2, 1)
        block["codes"] = _padded(data[rows]).view(np.uint32).reshape(-1, PANEL, k // 2).transpose(0, 2, 1)


def _unpack_wide(weight: PackedWeight) -> tuple[AnyArray, AnyArray]:
    n, k = weight.n, weight.k
    records, groups = weight.data.view(_wide_record(k)), k // INT16.group
    data, scales = np.empty((n, k), np.int16), np.empty((n, groups), np.uint8)
    for rows, panels in _chunks(n, k):
        block, count = records[panels], rows.stop - rows.start
        scales[rows] = block["scales"][:, :groups].transpose(0, 2, 1).reshape(-1, groups)[:count]
        words = np.ascontiguousarray(block["codes"].transpose(0, 2, 1))
        data[rows] = words.view(np.int16).reshape(-1, k)[:count]
    return data, scales


def _wide_record(k: int) -> np.dtype[np.void]:
    """What a panel of int16 looks like, its codes as words that belong to one column each."""
    lines = -(-k // INT16.group * PANEL // _LINE)
    return np.dtype([("scales", np.uint8, (lines * _LINE // PANEL, PANEL)), ("codes", np.uint32, (k // 2, PANEL))])


def _pack_groups(format: WeightFormat, data: AnyArray, scales: AnyArray, zeros: AnyArray | None, out: U8Array) -> None:
    n, k = data.shape
    groups = k // format.group
    records = out.view(_group_record(format)).reshape(-1, groups)
    for rows, panels in _chunks(n, k):
        block = records[panels]
        block["scales"] = _padded(scales[rows]).reshape(-1, PANEL, groups).transpose(0, 2, 1)
        if zeros is not None:
            block["zeros"] = _padded(zeros[rows]).reshape(-1, PANEL, groups).transpose(0, 2, 1)
        words = _code_words(format, _padded(data[rows])).reshape(-1, PANEL, groups, block["codes"].shape[2])
        block["codes"] = words.transpose(0, 2, 3, 1)


def _unpack_groups(weight: PackedWeight) -> tuple[AnyArray, AnyArray, AnyArray | None]:
    format, n, k = weight.format, weight.n, weight.k
    groups = k // format.group
    records = weight.data.view(_group_record(format)).reshape(-1, groups)
    data: AnyArray = np.empty((n, k), np.int8 if format.kind == "int8" else np.uint8)
    scales: AnyArray = np.empty((n, groups), np.float16 if format.scales == "f16" else np.float32)
    zeros: AnyArray | None = None
    if format.zero != "none":
        zeros = np.empty((n, groups), np.float16 if format.zero == "min" else np.uint8)
    for rows, panels in _chunks(n, k):
        block, count = records[panels], rows.stop - rows.start
        scales[rows] = block["scales"].transpose(0, 2, 1).reshape(-1, groups)[:count]
        if zeros is not None:
            zeros[rows] = block["zeros"].transpose(0, 2, 1).reshape(-1, groups)[:count]
        data[rows] = _codes(format, block["codes"].transpose(0, 3, 1, 2)).reshape(-1, k)[:count]
    return data, scales, zeros


def _group_record(format: WeightFormat) -> np.dtype[np.void]:
    """What one group of one panel looks like, its codes as words that belong to one column each."""
    scale: type[np.generic] = np.float16 if format.scales == "f16" else np.float32
    fields: list[tuple[str, type[np.generic], tuple[int, ...]]] = [("scales", scale, (PANEL,))]
    if format.zero != "none":
        fields.append(("zeros", np.float16, (PANEL,)))
    if format.kind in _BYTES:
        fields.append(("codes", np.uint16, (format.group // 2, PANEL)))
    else:
        fields.append(("codes", np.uint32, (format.group // 8, PANEL)))
    return np.dtype(fields)


def _code_words(format: WeightFormat, codes: AnyArray) -> AnyArray:
    """Codes [n, k] as words that run along k: 2 int8 codes in 16 bits, or 8 int4 codes in 32."""
    if format.kind in _BYTES:
        return codes.view(np.uint16)
    halves: U8Array = codes.view(np.uint8).reshape(codes.shape[0], -1, 2, 4)
    joined: U8Array = halves[:, :, 0] | (halves[:, :, 1] << np.uint8(4))
    return joined.reshape(codes.shape[0], -1).view(np.uint32)


def _codes(format: WeightFormat, words: AnyArray) -> AnyArray:
    """The inverse of `_code_words`, for words [..., count]: codes [..., inputs]."""
    words = np.ascontiguousarray(words)
    if format.kind in _BYTES:
        return words.view(np.int8 if format.kind == "int8" else np.uint8)
    joined = words.view(np.uint8).reshape(*words.shape, 1, 4)
    return np.concatenate((joined & np.uint8(15), joined >> np.uint8(4)), axis=-2)


def _float_words(format: WeightFormat, data: U8Array, k: int) -> AnyArray:
    """A view of packed floats as unsigned words [panels, k, 16]: bits move as they are, NaN payloads too."""
    words: AnyArray = data.view(np.uint32 if format.kind == "f32" else np.uint16)
    return words.reshape(-1, k, PANEL)


def _chunks(n: int, k: int) -> Iterator[tuple[slice, slice]]:
    """(rows, panels) of the weight, a bounded number of elements at a time."""
    step = max(1, _CHUNK_ELEMENTS // (PANEL * k))
    for panel in range(0, -(-n // PANEL), step):
        yield slice(panel * PANEL, min(n, (panel + step) * PANEL)), slice(panel, panel + step)


def _padded(rows: AnyArray) -> AnyArray:
    """Contiguous rows with zero rows added up to whole panels."""
    missing = -rows.shape[0] % PANEL
    return np.pad(rows, ((0, missing), (0, 0))) if missing else np.ascontiguousarray(rows)
