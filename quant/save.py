"""A quantized checkpoint in AutoAWQ's GEMM layout, written as it is computed: what transformers, vLLM and we load.

Tensors that are not quantized are stored in float16, as that layout has it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from ..kernels.errors import CheckpointError, UnsupportedModel
from ..kernels.formats import WeightFormat
from .calibrate import QuantizedBlock
from .card import CARD_NAME
from .formats import awq
from .formats.safetensors import open_files
from .formats.safetensors_write import SHARD_BYTES, PlannedTensor, SafetensorsWriter
from .scheme import module_format, quantized_linears
from .staging import disk_errors, write_file, write_json

_TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip


class AwqWriter:
    """A checkpoint folder in AutoAWQ's GEMM layout: what transformers, vLLM and we load.

    shapes    of the original checkpoint's tensors, by Hugging Face name
    linears   the modules that are quantized
    format    of the whole model, group -1 for one group per output
    scales    names of scales of the KV cache, which are measured on what is written and filled in by `fill_scales`
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, tuple[int, ...]],
        linears: Collection[str],
        format: WeightFormat,
        shard_bytes: int = SHARD_BYTES,
        scales: Sequence[str] = (),
    ) -> None:
        self._folder, self._format, self._scales = folder, format, scales
        self._skipped = sorted(quantized_linears(shapes).keys() - set(linears))
        self._files = SafetensorsWriter(folder, plan_awq(shapes, linears, format, scales), shard_bytes)

    def add_block(self, prefix: str, block: QuantizedBlock) -> None:
        """One quantized block; `prefix` is `model.layers.0.`."""
        for name, weight in block.linears.items():
            for part, array in awq.encode(weight).items():
                self._files.write(f"{prefix}{name}.{part}", array)
        for name, tensor in block.rest.items():
            self.add(prefix + name, tensor)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor that is kept: an embedding, a head, a norm. Stored in float16."""
        half = tensor.half()
        if not bool(torch.isfinite(half).all()):
            raise CheckpointError(f"`{name}` holds values that float16 cannot hold", "AWQ checkpoints are float16")
        self._files.write(name, half.numpy())

    def finish(self, config: Mapping[str, object], files: Mapping[str, bytes]) -> None:
        """Write `config.json` with its `quantization_config`, and the other files (tokenizer and the like) as given."""
        for name in self._scales:
            self._files.write(name, np.zeros(1, np.float32))  # which every reader takes for no scale at all
        self._files.finish()
        own = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
        own |= {"torch_dtype": "float16", "quantization_config": awq.config_of(self._format.group, self._skipped)}
        write_json(self._folder / "config.json", own)
        for name, content in files.items():
            write_file(self._folder / name, content)

    def close(self) -> None:
        """Give up: close the files."""
        self._files.close()


def plan_awq(
    shapes: Mapping[str, tuple[int, ...]], linears: Collection[str], format: WeightFormat, scales: Sequence[str] = ()
) -> tuple[PlannedTensor, ...]:
    """Every tensor of the AWQ checkpoint made from a checkpoint of these shapes.

    UnsupportedModel if a Linear does not fit into the layout.
    """
    plan = []
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if module not in linears:
            plan.append(PlannedTensor(name, "F16", shape))
            continue
        n, k = shape
        groups = k // module_format(format, k).group
        if n % 8:
            raise UnsupportedModel(f"`{module}` has {n} outputs, AWQ packs them by 8", "quantize to another layout")
        plan += [
            PlannedTensor(f"{module}.qweight", "I32", (k, n // 8)),
            PlannedTensor(f"{module}.qzeros", "I32", (groups, n // 8)),
            PlannedTensor(f"{module}.scales", "F16", (groups, n)),
        ]
    return (*plan, *(PlannedTensor(name, "F32", (1,)) for name in scales))


def fill_scales(folder: Path, scales: Mapping[str, float]) -> None:
    """Put the values of an AwqWriter's `scales` into their places, in a folder that nobody reads yet."""
    files = open_files(folder)
    for name, value in scales.items():
        tensor = files.tensors[name]
        with disk_errors(folder), tensor.path.open("r+b") as file:
            file.seek(tensor.offset)
            file.write(np.float32(value).tobytes())
            os.fsync(file.fileno())


def text_files(folder: Path) -> dict[str, bytes]:
    """The tokenizer, chat template and sampling defaults of a Hugging Face folder, by file name."""
    return {name: (folder / name).read_bytes() for name in _TEXT_FILES if (folder / name).is_file()}


def write_card(folder: Path, card: Mapping[str, object]) -> None:
    """Put the quality card, as measured on this very checkpoint, beside it."""
    write_json(folder / CARD_NAME, card)
