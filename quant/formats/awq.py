"""AutoAWQ's layouts: `gemm`, both ways, and `gemv`, read only.

gemm    qweight int32 [k, n / 8], qzeros int32 [groups, n / 8], scales float16 [groups, n]: packed along outputs, and
        within a word column i sits at nibble NIBBLE_OF_COLUMN[i]
gemv    qweight int32 [n, k / 8], qzeros int32 [n, z], scales float16 [n, 8 z]: packed along inputs in plain order,
        groups padded with zeros to 8 z

value = (q - z) * scale with q and z in 0..15, nothing added to stored zeros. The tile layouts of particular GPU kernels
(marlin, gemv_fast, llm-awq) are refused: their files are rare, and the same models exist as gemm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...kernels.errors import CheckpointError, UnsupportedModel
from ...kernels.formats import WeightFormat
from ..tensor import Array, WeightTensor
from .fields import Config, read_int, read_names, read_text
from .groups import consecutive_groups, equal_groups
from .linear import DecodedLinear, LinearLayout, check_shape, part, read_bias, read_scales
from .words import U8Array, Words, pack_words, unpack_words

_COLUMN_AT_NIBBLE = np.array([0, 2, 4, 6, 1, 3, 5, 7])
_NIBBLE_OF_COLUMN = np.argsort(_COLUMN_AT_NIBBLE)
_VERSIONS = ("gemm", "gemv")


@dataclass(frozen=True, slots=True)
class AwqFormat:
    """`version` is gemm or gemv; `group_size` -1 is one group per output; `skipped` are parts of module names."""

    version: str
    group_size: int
    skipped: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"AWQ {self.version}, 4 bits"

    @property
    def parts(self) -> tuple[str, ...]:
        return "qweight", "qzeros", "scales", "bias"

    def covers(self, module: str) -> bool:
        return module != "lm_head" and not any(skip in module for skip in self.skipped)

    def shape(self, module: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        rows, words = shapes["qweight"]
        return (words * 8, rows) if self.version == "gemm" else (rows, words * 8)

    def layout(self, module: str, tensors: Mapping[str, Array]) -> LinearLayout:
        _, k = self.shape(module, {"qweight": part(module, tensors, "qweight", ("int32",)).shape})
        return LinearLayout(WeightFormat("int4", consecutive_groups(k, self.group_size).common_size, "int"))

    def decode(self, module: str, tensors: Mapping[str, Array]) -> DecodedLinear:
        qweight = part(module, tensors, "qweight", ("int32",))
        qzeros = part(module, tensors, "qzeros", ("int32",))
        scales = read_scales(module, tensors, "scales")
        n, k = self.shape(module, {"qweight": qweight.shape})
        groups = consecutive_groups(k, self.group_size)
        count = len(groups.sizes)
        if self.version == "gemm":
            check_shape(module, "qzeros", qzeros, (count, n // 8))
            check_shape(module, "scales", scales, (count, n))
            codes, zeros, scales = _unpack_gemm(qweight), _unpack_gemm(qzeros), np.ascontiguousarray(scales.T)
        else:
            width = qzeros.shape[1]
            check_shape(module, "qzeros", qzeros, (n, max(width, -(-count // 8))))
            check_shape(module, "scales", scales, (n, width * 8))
            codes, zeros = unpack_words(qweight, 4), unpack_words(qzeros, 4)[:, :count]
            scales = scales[:, :count]
        group, (scales_, zeros_) = equal_groups(groups, scales, zeros)
        weight = WeightTensor(WeightFormat("int4", group, "int"), codes, scales_, zeros_)
        return DecodedLinear(weight, read_bias(module, tensors, n))


def detect(config: Config) -> AwqFormat | None:
    """The format that a quantization config of AutoAWQ describes, None if it is not AWQ's.

    UnsupportedModel for a layout or a number of bits that is not read here. Also takes the keys of the old
    `quant_config.json` (`w_bit`, `q_group_size`) and AutoRound's export to this layout.
    """
    method = read_text(config, "quant_method", "method", default="awq" if "w_bit" in config else "")
    packing = read_text(config, "packing_format", default="")
    if method == "auto-round" and packing == "auto_round:auto_awq":
        version = "gemm"
    elif method == "awq":
        version = read_text(config, "version", "format", "checkpoint_format", default="gemm")
        if read_text(config, "backend", default="autoawq") == "llm-awq":
            version = "llm-awq"
    else:
        return None
    if version not in _VERSIONS:
        raise UnsupportedModel(f"AWQ layout `{version}`", "supported: gemm and gemv; look for the model's gemm version")
    bits = read_int(config, "bits", "w_bit")
    if bits != 4:
        raise UnsupportedModel(f"AWQ with {bits} bits", "supported: 4")
    group_size = read_int(config, "group_size", "q_group_size")
    if group_size < 1 and group_size != -1:
        raise CheckpointError(f"`group_size` of the quantization config is {group_size}, expected -1 or at least 1")
    return AwqFormat(version, group_size, read_names(config, "modules_to_not_convert"))


def encode(weight: WeightTensor) -> dict[str, Array]:
    """`qweight`, `qzeros` and `scales` in the gemm layout; `decode` gives back equal values bit for bit."""
    format = weight.format
    n = weight.shape[0]
    if format.kind != "int4" or format.zero not in ("int", "none"):
        raise UnsupportedModel(f"weight format {format.name} in an AWQ file", "AWQ stores 4-bit codes and zero points")
    if n % 8:
        raise UnsupportedModel(f"a Linear of {n} outputs in an AWQ file", "AWQ packs 8 outputs into a word")
    assert weight.scales is not None and weight.order is None
    zeros = weight.zeros if weight.zeros is not None else np.full(weight.scales.shape, 8, np.uint8)
    return {
        "qweight": _pack_gemm(weight.data),
        "qzeros": _pack_gemm(zeros),
        "scales": np.ascontiguousarray(weight.scales.T),
    }


def config_of(group_size: int, skipped: Sequence[str] = ()) -> dict[str, object]:
    """The `quantization_config` of a checkpoint written with `encode`; `skipped` modules are not quantized."""
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "modules_to_not_convert": list(skipped) or None,
    }


def _unpack_gemm(words: Array) -> U8Array:
    """[rows, n / 8] words to [n, rows] codes."""
    rows, width = words.shape
    by_nibble = unpack_words(words, 4).reshape(rows, width, 8)
    codes: U8Array = by_nibble[:, :, _NIBBLE_OF_COLUMN].reshape(rows, width * 8).T
    return np.ascontiguousarray(codes)


def _pack_gemm(codes: Array) -> Words:
    """[n, rows] codes to [rows, n / 8] words."""
    n, rows = codes.shape
    by_column = codes.T.reshape(rows, n // 8, 8)
    return pack_words(by_column[:, :, _COLUMN_AT_NIBBLE].reshape(rows, n), 4)
