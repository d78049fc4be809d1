"""Writes autoawq.safetensors: Linears packed by AutoAWQ 0.2.9, and the values that it computes with.

Run with autoawq==0.2.9 (no dependencies), torch and safetensors: `python make_autoawq.py`.
"""

import torch
from awq.modules.linear import WQLinear_GEMM, WQLinear_GEMV
from awq.quantize.quantizer import AwqQuantizer
from awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import save_file

K, N, GROUP = 128, 64, 64

tensors = {}
for kind, group in (("gemm", GROUP), ("gemm_channel", K), ("gemv", GROUP)):
    torch.manual_seed(len(kind))
    linear = torch.nn.Linear(K, N, bias=True)
    torch.nn.init.normal_(linear.weight, std=0.05)
    linear.half()
    quantizer = AwqQuantizer.__new__(AwqQuantizer)
    quantizer.group_size, quantizer.zero_point, quantizer.w_bit = group, True, 4
    linear.weight.data, scales, zeros = quantizer.pseudo_quantize_tensor(linear.weight.data)
    if kind == "gemv":
        module = WQLinear_GEMV.from_linear(linear, 4, group, scales=scales, zeros=zeros)
        values = linear.weight.data
    else:
        module = WQLinear_GEMM.from_linear(
            linear, 4, group, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
        )
        values = dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, group).t()
    for name in ("qweight", "qzeros", "scales", "bias"):
        tensors[f"{kind}.{name}"] = getattr(module, name).contiguous()
    tensors[f"{kind}.values"] = values.half().contiguous()
save_file(tensors, "autoawq.safetensors", {"producer": "autoawq 0.2.9"})
