"""compressed-tensors' `pack-quantized` layout (llm-compressor): integer weights, activations left alone, both ways.

weight_packed int32 [n, ceil(k * bits / 32)] packed along inputs, weight_scale [n, groups] in the model's dtype,
weight_shape int64 [2], for asymmetric weights weight_zero_point int32 [ceil(n * bits / 32), groups] packed along
outputs (int8 [n, groups] in old files), weight_g_idx int32 [k] in old files with activation order. Codes and zero
points are stored with 2**(bits - 1) added; value = (q - z) * scale.

Everything else that this family can say (quantized activations, rotations, sparsity, floating-point codes) changes what
the model computes, so it is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...kernels.errors import CheckpointError, UnsupportedModel
from ...kernels.formats import WeightFormat
from ..tensor import Array, WeightTensor
from .fields import Config, compile_pattern, read_bool, read_int, read_names, read_object, read_text
from .groups import Groups, consecutive_groups, equal_groups, indexed_groups
from .linear import SCALES, DecodedLinear, LinearLayout, check_shape, part, read_bias, read_scales
from .words import codes_to_int8, int8_to_codes, pack_words, unpack_words

_LINEAR = "Linear"  # the class name that targets use for every Linear
_STRATEGIES = ("group", "channel", "tensor")


@dataclass(frozen=True, slots=True)
class Target:
    """Modules: all Linears (`pattern` None), or those whose whole name matches."""

    pattern: re.Pattern[str] | None

    def matches(self, module: str) -> bool:
        return self.pattern is None or self.pattern.match(module) is not None


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """One of the config's groups: what its targets are quantized to; `group_size` -1 is one group per output."""

    targets: tuple[Target, ...]
    bits: int
    symmetric: bool
    per_tensor: bool
    group_size: int


@dataclass(frozen=True, slots=True)
class CompressedFormat:
    """A module belongs to the first scheme with a target that matches it."""

    schemes: tuple[WeightScheme, ...]
    ignored: tuple[Target, ...] = ()

    @property
    def name(self) -> str:
        return "compressed-tensors, " + " and ".join(sorted({f"{scheme.bits} bits" for scheme in self.schemes}))

    @property
    def parts(self) -> tuple[str, ...]:
        return "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx", "bias"

    def covers(self, module: str) -> bool:
        return not any(target.matches(module) for target in self.ignored) and self._scheme(module) is not None

    def shape(self, module: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
        n, words = shapes["weight_packed"]
        return n, words * 32 // self._existing(module).bits

    def layout(self, module: str, tensors: Mapping[str, Array]) -> LinearLayout:
        scheme = self._existing(module)
        _, k = self.shape(module, {"weight_packed": part(module, tensors, "weight_packed", ("int32",)).shape})
        count = part(module, _two_dimensional(tensors, "weight_scale"), "weight_scale", SCALES).shape[1]
        groups = _groups(module, tensors, scheme, k, count)
        return LinearLayout(_weight_format(scheme, groups.common_size), groups.order)

    def decode(self, module: str, tensors: Mapping[str, Array]) -> DecodedLinear:
        scheme = self._existing(module)
        packed = part(module, tensors, "weight_packed", ("int32",))
        shape = part(module, tensors, "weight_shape", ("int64", "int32"), ndim=1)
        n, k = self.shape(module, {"weight_packed": packed.shape})
        check_shape(module, "weight_shape", shape, (2,))
        if shape.tolist() != [n, k]:
            raise CheckpointError(
                f"`{module}.weight_shape` says {shape.tolist()}, the packed codes are {[n, k]}",
                "inputs that do not fill whole words are not supported",
            )
        scales = read_scales(module, _two_dimensional(tensors, "weight_scale"), "weight_scale")
        if scheme.per_tensor:
            check_shape(module, "weight_scale", scales, (1, 1))
            scales = np.repeat(scales, n, axis=0)
        groups = _groups(module, tensors, scheme, k, scales.shape[1])
        check_shape(module, "weight_scale", scales, (n, len(groups.sizes)))
        codes: Array = unpack_words(packed, scheme.bits)
        if groups.order is not None:
            codes = codes[:, groups.order]
        per_group: tuple[Array, ...] = (scales,)
        if not scheme.symmetric:
            per_group += (_zeros(module, tensors, scheme, scales.shape),)
        group, (scales_, *zeros) = equal_groups(groups, *per_group)
        bias = read_bias(module, tensors, n)
        if scheme.bits == 8:
            codes = codes_to_int8(codes)
        zeros_ = zeros[0] if zeros else None
        weight = WeightTensor(_weight_format(scheme, group), codes, scales_, zeros_, groups.order)
        return DecodedLinear(weight, bias)

    def _scheme(self, module: str) -> WeightScheme | None:
        return next((item for item in self.schemes if any(t.matches(module) for t in item.targets)), None)

    def _existing(self, module: str) -> WeightScheme:
        scheme = self._scheme(module)
        if scheme is None:
            raise CheckpointError(f"`{module}` is quantized, but no group of the quantization config is about it")
        return scheme


def detect(config: Config) -> CompressedFormat | None:
    """The format that a quantization config of compressed-tensors describes, None if it is another tool's.

    UnsupportedModel for anything but integer weights of 4 or 8 bits (8 bits symmetric) with untouched activations.
    """
    if read_text(config, "quant_method", default="") != "compressed-tensors":
        return None
    for key in ("sparsity_config", "transform_config"):
        if _says_something(read_object(config, key)):
            raise UnsupportedModel(f"compressed-tensors with {key}", "supported: weight-only integer quantization")
    layout = read_text(config, "format", default="pack-quantized")
    groups = read_object(config, "config_groups")
    if not groups:
        raise CheckpointError("the quantization config has no `config_groups`")
    schemes = tuple(_weight_scheme(name, read_object(groups, name), layout) for name in groups)
    return CompressedFormat(schemes, tuple(_target(name) for name in read_names(config, "ignore")))


def encode(weight: WeightTensor) -> dict[str, Array]:
    """The module's tensors, scales in float16; `decode` gives back equal values bit for bit."""
    format = weight.format
    n, k = weight.shape
    if format.kind not in ("int4", "int8") or format.zero not in ("int", "none"):
        raise UnsupportedModel(f"weight format {format.name} in a compressed-tensors file", "it stores integers")
    bits = 8 if format.kind == "int8" else 4
    if k % (32 // bits):
        raise UnsupportedModel(f"a Linear of {k} inputs in a compressed-tensors file", "whole words are packed")
    assert weight.scales is not None and weight.order is None
    codes = int8_to_codes(weight.data) if bits == 8 else weight.data
    tensors: dict[str, Array] = {
        "weight_packed": pack_words(codes, bits),
        "weight_scale": weight.scales,
        "weight_shape": np.array([n, k], np.int64),
    }
    if weight.zeros is not None:
        tensors["weight_zero_point"] = np.ascontiguousarray(pack_words(weight.zeros.T, bits).T)
    return tensors


def config_of(format: WeightFormat, ignored: tuple[str, ...] = ("lm_head",)) -> dict[str, object]:
    """The `quantization_config` of a checkpoint whose Linears were written with `encode` from this format."""
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": [_LINEAR],
                "weights": {
                    "num_bits": 8 if format.kind == "int8" else 4,
                    "type": "int",
                    "strategy": "group",
                    "group_size": format.group,
                    "symmetric": format.zero == "none",
                    "dynamic": False,
                },
                "input_activations": None,
                "output_activations": None,
            }
        },
        "ignore": list(ignored),
    }


def _weight_scheme(name: str, group: Config, layout: str) -> WeightScheme:
    layout = read_text(group, "format", default=layout)
    if layout != "pack-quantized":
        raise UnsupportedModel(f"compressed-tensors layout `{layout}`", "supported: pack-quantized")
    for key in ("input_activations", "output_activations"):
        if group.get(key) is not None:
            raise UnsupportedModel(f"compressed-tensors with {key} in {name}", "supported: weights only, such as W4A16")
    weights = read_object(group, "weights")
    bits, symmetric = read_int(weights, "num_bits"), read_bool(weights, "symmetric", True)
    kind = read_text(weights, "type", default="int")
    strategy = read_text(weights, "strategy", default="group" if weights.get("group_size") else "channel")
    if kind != "int" or bits not in (4, 8) or (bits == 8 and not symmetric) or strategy not in _STRATEGIES:
        raise UnsupportedModel(
            f"compressed-tensors weights of {bits} bits, type {kind}, strategy {strategy}"
            f"{'' if symmetric else ', asymmetric'}",
            "supported: 4-bit and symmetric 8-bit integers by group, channel or tensor",
        )
    if strategy == "tensor" and not symmetric:
        raise UnsupportedModel("compressed-tensors weights with one zero point per tensor", "supported: symmetric")
    group_size = read_int(weights, "group_size") if strategy == "group" else -1
    if group_size < 1 and group_size != -1:
        raise CheckpointError(f"`group_size` of {name} is {group_size}, expected -1 or at least 1")
    targets = tuple(_target(target) for target in read_names(group, "targets"))
    return WeightScheme(targets, bits, symmetric, strategy == "tensor", group_size)


def _target(name: str) -> Target:
    if name == _LINEAR:
        return Target(None)
    return Target(compile_pattern(name[3:] if name.startswith("re:") else re.escape(name) + "$"))


def _says_something(config: Config) -> bool:
    return bool(config.get("config_groups")) or read_text(config, "format", default="dense") != "dense"


def _groups(module: str, tensors: Mapping[str, Array], scheme: WeightScheme, k: int, count: int) -> Groups:
    if "weight_g_idx" in tensors:
        g_idx = part(module, tensors, "weight_g_idx", ("int32", "int64"), ndim=1)
        check_shape(module, "weight_g_idx", g_idx, (k,))
        if g_idx.astype(np.int64).min(initial=0) >= 0:  # -1 throughout: no order
            return indexed_groups(module, g_idx, count)
    return consecutive_groups(k, scheme.group_size)


def _weight_format(scheme: WeightScheme, group: int) -> WeightFormat:
    if scheme.bits == 8:
        return WeightFormat("int8", group)
    return WeightFormat("int4", group, "none" if scheme.symmetric else "int")


def _zeros(module: str, tensors: Mapping[str, Array], scheme: WeightScheme, shape: tuple[int, int]) -> Array:
    n, count = shape
    half = 1 << scheme.bits - 1
    stored = part(module, tensors, "weight_zero_point", ("int32", "int8"))
    if stored.dtype == np.int8:
        check_shape(module, "weight_zero_point", stored, shape)
        zeros: Array = stored.astype(np.int16) + half
        if zeros.size and not 0 <= int(zeros.min()) <= int(zeros.max()) < 2 * half:
            raise CheckpointError(
                f"`{module}.weight_zero_point` has zero points from {stored.min()} to {stored.max()}: "
                f"{scheme.bits} bits hold {-half} to {half - 1}"
            )
        return zeros.astype(np.uint8)
    check_shape(module, "weight_zero_point", stored, (-(-n * scheme.bits // 32), count))
    return np.ascontiguousarray(unpack_words(stored.T, scheme.bits)[:, :n].T)


def _two_dimensional(tensors: Mapping[str, Array], name: str) -> Mapping[str, Array]:
    """The tensors, with a scale of shape [1] (one per tensor) or [n] seen as a column."""
    array = tensors.get(name)
    if array is None or array.ndim != 1:
        return tensors
    return {**tensors, name: array[:, None]}
