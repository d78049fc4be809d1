"""The layouts of AutoGPTQ and GPTQModel: `gptq` (v1) and `gptq_v2`, both ways.

qweight int32 [k * bits / 32, n] packed along inputs, qzeros int32 [groups, n * bits / 32] packed along outputs,
scales float16 [groups, n], g_idx int32 [k] (the group of each input; may be missing), bias often stored although zero.
value = (q - z) * scale. Version 1 stores z - 1: whole words minus 0x11111111, so adding the same constant to the words
is exact also for z = 0, where a nibble borrows from its neighbour. AutoGPTQ itself wrote garbage in that case, which
cannot be told apart; hence the warning.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...kernels.errors import CheckpointError, UnsupportedModel
from ...kernels.formats import WeightFormat
from ..tensor import Array, WeightTensor
from .fields import Config, compile_pattern, read_bool, read_int, read_object, read_text
from .groups import Groups, I32Array, consecutive_groups, equal_groups, indexed_groups
from .linear import SCALES, DecodedLinear, LinearLayout, check_shape, part, read_bias, read_scales
from .words import codes_to_int8, int8_to_codes, pack_words, unpack_words

log = logging.getLogger(__name__)

_ONES = {4: 0x11111111, 8: 0x01010101}
_VERSIONS = {"gptq": 1, "gptq_v2": 2}
_AUTO_ROUND = {"auto_round:auto_gptq": "gptq", "auto_round:gptq": "gptq"}


@dataclass(frozen=True, slots=True)
class Override:
    """What holds for modules whose name matches instead of the general setting; `skip` means not quantized."""

    pattern: re.Pattern[str]
    skip: bool
    bits: int
    group_size: int


@dataclass(frozen=True, slots=True)
class GptqFormat:
    """`version` 1 or 2; the first matching override wins; `only` are ends of quantized modules' names, () for all."""

    version: int
    bits: int
    group_size: int
    lm_head: bool = False
    only: tuple[str, ...] = ()
    overrides: tuple[Override, ...] = ()

    @property
    def name(self) -> str:
        return f"GPTQ v{self.version}, {self.bits} bits"

    @property
    def parts(self) -> tuple[str, ...]:
        return "qweight", "qzeros", "scales", "g_idx", "bias"

    def covers(self, module: str) -> bool:
        override = self._override(module)
        if override is not None:
            return not override.skip
        if module == "lm_head":
            return self.lm_head
        return not self.only or module.endswith(self.only)

    def shape(self, module: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        bits, _ = self._setting(module)
        rows, n = shapes["qweight"]
        return n, rows * 32 // bits

    def layout(self, module: str, tensors: Mapping[str, Array]) -> LinearLayout:
        bits, _ = self._setting(module)
        _, k = self.shape(module, {"qweight": part(module, tensors, "qweight", ("int32",)).shape})
        groups = self._groups(module, tensors, k, len(part(module, tensors, "scales", SCALES)))
        zeros = unpack_words(self._true_zeros(part(module, tensors, "qzeros", ("int32",)), bits), bits)
        return LinearLayout(_weight_format(bits, groups.common_size, zeros), groups.order)

    def decode(self, module: str, tensors: Mapping[str, Array]) -> DecodedLinear:
        bits, _ = self._setting(module)
        qweight = part(module, tensors, "qweight", ("int32",))
        qzeros = part(module, tensors, "qzeros", ("int32",))
        scales = read_scales(module, tensors, "scales")
        n, k = self.shape(module, {"qweight": qweight.shape})
        groups = self._groups(module, tensors, k, len(scales))
        count = len(groups.sizes)
        check_shape(module, "scales", scales, (count, n))
        check_shape(module, "qzeros", qzeros, (count, n * bits // 32))
        codes = unpack_words(qweight.T, bits)
        if groups.order is not None:
            codes = codes[:, groups.order]
        self._warn_of_zeros(module, qzeros, bits)
        zeros = unpack_words(self._true_zeros(qzeros, bits), bits).T
        group, (scales_, zeros_) = equal_groups(groups, scales.T, zeros)
        arrays = codes, np.ascontiguousarray(scales_), np.ascontiguousarray(zeros_)
        return DecodedLinear(_weight(module, bits, group, *arrays, groups.order), read_bias(module, tensors, n))

    def _groups(self, module: str, tensors: Mapping[str, Array], k: int, count: int) -> Groups:
        if "g_idx" not in tensors:
            return consecutive_groups(k, self._setting(module)[1])
        g_idx = part(module, tensors, "g_idx", ("int32", "int64"), ndim=1)
        check_shape(module, "g_idx", g_idx, (k,))
        return indexed_groups(module, g_idx, count)

    def _warn_of_zeros(self, module: str, qzeros: Array, bits: int) -> None:
        if self.version == 1 and (unpack_words(qzeros, bits) == (1 << bits) - 1).any():
            log.warning(
                "%s: a stored zero point of %d means 0 in GPTQ v1; files of AutoGPTQ itself are damaged in this case",
                module,
                (1 << bits) - 1,
            )

    def _true_zeros(self, qzeros: Array, bits: int) -> Array:
        if self.version == 2:
            return qzeros
        words: Array = (qzeros.view(np.uint32) + np.uint32(_ONES[bits])).view(np.int32)
        return words

    def _override(self, module: str) -> Override | None:
        return next((item for item in self.overrides if item.pattern.match(module)), None)

    def _setting(self, module: str) -> tuple[int, int]:
        override = self._override(module)
        return (self.bits, self.group_size) if override is None else (override.bits, override.group_size)


def detect(config: Config) -> GptqFormat | None:
    """The format that a quantization config of AutoGPTQ, GPTQModel or AutoRound describes, None if it is not GPTQ's.

    UnsupportedModel for a layout or a number of bits that is not read here.
    """
    method = read_text(config, "quant_method", "method", default="gptq" if "desc_act" in config else "")
    if method == "auto-round":
        packing = read_text(config, "packing_format", default="auto_round")
        if packing == "auto_round:auto_awq":
            return None
        layout = _AUTO_ROUND.get(packing, packing)
    elif method == "gptq":
        layout = read_text(config, "checkpoint_format", "format", default="gptq")
        if read_bool(config, "is_marlin_format", False):
            layout = "marlin"
    else:
        return None
    if layout not in _VERSIONS:
        raise UnsupportedModel(f"GPTQ layout `{layout}`", f"supported: {', '.join(_VERSIONS)}")
    bits, group_size = _checked(read_int(config, "bits"), read_int(config, "group_size"))
    only = config.get("modules_in_block_to_quantize")
    return GptqFormat(
        _VERSIONS[layout],
        bits,
        group_size,
        read_bool(config, "lm_head", False),
        tuple(_flat(only)) if only is not None else (),
        (*_dynamic(config, bits, group_size), *_extra(config, bits, group_size)),
    )


def encode(weight: WeightTensor, version: int) -> dict[str, Array]:
    """`qweight`, `qzeros`, `scales` and `g_idx`; `decode` gives back equal values bit for bit.

    A zero point of 0 in version 1 is written as GPTQModel does it, see above.
    """
    format = weight.format
    n, k = weight.shape
    bits = 8 if format.kind == "int8" else 4
    if format.kind not in ("int4", "int8") or format.zero not in ("int", "none"):
        raise UnsupportedModel(f"weight format {format.name} in a GPTQ file", "GPTQ stores integers and zero points")
    if n % (32 // bits) or k % (32 // bits):
        raise UnsupportedModel(f"a Linear of {k} inputs and {n} outputs in a GPTQ file", "GPTQ packs whole words")
    assert weight.scales is not None
    half = 1 << bits - 1
    codes = int8_to_codes(weight.data) if bits == 8 else weight.data
    zeros = weight.zeros if weight.zeros is not None else np.full(weight.scales.shape, half, np.uint8)
    g_idx = np.arange(k, dtype=np.int32) // np.int32(format.group)
    if weight.order is not None:
        inverse = np.argsort(weight.order)
        codes, g_idx = codes[:, inverse], g_idx[inverse]
    words = pack_words(np.ascontiguousarray(zeros.T), bits)
    if version == 1:
        words = (words.view(np.uint32) - np.uint32(_ONES[bits])).view(np.int32)
    return {
        "qweight": np.ascontiguousarray(pack_words(codes, bits).T),
        "qzeros": words,
        "scales": np.ascontiguousarray(weight.scales.T),
        "g_idx": g_idx,
    }


def config_of(version: int, group_size: int, bits: int = 4, symmetric: bool = True) -> dict[str, object]:
    """The `quantization_config` of a checkpoint written with `encode`."""
    return {
        "quant_method": "gptq",
        "checkpoint_format": next(name for name, number in _VERSIONS.items() if number == version),
        "bits": bits,
        "group_size": group_size,
        "sym": symmetric,
        "desc_act": False,
        "lm_head": False,
    }


def _weight(
    module: str, bits: int, group: int, codes: Array, scales: Array, zeros: Array, order: I32Array | None
) -> WeightTensor:
    format = _weight_format(bits, group, zeros)
    if bits == 4:
        return WeightTensor(format, codes, scales, zeros if format.zero == "int" else None, order)
    if (zeros != 128).any():
        raise UnsupportedModel(f"`{module}` is asymmetric GPTQ with 8 bits", "supported: symmetric, or 4 bits")
    return WeightTensor(format, codes_to_int8(codes), scales, order=order)


def _weight_format(bits: int, group: int, zeros: Array) -> WeightFormat:
    if bits == 8:
        return WeightFormat("int8", group)
    return WeightFormat("int4", group, "none" if (zeros == 8).all() else "int")


def _checked(bits: int, group_size: int) -> tuple[int, int]:
    if bits not in _ONES:
        raise UnsupportedModel(f"GPTQ with {bits} bits", "supported: 4 and 8")
    if group_size < 1 and group_size != -1:
        raise CheckpointError(f"`group_size` of the quantization config is {group_size}, expected -1 or at least 1")
    return bits, group_size


def _dynamic(config: Config, bits: int, group_size: int) -> list[Override]:
    """GPTQModel's overrides: `-:pattern` skips, `+:pattern` or a bare pattern changes settings."""
    overrides = []
    dynamic = read_object(config, "dynamic")
    for key in dynamic:
        skip = key.startswith("-:")
        pattern = compile_pattern(key.removeprefix("-:").removeprefix("+:"))
        own = {} if skip else read_object(dynamic, key)
        overrides.append(_override(pattern, skip, own, bits, group_size))
    return overrides


def _extra(config: Config, bits: int, group_size: int) -> list[Override]:
    """AutoRound's overrides: module names with their settings, 16 bits or more for what is not quantized."""
    overrides = []
    extra = read_object(config, "extra_config")
    for name in extra:
        own = read_object(extra, name)
        skip = read_int(own, "bits", default=bits) >= 16
        overrides.append(_override(compile_pattern(f"{name}$"), skip, own, bits, group_size))
    return overrides


def _override(pattern: re.Pattern[str], skip: bool, own: Config, bits: int, group_size: int) -> Override:
    if skip:
        return Override(pattern, True, bits, group_size)
    return Override(
        pattern, False, *_checked(read_int(own, "bits", default=bits), read_int(own, "group_size", default=group_size))
    )


def _flat(names: object) -> list[str]:
    """The strings in a list of lists of names."""
    if isinstance(names, str):
        return [names]
    if not isinstance(names, list):
        raise CheckpointError(f"`modules_in_block_to_quantize` of the quantization config is {names!r}")
    return [name for item in names for name in _flat(item)]
