"""How formats and dtypes are called in the kernels' text, and which sizes of heads and blocks there are kernels for."""

from __future__ import annotations

from ..formats import KV_BYTES

# Storage format -> C++ type (prims.cuh), for activations and for KV.
ELEMENTS = {
    "f32": "float", "f16": "Half", "bf16": "Bf16", "fp8_e4m3": "E4m3", "fp8_e5m2": "E5m2", "int8": "Int8"
}  # fmt: skip
ELEMENT_BYTES = KV_BYTES
ACTIVATIONS = ("f32", "f16", "bf16")
EIGHT_BIT_KV = ("fp8_e4m3", "fp8_e5m2", "int8")
# Of attention, and of what stores K and V: those multiples of 32 that published models have.
HEAD_DIMS = (32, 64, 96, 128, 160, 192, 256)
LEAST_BLOCK = 16  # tokens; larger ones are powers of two


def refuse_heads(head_dim: int, block_size: int) -> str | None:
    """Why no kernel reads a cache of such heads and blocks, None if some do."""
    if head_dim not in HEAD_DIMS:
        return f"heads of {head_dim} dimensions; known are {', '.join(map(str, HEAD_DIMS))}"
    if block_size < LEAST_BLOCK or block_size & (block_size - 1):
        return f"blocks of {block_size} tokens; powers of two from {LEAST_BLOCK} on are known"
    return None


def block_bits(block_size: int) -> int:
    """How kernels are told it: 2 to this power."""
    return block_size.bit_length() - 1
