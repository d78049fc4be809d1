"""Specializations of what is done to rows, heads and blocks, and around a step."""

from __future__ import annotations

from .source import Kernel
from .types import ELEMENTS

NORM_THREADS = (128, 256, 512)
ACTIVATION = {"silu": 0, "gelu_tanh": 1, "relu2": 2}
ROW_THREADS = 128
HEADS_PER_BLOCK = 4


def rope_store(act: str, kv: str, head_dim: int, *, steered: bool = False) -> Kernel:
    """q and k normed and rotated, k and v stored; a block of threads does HEADS_PER_BLOCK heads of a row."""
    flag = "true" if steered else "false"
    return Kernel("rope_store.cuh", f"rope_store<{ELEMENTS[act]}, {ELEMENTS[kv]}, {head_dim}, {flag}>")


def embed(act: str) -> Kernel:
    return Kernel("rows.cuh", f"embed<{ELEMENTS[act]}>")


def rms_norm(act: str, width: int, *, residual: bool, add: bool = False) -> tuple[Kernel, int]:
    """The kernel and its threads: as few as keep each at no more than four loads of 16 bytes, where that can be."""
    per_load = 4 if act == "f32" else 8
    threads = next((n for n in NORM_THREADS if width <= 4 * per_load * n), NORM_THREADS[-1])
    flags = f"{'true' if residual else 'false'}, {threads}{', true' if add else ''}"
    return Kernel("rows.cuh", f"rms_norm<{ELEMENTS[act]}, {flags}>"), threads


def rms_norm_quantize(act: str, code: str, width: int, *, residual: bool) -> tuple[Kernel, int]:
    """`rms_norm` to codes of fp8_e4m3 or int8 with a scale per row; its threads, a sixteenth of which are floats."""
    _, threads = rms_norm(act, width, residual=residual)
    shape = f"{ELEMENTS[act]}, {ELEMENTS[code]}, {'true' if residual else 'false'}, {threads}"
    return Kernel("norm_quantize.cuh", f"rms_norm_quantize<{shape}>"), threads


def act_mul(act: str, activation: str) -> Kernel:
    return Kernel("rows.cuh", f"act_mul<{ELEMENTS[act]}, {ACTIVATION[activation]}>")


def act_mul_apart(act: str, activation: str) -> Kernel:
    """`act_mul` of gate and up that lie apart."""
    return Kernel("apart.cuh", f"act_mul_apart<{ELEMENTS[act]}, {ACTIVATION[activation]}>")


def bias_rows(act: str, *, add: bool) -> Kernel:
    return Kernel("apart.cuh", f"bias_rows<{ELEMENTS[act]}, {'true' if add else 'false'}>")


COPY_TOKENS = Kernel("kv_blocks.cuh", "copy_tokens")
MOVE_BLOCKS = Kernel("kv_blocks.cuh", "move_blocks")

SCATTER_RUNS = Kernel("step.cuh", "scatter_runs")
GATHER_TOKENS = Kernel("step.cuh", "gather_tokens")
KEEP_TOKENS = Kernel("step.cuh", "keep_tokens")

SAMPLE_THREADS = 512


def widen(act: str) -> Kernel:
    """Logits in float32."""
    return Kernel("step.cuh", f"widen<{ELEMENTS[act]}>")


def sample(threads: int = SAMPLE_THREADS) -> Kernel:
    """One block of threads per row of logits; `sample_shared_bytes` of shared memory."""
    return Kernel("sample.cuh", f"sample<{threads}>")


def sample_shared_bytes(threads: int = SAMPLE_THREADS) -> int:
    """Size of SampleShared: a histogram, a sum, and what each warp and each thread contributes."""
    return 256 * 8 + 8 + threads // 32 * (4 + 8) + threads * 4 + 8


NOISE = Kernel("noise.cuh", "noise_of")
