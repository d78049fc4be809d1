"""bitsandbytes' NF4 Linears, read only.

weight uint8 [n * k / 2, 1] (in row order, the first of two codes in the high nibble), and beside it absmax, quant_map
and the state as JSON. A block of `blocksize` values shares an absmax; doubly quantized, the absmax are codes of blocks
of their own: nested_quant_map[code] * nested_absmax + nested_offset. What comes out is codes with a float32 scale per
block, so nothing is rounded again.

Blocks follow the flat weight: only where they divide a row are they groups of inputs, which is so in every model whose
layers have a multiple of 64 inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from ...kernels.errors import CheckpointError, UnsupportedModel
from ...kernels.formats import NF4_VALUES, WeightFormat
from ..tensor import Array, WeightTensor
from .fields import Config, read_bool, read_names, read_text
from .linear import DecodedLinear, LinearLayout, check_shape, part, read_bias

F32Array = npt.NDArray[np.float32]

_STATE = "weight.quant_state.bitsandbytes__nf4"


@dataclass(frozen=True, slots=True)
class Nf4Format:
    """`skipped` are parts of the names of modules that stay as they are."""

    skipped: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "bitsandbytes NF4"

    @property
    def parts(self) -> tuple[str, ...]:
        nested = "weight.nested_absmax", "weight.nested_quant_map"
        return "weight.absmax", "weight", "weight.quant_map", *nested, _STATE, "bias"

    def covers(self, module: str) -> bool:
        return module != "lm_head" and not any(skip in module for skip in self.skipped)

    def shape(self, module: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        raise CheckpointError(f"the shape of `{module}` is in its state, not in that of its tensors")

    def layout(self, module: str, tensors: Mapping[str, Array]) -> LinearLayout:
        state = _state(module, tensors)
        return LinearLayout(_format(state), shape=state.shape)

    def decode(self, module: str, tensors: Mapping[str, Array]) -> DecodedLinear:
        return decode_nf4(module, tensors)


def detect(config: Config) -> Nf4Format | None:
    """The format that a quantization config of bitsandbytes describes, None if it is another tool's.

    UnsupportedModel for its other ways: 8 bits, and FP4.
    """
    if read_text(config, "quant_method", default="") != "bitsandbytes":
        return None
    kind = read_text(config, "bnb_4bit_quant_type", default="fp4")  # as the tool takes a missing key
    if not read_bool(config, "load_in_4bit", False) or kind != "nf4":
        way = f"4 bits in {kind}" if read_bool(config, "load_in_4bit", False) else "8 bits"
        raise UnsupportedModel(f"the model is quantized by bitsandbytes to {way}", "supported of its ways: NF4")
    return Nf4Format(read_names(config, "llm_int8_skip_modules"))


class _State(msgspec.Struct, frozen=True):
    blocksize: int
    shape: tuple[int, int]
    nested_blocksize: int = 0
    nested_offset: float = 0.0


def decode_nf4(module: str, tensors: Mapping[str, Array]) -> DecodedLinear:
    """The module's weight in format nf4, exactly as bitsandbytes means it.

    tensors  by last part of their names: `weight`, `weight.absmax`, ...
    """
    state = _state(module, tensors)
    n, k = state.shape
    if k % state.blocksize != 0:
        raise UnsupportedModel(
            f"`{module}` has blocks of {state.blocksize} values across its rows of {k} inputs",
            "quantize it in another format",
        )
    table = part(module, tensors, "weight.quant_map", ("float32",), ndim=1)
    if not np.array_equal(table, np.array(NF4_VALUES, np.float32)):
        raise UnsupportedModel(f"`{module}` has a table of its own in `quant_map`", "supported: NF4's own values")
    packed = tensors.get("weight")
    if packed is None:
        raise CheckpointError(f"`{module}` has no tensor `weight`", "the file is incomplete: fetch the model again")
    pairs = np.ascontiguousarray(packed).view(np.uint8).reshape(-1)  # quant_storage may be any type
    check_shape(module, "weight", pairs, (n * k // 2,))
    codes = np.stack((pairs >> np.uint8(4), pairs & np.uint8(15)), axis=1).reshape(n, k)
    scales = _absmax(module, tensors, state, n * k // state.blocksize).reshape(n, k // state.blocksize)
    return DecodedLinear(WeightTensor(_format(state), codes, scales), read_bias(module, tensors, n))


def _format(state: _State) -> WeightFormat:
    return WeightFormat("nf4", state.blocksize, "none", "f32")


def _state(module: str, tensors: Mapping[str, Array]) -> _State:
    text = part(module, tensors, _STATE, ("uint8",), ndim=1).tobytes()
    try:
        state = msgspec.json.decode(text, type=_State)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"`{module}.{_STATE}` cannot be read: {error}", "fetch the model again") from error
    if state.blocksize < 1 or min(state.shape) < 1:
        raise CheckpointError(f"`{module}.{_STATE}` says blocks of {state.blocksize} in a weight of {state.shape}")
    return state


def _absmax(module: str, tensors: Mapping[str, Array], state: _State, count: int) -> Array:
    """float32 [count]."""
    if state.nested_blocksize == 0:
        plain = part(module, tensors, "weight.absmax", ("float32",), ndim=1)
        check_shape(module, "weight.absmax", plain, (count,))
        return plain
    codes = part(module, tensors, "weight.absmax", ("uint8",), ndim=1)
    check_shape(module, "weight.absmax", codes, (count,))
    table = part(module, tensors, "weight.nested_quant_map", ("float32",), ndim=1)
    check_shape(module, "weight.nested_quant_map", table, (256,))
    nested = part(module, tensors, "weight.nested_absmax", ("float32",), ndim=1)
    check_shape(module, "weight.nested_absmax", nested, (-(-count // state.nested_blocksize),))
    of_blocks: F32Array = np.repeat(nested.astype(np.float32), state.nested_blocksize)[:count]
    values: F32Array = table.astype(np.float32)[codes] * of_blocks
    return values + np.float32(state.nested_offset)
