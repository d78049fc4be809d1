"""How formats and dtypes are called in the kernels' text."""

from __future__ import annotations

from ..formats import KV_BYTES

# Storage format -> C++ type (prims.cuh), for activations and for KV.
ELEMENTS = {
    "f32": "float", "f16": "Half", "bf16": "Bf16", "fp8_e4m3": "E4m3", "fp8_e5m2": "E5m2", "int8": "Int8"
}  # fmt: skip
ELEMENT_BYTES = KV_BYTES
ACTIVATIONS = ("f32", "f16", "bf16")
EIGHT_BIT_KV = ("fp8_e4m3", "fp8_e5m2", "int8")
