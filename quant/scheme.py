"""What to quantize a model to: the method, the stored format, and which modules it is about.

The asked group size is the largest allowed, because it has to divide the inputs of every Linear and one value holds for
a whole file in AutoAWQ's and GPTQ's layouts. A model with 576 inputs, asked for 128, is stored with 64.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..kernels.errors import UnsupportedModel, UsageError
from ..kernels.formats import WeightFormat

METHODS = ("rtn", "awq")
GROUP_SIZES = (128, 64, 32)  # those that kernels read, here and elsewhere; besides -1, one group per output

_DECODER_WEIGHT = re.compile(r"(model\.layers\.\d+\..+)\.weight")


@dataclass(frozen=True, slots=True)
class Scheme:
    """What the user asks for.

    group_size         the largest group of inputs that may share a scale, -1 for one group per output
    symmetric          zero point 8 everywhere instead of one per group
    search_clip        for awq: whether the range of each group is searched, or reaches over all its weights
    strict_group_size  whether a group size that does not divide every Linear is an error
    ignore             modules to leave as they are: parts of their names, or `re:` and a regular expression
    """

    method: str = "awq"
    bits: int = 4
    group_size: int = 128
    symmetric: bool = False
    search_clip: bool = True
    strict_group_size: bool = False
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(f"unknown quantization method `{self.method}`", f"known: {', '.join(METHODS)}")
        if self.bits != 4:
            raise UsageError(f"{self.method} with {self.bits} bits", "supported: 4")
        if self.group_size not in (*GROUP_SIZES, -1):
            raise _no_group_size(self.group_size)
        for pattern in self.ignore:
            _matcher(pattern)

    def linears(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """The modules to quantize and their numbers of inputs, as `quantized_linears` without those to ignore.

        UsageError if something is to be ignored that is not there, or if nothing is left.
        """
        linears = quantized_linears(shapes)
        ignored: set[str] = set()
        for pattern in self.ignore:
            matches = _matcher(pattern)
            found = {module for module in linears if matches(module)}
            others = {name.removesuffix(".weight") for name in shapes} | {"lm_head"}  # never quantized, whoever asks
            if not found and not any(matches(name) for name in others):
                raise UsageError(f"no module matches `--ignore {pattern}`", f"modules are named like `{min(linears)}`")
            ignored |= found
        if len(ignored) == len(linears):
            raise UsageError("--ignore leaves nothing to quantize", f"there are {len(linears)} Linears")
        return {module: width for module, width in linears.items() if module not in ignored}

    def format(self, widths: Iterable[int]) -> WeightFormat:
        """The one format in which Linears of these numbers of inputs are stored; group -1 is one group per output."""
        group = stored_group_size(self.group_size, widths, self.strict_group_size)
        return WeightFormat("int4", group, "none" if self.symmetric else "int")


def stored_group_size(asked: int, widths: Iterable[int], strict: bool) -> int:
    """The largest of GROUP_SIZES that is at most `asked` and divides all widths; -1 stays.

    UsageError for what is none of them, or if `strict` and another is stored; UnsupportedModel if 32 does not divide.
    """
    distinct = sorted(set(widths))
    if asked not in (*GROUP_SIZES, -1):
        raise _no_group_size(asked)
    least = GROUP_SIZES[-1]
    odd = [width for width in distinct if width % least]
    if odd:
        raise UnsupportedModel(
            f"a Linear with {odd[0]} inputs cannot be quantized in groups: {least} does not divide {odd[0]}"
        )
    if asked == -1:
        return asked
    stored = next(size for size in GROUP_SIZES if size <= asked and all(width % size == 0 for width in distinct))
    if strict and stored != asked:
        undivided = next(width for width in distinct if width % asked)
        raise UsageError(
            f"group size {asked} does not divide {undivided} inputs",
            f"use --group-size {stored}, or leave out --strict-group-size",
        )
    return stored


def _no_group_size(asked: int) -> UsageError:
    return UsageError(f"group size {asked}", f"use {', '.join(map(str, GROUP_SIZES))}, or -1 for whole outputs")


def module_format(format: WeightFormat, k: int) -> WeightFormat:
    """The format of a Linear with k inputs: group -1 is k."""
    return WeightFormat(format.kind, k if format.group == -1 else format.group, format.zero)


def quantized_linears(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The modules to quantize and their numbers of inputs: every Linear of the decoder layers.

    `shapes` is by tensor name. Embeddings, the head and norms are kept as they are: they are few, and they matter most.
    """
    linears = {}
    for name, shape in shapes.items():
        match = _DECODER_WEIGHT.fullmatch(name)
        if match is not None and len(shape) == 2:
            linears[match[1]] = shape[1]
    if not linears:
        raise UnsupportedModel("no Linear to quantize: no matrix is named `model.layers.N...weight`")
    return linears


def _matcher(pattern: str) -> Callable[[str], bool]:
    """Whether a module's name is meant by an `ignore` pattern."""
    if not pattern.startswith("re:"):
        return lambda module: pattern in module
    try:
        compiled = re.compile(pattern[3:])
    except re.error as error:
        raise UsageError(f"`--ignore {pattern}` is no regular expression: {error}") from error
    return lambda module: compiled.search(module) is not None
