"""LoRA as calls: each row through the adapter of its slot, added to what the layer gave (lora.cuh)."""

from __future__ import annotations

from dataclasses import dataclass

from .arguments import i32, ptr
from .call import Call
from .source import Kernel
from .types import ACTIVATIONS, ELEMENTS

HEADER = "lora.cuh"
THREADS = 128
RANKS = (8, 16, 32, 64, 128)  # an adapter of another rank is padded with zeros


@dataclass(frozen=True, slots=True)
class LoraAddresses:
    """y [rows, width], x [rows, inputs], low float32 [rows, rank], a [slots, rank, inputs], b [slots, outputs, rank],
    scales float32 [slots], slots int32 [rows]: -1 for no adapter."""

    y: int
    x: int
    low: int
    a: int
    b: int
    scales: int
    slots: int


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapters of one layer; `width` as of `linear.Linear`."""

    dtype: str
    rank: int
    outputs: int
    inputs: int
    width: int

    @property
    def kernels(self) -> tuple[Kernel, Kernel]:
        types = f"<{ELEMENTS[self.dtype]}, {self.rank}>"
        return Kernel(HEADER, f"lora_shrink{types}"), Kernel(HEADER, f"lora_expand{types}")


def refusal(lora: Lora) -> str | None:
    """Why no kernel serves these adapters, None if one does."""
    if lora.dtype not in ACTIVATIONS:
        return f"activations are {lora.dtype}; known are {', '.join(ACTIVATIONS)}"
    if lora.rank not in RANKS:
        return f"rank {lora.rank}: pad it to one of {', '.join(map(str, RANKS))}"
    if lora.inputs % 2 != 0:
        return f"{lora.inputs} inputs: they are read in pairs"
    return None


def lora_calls(lora: Lora, rows: int, at: LoraAddresses) -> list[Call]:
    """Shrink, then expand: y[row] += scale * B (A x[row])."""
    shrink, expand = lora.kernels
    down = (ptr(at.low), ptr(at.x), ptr(at.a), ptr(at.slots), i32(lora.inputs))
    up = (ptr(at.y), ptr(at.low), ptr(at.b), ptr(at.scales), ptr(at.slots), i32(lora.outputs), i32(lora.width))
    return [
        Call(shrink, (lora.rank // 4, rows, 1), THREADS, 0, down),
        Call(expand, (-(-lora.outputs // 256), rows, 1), THREADS, 4 * lora.rank, up),
    ]
