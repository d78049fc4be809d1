"""Tiny checkpoints in the formats of quantization tools, made from ordinary ones by rounding."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as torch_save

from llmctl.kernels.formats import NF4_VALUES, WeightFormat
from llmctl.quant.formats import awq, compressed_tensors, gptq
from llmctl.quant.scheme import quantized_linears
from llmctl.quant.solve import rtn
from llmctl.quant.tensor import Array, WeightTensor

KINDS = ("awq", "gptq", "gptq-sym", "gptq-v2-desc-act", "compressed", "compressed-sym")


def write_quantized(folder: Path, kind: str, group: int = 32) -> dict[str, np.ndarray]:
    """Turn the checkpoint in `folder` into one of this kind, routers left alone; its tensors' values as float32."""
    tensors = load_file(folder / "model.safetensors")
    linears = quantized_linears({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    format = WeightFormat("int4", group, "none" if kind.endswith("sym") else "int")
    rng = np.random.default_rng(3)
    stored: dict[str, Array] = {}
    values: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module not in linears or module.endswith("mlp.gate"):
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


FLOAT_KINDS = ("fp8-block", "fp8-channel", "fp8-tensor", "fbgemm", "modelopt", "nf4")
_BLOCK = 32


def write_float(folder: Path, kind: str) -> dict[str, np.ndarray]:
    """As `write_quantized`, with float8 or NF4 weights and what else their tools put beside them."""
    tensors = load_file(folder / "model.safetensors")
    linears = quantized_linears({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    stored: dict[str, torch.Tensor] = {}
    values: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module not in linears:
            stored[name] = tensor.bfloat16()
            values[name] = stored[name].float().numpy()
            continue
        parts, meant = _nf4(tensor) if kind == "nf4" else _float8(tensor, kind)
        stored |= {f"{module}.{part}": array.contiguous() for part, array in parts.items()}
        values[name] = meant.numpy()
    torch_save(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    if kind == "modelopt":
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    else:
        config["quantization_config"] = _FLOAT_CONFIGS[kind]
    (folder / "config.json").write_text(json.dumps(config))
    return values


_FLOAT_CONFIGS: dict[str, dict[str, object]] = {
    "fp8-block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK]},
    "fp8-tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "fbgemm": {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
    "fp8-channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
            }
        },
        "ignore": ["lm_head"],
    },
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}


def _float8(weight: torch.Tensor, kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(parts, float32 values): codes times a scale for each block, output, or the whole."""
    n, k = weight.shape
    if kind == "fp8-block":
        blocks = weight.reshape(n // _BLOCK, _BLOCK, k // _BLOCK, _BLOCK)
        scales = blocks.abs().amax((1, 3)) / 448
        spread = scales.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)
        scales[0, 0] *= 1.5
        spread[:_BLOCK, :_BLOCK] *= 1.5
    elif kind in ("fp8-channel", "fbgemm"):
        scales = weight.abs().amax(1, keepdim=True) / 448
        scales = scales.bfloat16().float() if kind == "fp8-channel" else scales
        spread = scales
    else:
        scales = spread = weight.abs().max() / 448
    codes = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    name = "weight_scale_inv" if kind == "fp8-block" else "weight_scale"
    parts = {"weight": codes, name: scales.bfloat16() if kind == "fp8-channel" else scales}
    if kind in ("fp8-tensor", "modelopt"):
        parts["input_scale"] = torch.tensor(0.5)
    return parts, codes.float() * spread


def _nf4(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    (n, k), table = weight.shape, torch.tensor(NF4_VALUES)
    groups = weight.reshape(-1, _BLOCK)
    absmax = groups.abs().amax(1)
    codes = ((groups / absmax[:, None]).unsqueeze(-1) - table).abs().argmin(-1).to(torch.uint8)
    pairs = codes.reshape(-1, 2)
    state = {"quant_type": "nf4", "blocksize": _BLOCK, "dtype": "bfloat16", "shape": [n, k]}
    parts = {
        "weight": (pairs[:, 0] << 4 | pairs[:, 1])[:, None],
        "weight.absmax": absmax,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return parts, (table[codes.long()] * absmax[:, None]).reshape(n, k)
