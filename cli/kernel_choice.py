"""Which kernel each op would get on this machine, and why others were refused.

Kernels decide by looking at real arguments, so small ones are made here, one set per weight format, KV format and
activation. Nothing is built or run, and torch stays unloaded: the reference is what remains when no kernel accepts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..kernels import registry
from ..kernels.cpu.pack import packed_bytes
from ..kernels.formats import KV_BYTES, KVFormat, WeightFormat, parse_weight_format
from ..kernels.ops import (
    MAX_TOP,
    SAMPLE_ROW,
    ActMulArgs,
    AttendArgs,
    Batch,
    EmbedArgs,
    ExpertsArgs,
    KVCopyArgs,
    KVLayer,
    LatentArgs,
    LinearArgs,
    NormAddArgs,
    NormArgs,
    PackedWeight,
    RopeStoreArgs,
    SampleArgs,
    make_act,
    make_batch,
    make_rows,
)

WEIGHT_FORMATS = ("f32", "f16", "bf16", "int16g32", "int8g32", "int4g32", "int4g32min", "int4g32int")
KV_FORMATS = tuple(KV_BYTES)
LATENT_FORMATS = ("f32", "f16", "bf16")
ACTIVATIONS = ("silu", "gelu_tanh")

_ROWS, _WIDTH, _HEAD, _BLOCK = 4, 128, 64, 32


@dataclass(frozen=True, slots=True)
class Choice:
    """What an op would run on for one case (a format, an activation, or "" where there is only one).

    isa      the instruction set of the kernel that would be bound, "reference" if none accepts
    refused  why better candidates were refused, those with one reason together
    """

    op: str
    case: str
    isa: str
    source: str
    refused: tuple[str, ...]


def choices() -> tuple[Choice, ...]:
    """One Choice for every op and case."""
    found = []
    for op, case, args in _cases():
        isa, source = "reference", "kernels/reference"
        refused: dict[str, list[str]] = {}
        for entry in registry.entries():
            if entry.op != op:
                continue
            reason = entry.accepts(args)
            if reason is None:
                isa, source = entry.isa, entry.source
                break
            refused.setdefault(reason, []).append(entry.isa)
        reasons = tuple(f"{', '.join(isas)}: {reason}" for reason, isas in refused.items())
        found.append(Choice(op, case, isa, source, reasons))
    return tuple(found)


def _cases() -> Iterator[tuple[str, str, object]]:
    batch = make_batch(_ROWS, _ROWS, _ROWS, (np.zeros((_ROWS, 1), np.int32),))
    rows, plain = make_rows(_WIDTH, _ROWS), make_act(_WIDTH, _ROWS, 1, ())
    vector = np.zeros(_WIDTH, np.float32)
    for name in WEIGHT_FORMATS:
        weight = _weight(parse_weight_format(name))
        act = make_act(_WIDTH, _ROWS, 1, (weight.format,))
        yield "embed", name, EmbedArgs(batch, weight, rows)
        yield "norm", name, NormArgs(batch, rows, vector, 1e-5, act, False)
        yield "linear", name, LinearArgs(batch, act, weight, None, rows, False, False)
    yield "norm_add", "", NormAddArgs(batch, rows, vector, 1e-5, make_rows(_WIDTH, _ROWS))
    for name in KV_FORMATS:
        yield from _attention_cases(name, batch)
    for name in LATENT_FORMATS:
        yield "latent", name, _latent_args(name, batch)
    two = (_weight(WeightFormat("f32")),) * 2
    for name in ACTIVATIONS:
        yield (
            "experts",
            name,
            ExpertsArgs(batch, plain, two[0], None, two, two, two, 1, "softmax", False, 1.0, name, rows),
        )
        yield "act_mul", name, ActMulArgs(batch, rows, rows, name, plain)
    yield "sample", "", _sample_args()


def _attention_cases(name: str, batch: Batch) -> Iterator[tuple[str, str, object]]:
    format = KVFormat(name)
    stride = 2 * _BLOCK * format.head_bytes(_HEAD)
    arena = np.zeros(stride, np.uint8)
    kv = KVLayer(arena, stride, 0, _BLOCK, 1, _HEAD, format, 0)
    q, k, v = make_rows(_WIDTH, _ROWS), make_rows(_HEAD, _ROWS), make_rows(_HEAD, _ROWS)
    table = np.zeros((_BLOCK, _HEAD // 2), np.float32)
    heads = _WIDTH // _HEAD
    yield (
        "rope_store",
        name,
        RopeStoreArgs(batch, q, k, v, None, None, 1e-5, table, table, heads, _HEAD**-0.5, kv),
    )
    yield "attend", name, AttendArgs(batch, q, heads, kv, 0, _BLOCK, make_act(_WIDTH, _ROWS, 1, ()))
    yield "kv_copy", name, KVCopyArgs(arena, stride, 1, _BLOCK, 1, _HEAD, format)


def _latent_args(name: str, batch: Batch) -> LatentArgs:
    """A latent of half a head and a rotated key of the other half, for heads of the same size."""
    form, half = KVFormat(name), _HEAD // 2
    stride = _BLOCK * form.head_bytes(_HEAD)
    kv = KVLayer(np.zeros(stride, np.uint8), stride, 0, _BLOCK, 1, _HEAD, form, 0)
    table, heads = np.zeros((_BLOCK, half // 2), np.float32), _WIDTH // _HEAD
    up = WeightFormat("f32")
    return LatentArgs(
        batch, make_rows(_WIDTH, _ROWS), make_rows(_HEAD, _ROWS), np.zeros(half, np.float32), 1e-5,
        PackedWeight(up, 2 * heads * half, half, np.zeros(packed_bytes(up, 2 * heads * half, half), np.uint8)),
        table, table, False, heads, half, half, _HEAD**-0.5, kv, make_act(heads * half, _ROWS, 1, ()),
    )  # fmt: skip


def _sample_args() -> SampleArgs:
    return SampleArgs(
        make_rows(_WIDTH, _ROWS),
        _WIDTH,
        np.zeros(_ROWS, SAMPLE_ROW),
        np.zeros(_ROWS, np.int32),
        np.zeros(_ROWS, np.float32),
        np.zeros((_ROWS, MAX_TOP), np.int32),
        np.zeros((_ROWS, MAX_TOP), np.float32),
        np.zeros(_ROWS, np.uint8),
    )


def _weight(format: WeightFormat) -> PackedWeight:
    return PackedWeight(format, _WIDTH, _WIDTH, np.zeros(packed_bytes(format, _WIDTH, _WIDTH), np.uint8))
