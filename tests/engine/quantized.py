"""Tiny checkpoints in the formats of quantization tools, made from ordinary ones by rounding."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file

from llmctl.kernels.formats import WeightFormat
from llmctl.quant.formats import awq, compressed_tensors, gptq
from llmctl.quant.scheme import quantized_linears
from llmctl.quant.solve import rtn
from llmctl.quant.tensor import Array, WeightTensor

KINDS = ("awq", "gptq", "gptq-sym", "gptq-v2-desc-act", "compressed", "compressed-sym")


def write_quantized(folder: Path, kind: str, group: int = 32) -> dict[str, np.ndarray]:
    """Turn the checkpoint in `folder` into one of this kind; the values of its tensors as float32."""
    tensors = load_file(folder / "model.safetensors")
    linears = quantized_linears({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    format = WeightFormat("int4", group, "none" if kind.endswith("sym") else "int")
    rng = np.random.default_rng(3)
    stored: dict[str, Array] = {}
    values: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module not in linears:
            half = tensor.half()
            stored[name], values[name] = half.numpy(), half.float().numpy()
            continue
        weight = rounded(tensor, format, rng.permutation(linears[module]) if "desc-act" in kind else None)
        values[name] = weight.dequantize()
        for part, array in encode(kind, weight).items():
            stored[f"{module}.{part}"] = array
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = config_of(kind, format)
    (folder / "config.json").write_text(json.dumps(config))
    return values


def rounded(tensor: torch.Tensor, format: WeightFormat, order: np.ndarray | None) -> WeightTensor:
    """The tensor [n, k] rounded to nearest, with its inputs grouped in this order."""
    if order is None:
        return rtn.quantize(tensor, format)
    weight = rtn.quantize(tensor[:, torch.from_numpy(order)], format)
    return dataclasses.replace(weight, order=order.astype(np.int32))


def encode(kind: str, weight: WeightTensor) -> dict[str, Array]:
    if kind == "awq":
        return awq.encode(weight)
    if kind.startswith("compressed"):
        return compressed_tensors.encode(weight)
    return gptq.encode(weight, 2 if "v2" in kind else 1)


def config_of(kind: str, format: WeightFormat) -> dict[str, object]:
    if kind == "awq":
        return awq.config_of(format.group)
    if kind.startswith("compressed"):
        return compressed_tensors.config_of(format)
    return gptq.config_of(2 if "v2" in kind else 1, format.group, symmetric=format.zero == "none")
