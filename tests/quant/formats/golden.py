"""The Linears in tests/data/quantized: written by the tools themselves, with the values that those compute with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from llmctl.quant.tensor import Array

FOLDER = Path(__file__).parents[2] / "data" / "quantized"


def golden(tool: str, module: str) -> tuple[dict[str, Array], np.ndarray]:
    """The tensors of one module by the last part of their names, and its weight [n, k] as its producer unpacks it."""
    tensors: dict[str, Array] = {}
    with safe_open(FOLDER / f"{tool}.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict)
            if name.startswith(f"{module}."):
                tensor = file.get_tensor(name)
                bits = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
                tensors[name.removeprefix(f"{module}.")] = bits.numpy()
    return tensors, tensors.pop("values")


def golden_config(tool: str, kind: str) -> dict[str, object]:
    """The `quantization_config` that the tool wrote beside these Linears."""
    with safe_open(FOLDER / f"{tool}.safetensors", "np") as file:
        config: dict[str, object] = json.loads(file.metadata()["configs"])[kind]
        return config
