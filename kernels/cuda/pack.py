"""The layout in which CUDA kernels read a weight, both ways, in numpy: the operands of tensor cores, lane by lane.

A [n, k] weight is padded to panels of 16 outputs and units of 64 inputs. Panels follow one another, and each is one
stream of units along k; weight.cuh says what a lane finds in a unit. Behind the codes come the scales, for each panel
and group sixteen in the order in which lanes hold sums, and the zeros, likewise (integer ones in the order in which
lanes hold codes). What is stored at the places that padding adds is finite and multiplied with zero.

AWQ, GPTQ and the others differ before this point only (quant/formats): here they are codes, scales and zeros of groups
of inputs that lie side by side. Gate and up of a gated layer may share a weight, eight outputs of one and eight of the
other in each panel, so that the kernel that sums both also multiplies them (`interleave`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import UsageError
from ..formats import FLOAT_BYTES, NF4_VALUES, WeightFormat
from ..ops import AnyArray, F32Array, U8Array

LAYOUT_VERSION = "mma16.1"
PANEL = 16
UNIT = 64
GROUPS = (32, 64, 128)  # and the whole of k

_BITS = {"int4": 4, "nf4": 4, "int8": 8, "fp8_e4m3": 8, "f16": 16, "bf16": 16, "f32": 32}
_ZEROS = {"int4": ("none", "int", "min"), "nf4": ("none",), "int8": ("none",), "fp8_e4m3": ("none",)}
# The axes of a padded weight: panel, half, g, unit, step, register, t, element; and how each width orders them.
_ORDERS = {
    "int4": (0, 3, 2, 6, 4, 7, 1, 5),  # nibbles: element, half, register
    "nf4": (0, 3, 2, 6, 4, 1, 5, 7),
    "f16": (0, 3, 4, 2, 6, 1, 5, 7),
    "f32": (0, 3, 4, 1, 2, 6, 5, 7),
}


@dataclass(frozen=True, slots=True)
class Parts:
    """Where in the bytes of a packed weight its parts lie."""

    codes: slice
    scales: slice
    zeros: slice

    @property
    def num_bytes(self) -> int:
        return int(self.zeros.stop)


def check_layout(format: WeightFormat, k: int) -> None:
    """Raise UsageError if a weight with k inputs cannot be stored in this format."""
    if format.is_float:
        return
    if format.zero not in _ZEROS.get(format.kind, ()):
        known = ", ".join(f"{kind} ({' | '.join(zeros)})" for kind, zeros in _ZEROS.items())
        raise UsageError(f"no CUDA layout for weight format {format.name}", f"with codes there are {known}")
    if format.group not in GROUPS and format.group != k:
        raise UsageError(f"group {format.group} has no CUDA layout", "use 32, 64, 128, or one group per output")
    if k % format.group != 0:
        raise UsageError(f"{k} inputs are no multiple of group {format.group}", "use a smaller group, at least 32")


def unit_bytes(kind: str) -> int:
    """Bytes of a unit of a panel: PANEL outputs by UNIT inputs of this kind."""
    return PANEL * UNIT * _BITS[kind] // 8


def parts(format: WeightFormat, n: int, k: int) -> Parts:
    """Where the parts of a packed [n, k] weight lie; sizes are whole vectors of 16 bytes."""
    check_layout(format, k)
    panels, units = -(-n // PANEL), -(-k // UNIT)
    codes = panels * units * unit_bytes(format.kind)
    if format.is_float:
        return Parts(slice(0, codes), slice(codes, codes), slice(codes, codes))
    places = panels * PANEL * _groups(format, k)
    scales = codes + places * FLOAT_BYTES[format.scales]
    zeros = scales + places * {"none": 0, "int": 1, "min": FLOAT_BYTES[format.scales]}[format.zero]
    return Parts(slice(0, codes), slice(codes, scales), slice(scales, zeros))


def pack(
    format: WeightFormat, data: AnyArray, scales: AnyArray | None = None, zeros: AnyArray | None = None
) -> U8Array:
    """The bytes of a [n, k] weight; arguments as in `quant.tensor.WeightTensor`, fp8 and nf4 codes as uint8."""
    n, k = data.shape
    where = parts(format, n, k)
    out = np.zeros(where.num_bytes, np.uint8)
    out[where.codes] = _packed_codes(format, _padded(_stored(format, data), -(-k // UNIT) * UNIT))
    if not format.is_float:
        assert scales is not None and (zeros is not None) == (format.zero != "none"), format.name
        groups = _groups(format, k)
        kind = np.float16 if format.scales == "f16" else np.float32
        out[where.scales] = _by_sums(_padded(scales.astype(kind, copy=False), groups))
        if zeros is not None and format.zero == "min":
            out[where.zeros] = _by_sums(_padded(zeros.astype(kind, copy=False), groups))
        elif zeros is not None:
            out[where.zeros] = _by_codes(_padded(zeros.astype(np.uint8, copy=False), groups))
    return out


def values(format: WeightFormat, packed: U8Array, n: int, k: int) -> F32Array:
    """The [n, k] values of a packed weight, each product and sum rounded once."""
    where, units = parts(format, n, k), -(-k // UNIT)
    codes = _unpacked_codes(format, packed[where.codes], -(-n // PANEL) * PANEL, units * UNIT)
    if format.kind == "bf16":
        return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)[:n, :k]
    if format.is_float:
        floats: F32Array = codes.view(np.float16 if format.kind == "f16" else np.float32).astype(np.float32)
        return floats[:n, :k]
    groups = _groups(format, k)
    kind = np.float16 if format.scales == "f16" else np.float32
    out = _meaning(format, codes)
    each = out.reshape(len(out), groups, -1)
    scales = _from_sums(packed[where.scales].view(kind), groups).astype(np.float32)[:, :, None]
    if format.zero == "int":
        each -= _from_codes(packed[where.zeros], groups).astype(np.float32)[:, :, None]
    each *= scales
    if format.zero == "min":
        each += _from_sums(packed[where.zeros].view(kind), groups).astype(np.float32)[:, :, None]
    return np.ascontiguousarray(out[:n, :k])


def interleave(gate: AnyArray, up: AnyArray) -> AnyArray:
    """Rows of two weights of equal shape (or their scales, or zeros), eight of one and eight of the other in turn."""
    if gate.shape != up.shape or gate.shape[0] % 8 != 0:
        raise UsageError(
            f"gate and up of shapes {gate.shape} and {up.shape} cannot share a weight",
            "both need the same multiple of 8 outputs",
        )
    both = np.stack((gate.reshape(-1, 8, *gate.shape[1:]), up.reshape(-1, 8, *up.shape[1:])), axis=1)
    return np.ascontiguousarray(both.reshape(-1, *gate.shape[1:]))


def _groups(format: WeightFormat, k: int) -> int:
    """Groups of the padded inputs; one group per output stays one."""
    if format.group == k and k not in GROUPS:
        return 1
    return -(-k // UNIT) * UNIT // format.group if format.group <= UNIT else k // format.group


def _stored(format: WeightFormat, data: AnyArray) -> AnyArray:
    if format.kind == "int8":
        return data.view(np.uint8) ^ np.uint8(128)
    if format.kind == "fp8_e4m3" and bool(((data.view(np.uint8) & np.uint8(127)) == 127).any()):
        raise UsageError("a weight in fp8_e4m3 holds a NaN", "the checkpoint is damaged: fetch it again")
    if format.kind in ("int4", "nf4"):
        assert int(data.max(initial=0)) < 16, int(data.max())
    return data.view({4: np.uint8, 8: np.uint8, 16: np.uint16, 32: np.uint32}[_BITS[format.kind]])


def _packed_codes(format: WeightFormat, codes: AnyArray) -> U8Array:
    bits = _BITS[format.kind]
    axes = codes.reshape(-1, 2, 8, codes.shape[1] // UNIT, 4, 2, 4, 2)
    if bits == 8:
        # Two steps to a vector: the halves of a step are words of it.
        split = axes.reshape(*axes.shape[:4], 2, 2, 2, 4, 2)
        return np.ascontiguousarray(split.transpose(0, 3, 4, 2, 7, 5, 1, 6, 8)).reshape(-1).view(np.uint8)
    order = _ORDERS["f16" if bits == 16 else format.kind]
    flat: AnyArray = np.ascontiguousarray(axes.transpose(order)).reshape(-1)
    if bits == 4:
        pairs: U8Array = flat.view(np.uint8).reshape(-1, 2)
        joined: U8Array = pairs[:, 0] | (pairs[:, 1] << np.uint8(4))
        return joined
    return flat.view(np.uint8)


def _unpacked_codes(format: WeightFormat, packed: U8Array, n: int, k: int) -> AnyArray:
    """The inverse of `_packed_codes`: [n, k] as stored, padded."""
    bits = _BITS[format.kind]
    shape = n // PANEL, 2, 8, k // UNIT, 4, 2, 4, 2
    if bits == 8:
        split = (*shape[:4], 2, 2, 2, 4, 2)
        order = (0, 3, 4, 2, 7, 5, 1, 6, 8)
        bytes_of = packed.reshape([split[axis] for axis in order]).transpose(np.argsort(order))
        return np.ascontiguousarray(bytes_of).reshape(n, k)
    flat: AnyArray = packed.view({16: np.uint16, 32: np.uint32}.get(bits, np.uint8))
    if bits == 4:
        flat = np.stack((packed & np.uint8(15), packed >> np.uint8(4)), axis=1).reshape(-1)
    order_ = _ORDERS["f16" if bits == 16 else format.kind]
    axes = flat.reshape([shape[axis] for axis in order_]).transpose(np.argsort(order_))
    return np.ascontiguousarray(axes).reshape(n, k)


def _meaning(format: WeightFormat, codes: AnyArray) -> F32Array:
    """What each code stands for before its group's zero and scale."""
    if format.kind == "nf4":
        table = np.array(NF4_VALUES, np.float32)
        named: F32Array = table[codes]
        return named
    if format.kind == "fp8_e4m3":
        # Exponent and mantissa in their places, with an exponent's bias that the product mends.
        wide = codes.astype(np.uint32)
        bits = (wide & np.uint32(0x80)) << np.uint32(24) | (wide & np.uint32(0x7F)) << np.uint32(20)
        return bits.view(np.float32) * np.float32(2.0**120)
    middle = {"int8": 128, "int4": 8}[format.kind] if format.kind == "int8" or format.zero == "none" else 0
    return codes.astype(np.float32) - np.float32(middle)


def _from_sums(values: AnyArray, groups: int) -> AnyArray:
    """The inverse of `_by_sums`: [n, groups]."""
    return values.reshape(-1, groups, 4, 2, 2).transpose(0, 3, 2, 4, 1).reshape(-1, groups)


def _from_codes(values: U8Array, groups: int) -> AnyArray:
    """The inverse of `_by_codes`: [n, groups]."""
    return values.reshape(-1, groups, 8, 2).transpose(0, 3, 2, 1).reshape(-1, groups)


def _by_sums(rows: AnyArray) -> U8Array:
    """[n, groups] as bytes, of each panel and group in the order t, half, element."""
    axes = rows.reshape(-1, 2, 4, 2, rows.shape[1])
    return np.ascontiguousarray(axes.transpose(0, 4, 2, 1, 3)).reshape(-1).view(np.uint8)


def _by_codes(rows: AnyArray) -> U8Array:
    """[n, groups] as bytes, of each panel and group in the order g, half."""
    axes = rows.reshape(-1, 2, 8, rows.shape[1])
    return np.ascontiguousarray(axes.transpose(0, 3, 2, 1)).reshape(-1).view(np.uint8)


def _padded(rows: AnyArray, columns: int) -> AnyArray:
    """Rows with zeros added up to whole panels and this many columns."""
    return np.pad(rows, ((0, -rows.shape[0] % PANEL), (0, columns - rows.shape[1])))
