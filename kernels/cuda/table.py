"""Every specialization that is registered: what `kernels build` compiles, and what the static gate looks at.

A model needs few of them; `--all` is every combination of types and common sizes. A kernel that is launched but not
listed here would be compiled in the middle of a request, and looked at by no test.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..formats import WeightFormat
from . import rows
from .attend import COMPUTE, MERGE_THREADS, AttendShape, refusal
from .latent_table import all_latents, heads_kernels, latent_kernels
from .linear_table import all_linears, expert_kernels, linear_kernels, linear_representatives
from .linear_tiles import expert_tiles
from .listed import Listed
from .tiles import SMS, choose_attend, head_dims, missing
from .types import ACTIVATIONS, EIGHT_BIT_KV, HEAD_DIMS

WIDTHS = (2048, 4096, 8192, 16384)  # the widest for each number of threads of a norm


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What of a model decides which kernels it runs."""

    act: str
    compute: str
    kv: str
    head_dim: int
    hidden_size: int
    activation: str
    weights: tuple[WeightFormat, ...] = ()  # of its linear layers, as they are multiplied
    experts: bool = False
    latent: tuple[int, int, int] | None = None  # heads, rank, and values of a rotated key


def model_kernels(arch: str, needs: ModelNeeds) -> list[Listed]:
    """Every kernel that a model's forward pass and its sampling launch."""
    listed = [
        Listed(rows.embed(needs.act), rows.ROW_THREADS),
        *_norms(needs.act, needs.hidden_size),
        *_gated(needs.act, needs.activation),
        *_of_16_bits(needs.act),
        *linear_kernels(needs.act, needs.weights),
        *(expert_kernels(needs.act, needs.weights, expert_tiles(arch)) if needs.experts else ()),
        *_shared(),
    ]
    if needs.latent is not None:
        listed += latent_kernels(arch, needs.act, *needs.latent)
        return _fitting((*listed, *heads_kernels(needs.act, expert_tiles(arch))), arch)
    listed += _stores(needs.act, needs.kv, needs.head_dim)
    for prefill in (False, True):
        listed += _attention(
            choose_attend(arch, needs.act, needs.compute, needs.kv, needs.head_dim, soft_cap=False, prefill=prefill)
        )
    return _fitting(listed, arch)


def representatives(arch: str) -> list[Listed]:
    """At least one of each template, and of attention the kinds that differ most: what CI compiles."""
    act = activations(arch)[-1]
    listed = [
        Listed(rows.embed(act), rows.ROW_THREADS),
        *_norms(act, 4096),
        *_quantized_norms(act, 4096),
        *_of_16_bits(act),
        *_gated(act, "silu"),
        *_stores(act, "fp8_e4m3", 128),
        *_shared(),
        *all_latents(arch, act),
    ]
    for of, compute, kv, soft_cap, prefill in (
        ("bf16", "bf16", "bf16", False, False),
        ("bf16", "bf16", "bf16", False, True),
        ("bf16", "f16", "fp8_e4m3", False, False),
        ("f16", "f16", "int8", True, False),
        ("f16", "f16", "f16", False, True),
        ("f32", "f32", "f32", False, False),
    ):
        if of in activations(arch) and missing(arch, compute) is None:
            listed += _attention(choose_attend(arch, of, compute, kv, 128, soft_cap=soft_cap, prefill=prefill))
    return _fitting((*listed, *linear_representatives(act)), arch)


def all_kernels(arch: str) -> list[Listed]:
    """Every kernel that the engine can launch, whatever the model, and what ops for torch need besides.

    Types, sizes and tiles are those of the functions that ops ask, so that what an op does not refuse is listed here
    (test_table.py). Whatever else a template could be is left out: gated ends of dense layers, norms that quantize a
    sum, and soft caps, which no model that runs here has; the op for torch compiles those when it is asked for one.
    """
    listed = [*_shared(), *all_linears(activations(arch), expert_tiles=expert_tiles(arch))]
    for act in activations(arch):
        listed.append(Listed(rows.embed(act), rows.ROW_THREADS))
        for width in WIDTHS:
            listed += [*_norms(act, width), *_quantized_norms(act, width)]
        for name in rows.ACTIVATION:
            listed += _gated(act, name)
        listed += _of_16_bits(act)
        for kv, head_dim in itertools.product((act, *EIGHT_BIT_KV), HEAD_DIMS):
            listed += _stores(act, kv, head_dim)
        listed += all_latents(arch, act)
        for shape in _shapes(arch, act):
            listed += _attention(shape)
    return _fitting(listed, arch)


def _shapes(arch: str, act: str) -> Iterator[AttendShape]:
    """Of attention, all that an engine can ask for with activations of this type."""
    for compute, kv in itertools.product(COMPUTE, (act, *EIGHT_BIT_KV)):
        if (refusal(act, compute, kv) or missing(arch, compute)) is not None:
            continue
        for head_dim, prefill in itertools.product(head_dims(arch), (False, True)):
            yield choose_attend(arch, act, compute, kv, head_dim, soft_cap=False, prefill=prefill)


def activations(arch: str) -> tuple[str, ...]:
    """The types that an architecture computes in besides its tensor cores."""
    return tuple(act for act in ACTIVATIONS if act != "bf16" or missing(arch, act) is None)


def _of_16_bits(act: str) -> list[Listed]:
    """What only activations of 16 bits need."""
    if act == "f32":
        return []
    kernels = (rows.widen(act), *(rows.bias_rows(act, add=add) for add in (False, True)))
    return [Listed(kernel, rows.ROW_THREADS) for kernel in kernels]


def _gated(act: str, activation: str) -> list[Listed]:
    kernels = rows.act_mul(act, activation), rows.act_mul_apart(act, activation)
    return [Listed(kernel, rows.ROW_THREADS) for kernel in kernels]


def _stores(act: str, kv: str, head_dim: int) -> list[Listed]:
    """With and without steering where there is any."""
    ways = (False, True) if kv in EIGHT_BIT_KV else (False,)
    return [Listed(rows.rope_store(act, kv, head_dim, steered=steered), rows.ROW_THREADS) for steered in ways]


def _attention(shape: AttendShape) -> list[Listed]:
    # The step being computed has arrived; the others are under way.
    in_flight = (shape.stages - 1) * shape.stage_bytes
    return [
        Listed(shape.kernel, shape.threads, shape.shared_bytes, in_flight),
        Listed(shape.merge_kernel, MERGE_THREADS, shape.merge_shared_bytes),
    ]


def _norms(act: str, width: int) -> list[Listed]:
    """Plain, of a sum that is kept, and added to what is there."""
    ways = ({"residual": False}, {"residual": True}, {"residual": False, "add": True})
    kernels = (rows.rms_norm(act, width, **way) for way in ways)
    return [Listed(kernel, threads, threads // 32 * 4) for kernel, threads in kernels]


def _quantized_norms(act: str, width: int) -> list[Listed]:
    kernels = (rows.rms_norm_quantize(act, code, width, residual=False) for code in ("fp8_e4m3", "int8"))
    return [Listed(kernel, threads, threads // 16 * 4) for kernel, threads in kernels]


def _shared() -> list[Listed]:
    return [
        Listed(rows.COPY_TOKENS, rows.ROW_THREADS),
        Listed(rows.MOVE_BLOCKS, rows.ROW_THREADS),
        *(Listed(kernel, rows.ROW_THREADS) for kernel in (rows.SCATTER_RUNS, rows.GATHER_TOKENS, rows.KEEP_TOKENS)),
        Listed(rows.sample(), rows.SAMPLE_THREADS, rows.sample_shared_bytes()),
    ]


def _fitting(listed: Iterable[Listed], arch: str) -> list[Listed]:
    """Each once, without tiles of linear layers that the architecture has no memory for."""
    return [item for item in dict.fromkeys(listed) if item.shared_bytes <= SMS[arch].block_shared]
