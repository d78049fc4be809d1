"""Our kernels as ops of torch, `torch.ops.llmctl.*`, that torch.compile can see through: importing this registers them.

Each has a schema, an implementation for a GPU (torch_cuda.py), one for a CPU in plain torch (torch_cpu.py) and one that
only knows shapes. `Library.impl` is used instead of torch's decorators, which cost ten times as much at every call.
The engine does not come through here: its ops are bound once, not called.

    rms_norm, add_rms_norm   x, residual [..., width];  the second adds x to the residual, in place, and norms the sum
    rms_norm_quantize        codes in float8_e4m3fn or int8, and float32 scales [...] of rows
    act_mul                  [..., 2 * width], gate then up; silu | gelu_tanh | relu2
    linear                   `weight` as `pack.pack` makes it of `format` (WeightFormat.name)
    store_kv                 k, v [rows, KV heads, head_dim] to position positions[row] of block table slots[row]
    paged_attention          q [rows, heads, head_dim], whose sequences lie one behind the other: queries[i] rows with
                             contexts[i] tokens before them, in block table i. The lists are the host's.

Layout of an arena uint8 [blocks, bytes]: attend.cuh. Where torch is told to be deterministic, a row has the same bits
in any company.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..errors import UsageError
from . import torch_cpu
from .jit import Jit, architecture
from .launch import Launcher
from .libcuda import load_driver
from .torch_cuda import CODES, CudaOps

_SCHEMAS = (
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    "add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps) -> Tensor",
    "rms_norm_quantize(Tensor x, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor)",
    "act_mul(Tensor x, str activation) -> Tensor",
    "linear(Tensor x, Tensor weight, str format, int outputs, Tensor? bias) -> Tensor",
    "store_kv(Tensor k, Tensor v, Tensor(a!) arena, Tensor tables, Tensor slots, Tensor positions, str kv_format, "
    "int block_size, int layer_offset) -> ()",
    "paged_attention(Tensor q, Tensor arena, Tensor tables, int[] queries, int[] contexts, str kv_format, "
    "int kv_heads, int block_size, float scale, int layer_offset=0, int window=0, float soft_cap=0.0, "
    "Tensor? sinks=None, Tensor? value_scales=None) -> Tensor",
)
_library = torch.library.Library("llmctl", "DEF")  # type: ignore[no-untyped-call]


_cubins = [Path.home() / ".cache" / "llmctl" / "cubins"]


def keep_cubins_in(folder: Path) -> None:
    """Where what is compiled from now on is kept, and looked for."""
    _cubins[:] = [folder]
    on_gpu.cache_clear()


@functools.cache
def on_gpu(index: int) -> CudaOps:
    """The ops on this GPU."""
    properties = torch.cuda.get_device_properties(index)
    arch = architecture(properties.major, properties.minor)
    launcher = Launcher(Jit(_cubins[0], arch), load_driver(), lambda: torch.cuda.current_stream(index).cuda_stream)
    return CudaOps(launcher, arch, properties.multi_processor_count)


def _cuda(name: str) -> Callable[..., object]:
    def implementation(x: torch.Tensor, *others: object) -> object:
        for tensor in (x, *others):
            if isinstance(tensor, torch.Tensor):
                _check_contiguous(name, tensor)
        with torch.cuda.device(x.device):
            return getattr(on_gpu(x.device.index), name)(x, *others)

    return implementation


def _check_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise UsageError(f"llmctl::{name}: a tensor of strides {tensor.stride()}", "make it `contiguous()` first")


def _fake_norm(x: torch.Tensor, *others: object) -> torch.Tensor:
    return torch.empty_like(x)


def _fake_quantize(
    x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    if dtype not in CODES:
        raise UsageError(f"llmctl::rms_norm_quantize: codes of {dtype}", "float8_e4m3fn and int8 are known")
    return torch.empty_like(x, dtype=dtype), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _fake_act_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _fake_linear(
    x: torch.Tensor, weight: torch.Tensor, format: str, outputs: int, bias: torch.Tensor | None
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


def _fake_store(k: torch.Tensor, *others: object) -> None:
    return None


def _fake_attention(q: torch.Tensor, *others: object, **named: object) -> torch.Tensor:
    return torch.empty_like(q)


_FAKES: Sequence[Callable[..., object]] = (
    _fake_norm, _fake_norm, _fake_quantize, _fake_act_mul, _fake_linear, _fake_store, _fake_attention
)  # fmt: skip

for _schema, _fake in zip(_SCHEMAS, _FAKES, strict=True):
    _name = _schema.partition("(")[0]
    _library.define(_schema)  # type: ignore[no-untyped-call]
    _library.impl(_name, getattr(torch_cpu, _name), "CPU")  # type: ignore[no-untyped-call]
    _library.impl(_name, _cuda(_name), "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"llmctl::{_name}", _fake, lib=_library)
