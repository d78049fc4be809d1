"""A folder with quantized Linears, seen as a checkpoint of ordinary tensors.

What its format stores of a Linear (codes, scales, zero points, group indices) is one weight under the name the Linear's
weight has in any checkpoint; the bias stays a tensor of its own. Everything else of the folder is as it is. So whoever
reads checkpoints needs not know that there are such formats.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...kernels.errors import CheckpointError
from ..tensor import Array, WeightTensor
from .linear import LinearFormat, read_bias
from .safetensors import SafetensorsFiles
from .stored import StoredTensor


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedFiles:
    """`tensors` by Hugging Face name; `modules` has the parts stored of each quantized Linear, by their last names."""

    tensors: Mapping[str, StoredTensor]
    files: SafetensorsFiles
    format: LinearFormat
    modules: Mapping[str, Mapping[str, Array]]

    def check_readable(self, name: str) -> None:
        """Raise UnsupportedModel if the tensor's type cannot be read."""
        if self._module_of(name) is None:
            self.files.check_readable(name)

    def read(self, name: str) -> WeightTensor:
        """The tensor; a quantized weight exactly as its producer means it."""
        module = self._module_of(name)
        if module is None:
            return self.files.read(name)
        if name == f"{module}.weight":
            return self.format.decode(module, self.modules[module]).weight
        bias = read_bias(module, self.modules[module], self.tensors[f"{module}.weight"].shape[0])
        assert bias is not None, name
        return bias

    def _module_of(self, name: str) -> str | None:
        """The quantized Linear whose weight or bias this is."""
        module, _, last = name.rpartition(".")
        return module if module in self.modules and last in ("weight", "bias") else None


def open_linears(files: SafetensorsFiles, format: LinearFormat, folder: Path) -> QuantizedFiles:
    """The checkpoint with its quantized Linears put together.

    CheckpointError if nothing is quantized after all, if a Linear is there twice, or if its parts do not fit together.
    """
    marker = format.parts[0]
    modules: dict[str, dict[str, Array]] = {
        name.removesuffix(f".{marker}"): {} for name in files.tensors if name.endswith(f".{marker}")
    }
    if not modules:
        raise CheckpointError(
            f"the config of `{folder}` says {format.name}, but no tensor is named `...{marker}`",
            "the config belongs to another checkpoint",
        )
    tensors: dict[str, StoredTensor] = {}
    sizes = dict.fromkeys(modules, 0)
    for name, tensor in files.tensors.items():
        found = _part_of(name, modules, format.parts)
        if found is None:
            tensors[name] = tensor
            continue
        module, last = found
        modules[module][last] = files.view(name)
        sizes[module] += tensor.nbytes if last != "bias" else 0
    for module, parts in modules.items():
        marked = files.tensors[f"{module}.{marker}"]
        if f"{module}.weight" in tensors:
            raise CheckpointError(f"`{folder}` has `{module}` twice: as `{marker}` and as `weight`")
        layout = format.layout(module, parts)
        shape = layout.shape or format.shape(module, {last: array.shape for last, array in parts.items()})
        weight = StoredTensor(
            f"{module}.weight", format.name, layout.format, shape, marked.path, marked.offset, sizes[module],
            layout.order,
        )  # fmt: skip
        tensors[weight.name] = weight
        bias = read_bias(module, parts, shape[0])
        if bias is not None:
            stored = files.tensors[f"{module}.bias"]
            tensors[stored.name] = stored
    return QuantizedFiles(tensors, files, format, modules)


def _part_of(name: str, modules: Container[str], parts: tuple[str, ...]) -> tuple[str, str] | None:
    """(module, part) of a quantized Linear's tensor, None for any other."""
    for part in parts:
        if name.endswith(f".{part}") and (module := name[: -len(part) - 1]) in modules:
            return module, part
    return None
