"""Writes compressed.safetensors: Linears packed by compressed-tensors 0.20.1, and the values that it unpacks.

Run with compressed-tensors==0.20.1, torch and safetensors: `python make_compressed.py`.
"""

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file

K, N = 128, 24
compressor = BaseCompressor.get_value_from_registry("pack-quantized")

tensors = {}
for kind, bits, symmetric, group, dtype in (
    ("sym", 4, True, 64, torch.bfloat16), ("asym", 4, False, 64, torch.bfloat16),
    ("asym16", 4, False, 32, torch.float16), ("channel", 4, True, None, torch.bfloat16),
    ("sym8", 8, True, 64, torch.bfloat16),
):  # fmt: skip
    torch.manual_seed(len(kind))
    weight = (torch.randn(N, K) * 0.05).to(dtype)
    strategy = "channel" if group is None else "group"
    args = QuantizationArgs(num_bits=bits, type="int", strategy=strategy, group_size=group, symmetric=symmetric)
    grouped = weight.view(N, -1, group or K)
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": weight, "weight_scale": scale.to(dtype), "weight_zero_point": zero}
    packed = compressor.compress(state, scheme)
    wide = {**packed, "weight_scale": packed["weight_scale"].float()}
    values = compressor.decompress(wide, scheme)["weight"]
    for name, tensor in packed.items():
        tensors[f"{kind}.{name}"] = tensor.contiguous()
    tensors[f"{kind}.values"] = values.float().contiguous()
save_file(tensors, "compressed.safetensors", {"producer": "compressed-tensors 0.20.1"})
