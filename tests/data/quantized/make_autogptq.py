"""Writes autogptq.safetensors: Linears quantized and packed by AutoGPTQ 0.7.1, and the values that it computes with.

Run with auto-gptq==0.7.1 (no dependencies), transformers==4.48.3, torch and safetensors: `python make_autogptq.py`.
"""

import torch
from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear
from auto_gptq.quantization.gptq import GPTQ
from safetensors.torch import save_file

K, N, GROUP = 128, 32, 32
torch.cuda.synchronize = lambda *args: None

tensors = {}
for kind, bits, sym, desc_act in (
    ("sym", 4, True, False), ("asym", 4, False, False), ("desc_act", 4, True, True), ("sym8", 8, True, False),
):  # fmt: skip
    torch.manual_seed(len(kind))
    linear = torch.nn.Linear(K, N, bias=False)
    torch.nn.init.normal_(linear.weight, std=0.05)
    solver = GPTQ(linear)
    solver.quantizer.configure(bits, perchannel=True, sym=sym, mse=False)
    x = torch.randn(512, K) * (0.1 + torch.rand(K))
    solver.add_batch(x, linear(x))
    scales, zeros, g_idx = solver.fasterquant(percdamp=0.01, group_size=GROUP, actorder=desc_act, static_groups=False)
    module = QuantLinear(bits, GROUP, K, N, True, kernel_switch_threshold=0)
    linear.half()
    module.pack(linear, scales, zeros, g_idx)
    module.eval()
    module.kernel_switch_threshold = 0
    values = module(torch.eye(K).half()).t()
    for name in ("qweight", "qzeros", "scales", "g_idx", "bias"):
        tensors[f"{kind}.{name}"] = getattr(module, name).contiguous()
    tensors[f"{kind}.values"] = values.half().contiguous()
save_file(tensors, "autogptq.safetensors", {"producer": "auto-gptq 0.7.1"})
