"""The ops of a step besides the linear layers, as ops.py means them, on a machine.

Each op's calls are made for the rows now in the batch. What a step knows on the host only, attention's list of work,
is sent along. Two things that CPU kernels do are left out: no op writes quantized forms of activations, because linear
layers here multiply values; and a token outside of the vocabulary gives zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..cpu.pack import unpack
from ..formats import WeightFormat
from ..ops import (
    ATTEND_SPLIT,
    LOGIT_ROWS,
    ROWS,
    ActMulArgs,
    AnyArray,
    AttendArgs,
    Batch,
    EmbedArgs,
    F32Array,
    KVCopy,
    KVCopyArgs,
    KVLayer,
    NormAddArgs,
    NormArgs,
    PackedWeight,
    RopeStoreArgs,
)
from . import rows as kernels
from .arguments import Argument, f32, i32, i64, ptr
from .attend import compute_of, refusal
from .attend_op import AttendOp, Lane
from .call import Call
from .jit import architecture
from .machine import Machine
from .tiles import choose_attend
from .types import ELEMENTS, block_bits, refuse_heads
from .work_list import Tiles, make_work_list

DTYPES = {np.dtype(np.float32): "f32", np.dtype(np.float16): "f16", np.dtype(np.uint16): "bf16"}
VALUES = {"f32": 4, "f16": 8, "bf16": 8}  # in 16 bytes
_THREADS = 128
_KEPT_CALLS = 64  # numbers of rows that an op's calls are kept for
_ALL = 1 << 30  # rows, of any sequence


@dataclass(frozen=True, slots=True, eq=False)
class StepOp:
    """An op whose calls follow from how many rows the batch has."""

    machine: Machine
    batch: Batch
    count: int  # ROWS or LOGIT_ROWS
    calls: Callable[[int], list[Call]]
    kept: dict[int, list[Call]] = field(default_factory=dict)  # by the number of rows

    def run(self) -> None:
        if (rows := int(self.batch.counts[self.count])) > 0:
            if (calls := self.kept.get(rows)) is None:
                if len(self.kept) == _KEPT_CALLS:
                    self.kept.clear()
                calls = self.kept[rows] = self.calls(rows)
            self.machine.launch(calls)


def refuse_rows(x: AnyArray, width: int) -> str | None:
    """Why rows of this width have no kernel, None if they do: they must lie without gaps, in whole vectors."""
    if x.dtype not in DTYPES:
        return f"activations are {x.dtype}"
    if x.shape[1] != width:
        return f"rows of {width} values are padded to {x.shape[1]}"
    return None if width % VALUES[DTYPES[x.dtype]] == 0 else f"{width} values are no multiple of 16 bytes"


def refuse_embed(args: EmbedArgs) -> str | None:
    return refuse_rows(args.out, args.out.shape[1])


def build_embed(args: EmbedArgs, machine: Machine) -> tuple[StepOp]:
    """The table is kept as values of the activations' type, as rows of the output are."""
    table = np.zeros((args.weight.n, args.out.shape[1]), np.float32)
    table[:, : args.weight.k] = values_of(args.weight)
    dtype, vocabulary, width = DTYPES[args.out.dtype], args.weight.n, args.out.shape[1]
    fixed = (
        _at(machine, args.out), ptr(machine.upload(as_stored(table, dtype))), _at(machine, args.batch.token),
        _count(machine, args.batch, ROWS), i32(width), i32(vocabulary), f32(args.scale),
    )  # fmt: skip
    kernel = kernels.embed(dtype)
    return (StepOp(machine, args.batch, ROWS, lambda rows: [Call(kernel, (rows, 1, 1), _THREADS, 0, fixed)]),)


def refuse_norm(args: NormArgs) -> str | None:
    width = len(args.weight)
    return refuse_rows(args.x, width) or refuse_rows(args.act.values, width)


def build_norm(args: NormArgs, machine: Machine) -> tuple[StepOp]:
    dtype, width = DTYPES[args.x.dtype], len(args.weight)
    kernel, threads = kernels.rms_norm(dtype, width, residual=False)
    count = LOGIT_ROWS if args.logit_rows_only else ROWS
    fixed = (
        _at(machine, args.act.values), _at(machine, args.x), ptr(0),
        ptr(machine.upload(as_stored(args.weight, dtype))),
        _at(machine, args.batch.logit_rows) if args.logit_rows_only else ptr(0),
        _count(machine, args.batch, count), i32(width), f32(args.eps),
    )  # fmt: skip
    shared = threads // 32 * 4
    return (StepOp(machine, args.batch, count, lambda rows: [Call(kernel, (rows, 1, 1), threads, shared, fixed)]),)


def refuse_norm_add(args: NormAddArgs) -> str | None:
    width = len(args.weight)
    return refuse_rows(args.x, width) or refuse_rows(args.out, width)


def build_norm_add(args: NormAddArgs, machine: Machine) -> tuple[StepOp]:
    dtype, width = DTYPES[args.x.dtype], len(args.weight)
    kernel, threads = kernels.rms_norm(dtype, width, residual=False, add=True)
    fixed = (
        _at(machine, args.out), _at(machine, args.x), ptr(0), ptr(machine.upload(as_stored(args.weight, dtype))),
        ptr(0), _count(machine, args.batch, ROWS), i32(width), f32(args.eps),
    )  # fmt: skip
    shared = threads // 32 * 4
    return (StepOp(machine, args.batch, ROWS, lambda rows: [Call(kernel, (rows, 1, 1), threads, shared, fixed)]),)


def refuse_act_mul(args: ActMulArgs) -> str | None:
    if args.activation not in kernels.ACTIVATION:
        return f"activation {args.activation}"
    return refuse_rows(args.act.values, args.act.k)


def build_act_mul(args: ActMulArgs, machine: Machine) -> tuple[StepOp]:
    dtype, width = DTYPES[args.act.values.dtype], args.act.k
    kernel = kernels.act_mul_apart(dtype, args.activation)
    fixed = (
        _at(machine, args.act.values), _at(machine, args.gate), _at(machine, args.up),
        _count(machine, args.batch, ROWS), i32(width), i32(args.gate.shape[1]),
    )  # fmt: skip
    across = -(-width // (_THREADS * VALUES[dtype]))
    return (StepOp(machine, args.batch, ROWS, lambda rows: [Call(kernel, (rows, across, 1), _THREADS, 0, fixed)]),)


def refuse_rope_store(args: RopeStoreArgs) -> str | None:
    if (args.q_norm is None) != (args.k_norm is None):
        return "a norm of queries or of keys alone"
    return _refuse_cache(args.q, args.kv)


def build_rope_store(args: RopeStoreArgs, machine: Machine) -> tuple[StepOp]:
    kv, dtype = args.kv, DTYPES[args.q.dtype]
    table = args.batch.tables[kv.group]
    steering = kv.steering if kv.format.bytes_per_value == 1 else None
    kernel = kernels.rope_store(dtype, kv.format.kind, kv.head_dim, steered=steering is not None)

    def constant(array: F32Array | None, kind: str) -> ptr:
        return ptr(0 if array is None else machine.upload(as_stored(array, kind)))

    fixed: tuple[Argument, ...] = (
        _at(machine, args.q), _at(machine, args.k), _at(machine, args.v), _at(machine, kv.arena), _at(machine, table),
        _at(machine, args.batch.slot), _at(machine, args.batch.position), _count(machine, args.batch, ROWS),
        constant(args.q_norm, dtype), constant(args.k_norm, dtype),
        constant(args.cos, "f32"), constant(args.sin, "f32"), constant(kv.scales, "f32"),
        ptr(0 if steering is None else machine.upload(steering.order)),
        constant(None if steering is None else steering.follow, "f32"),
        constant(None if steering is None else steering.level, "f32"),
        constant(None if steering is None else steering.centre, "f32"),
        i64(kv.block_stride), i64(kv.layer_offset), i32(table.shape[1]), i32(args.num_heads), i32(kv.num_kv_heads),
        i32(args.q.shape[1]), i32(args.k.shape[1]), i32(0 if args.cos is None else kv.head_dim), i32(0),
        f32(args.norm_eps), f32(args.q_scale), i32(block_bits(kv.block_size)),
    )  # fmt: skip
    heads = -(-(args.num_heads + kv.num_kv_heads) // kernels.HEADS_PER_BLOCK)
    return (StepOp(machine, args.batch, ROWS, lambda rows: [Call(kernel, (rows, heads, 1), _THREADS, 0, fixed)]),)


def refuse_attend(args: AttendArgs) -> str | None:
    width = args.num_heads * args.kv.head_dim
    if (reason := refuse_rows(args.act.values, width) or _refuse_cache(args.q, args.kv)) is not None:
        return reason
    dtype, kind = DTYPES[args.q.dtype], args.kv.format.kind
    return refusal(dtype, args.compute or compute_of(dtype, kind), kind)


def build_attend(args: AttendArgs, machine: Machine) -> tuple[AttendOp]:
    """Attention by one tile and one cut for all rows where bits must be equal, else by what suits each sequence best.

    Sequences whose rows fill one tile of decodes are few; the others have tiles that read K and V less often.
    """
    sinks = 0 if args.sinks is None else machine.upload(args.sinks)
    value_scales = 0 if args.kv.scales is None else machine.upload(args.kv.scales[1])
    if machine.deterministic:
        lanes: tuple[Lane, ...] = (_lane(args, machine, ATTEND_SPLIT, prefill=False, above=0, most=_ALL),)
    else:
        few = _lane(args, machine, 0, prefill=False, above=0, most=0)
        lanes = few, _lane(args, machine, 0, prefill=True, above=few.shape.rows, most=_ALL)
    return (AttendOp(args, machine, lanes, sinks, value_scales),)


def _lane(args: AttendArgs, machine: Machine, split: int, *, prefill: bool, above: int, most: int) -> Lane:
    """The lane for sequences of more than `above` and at most `most` packed rows (0: of a tile); its list is shared."""
    kv, dtype, batch = args.kv, DTYPES[args.q.dtype], args.batch
    shape = choose_attend(
        architecture(*machine.capability), dtype, args.compute or compute_of(dtype, kv.format.kind), kv.format.kind,
        kv.head_dim, soft_cap=args.soft_cap != 0, prefill=prefill,
    )  # fmt: skip
    assert split % shape.tile == 0, shape.tile
    group = args.num_heads // kv.num_kv_heads
    tiles = Tiles(group, shape.rows, shape.tile, args.window, kv.num_kv_heads, kv.head_dim)
    limits = {"above": above, "most": most or max(shape.rows, group), "max_positions": args.max_positions}
    work = machine.once(
        ("work list", id(batch), tiles, split, *limits.values()),
        lambda: make_work_list(machine, batch, tiles, split, **limits),
    )
    return Lane(shape, work)


def refuse_kv_copy(args: KVCopyArgs) -> str | None:
    row = args.head_dim * args.format.bytes_per_value
    return None if row % 16 == 0 else f"heads of {row} bytes are no multiple of 16"


def build_kv_copy(args: KVCopyArgs, machine: Machine) -> KVCopy:
    row = args.head_dim * args.format.bytes_per_value
    halves = args.num_layers * args.num_kv_heads * (1 if args.latent else 2)

    def copy(source: int, target: int, tokens: int) -> None:
        copies = machine.send(np.array([source, target, tokens], np.int32))
        arguments = (
            ptr(machine.address(args.arena) + args.layer_offset), ptr(copies), i64(args.block_stride),
            i32(args.block_size), i32(row), i32(args.format.scale_bytes),
        )  # fmt: skip
        machine.launch([Call(kernels.COPY_TOKENS, (1, halves, 1), _THREADS, 0, arguments)])

    return copy


def values_of(weight: PackedWeight) -> F32Array:
    """The weight's values [n, k], each product and sum rounded once."""
    format: WeightFormat = weight.format
    data, scales, zeros = unpack(weight)
    if format.kind == "bf16":
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    values: F32Array = data.astype(np.float32)
    if format.is_float:
        return values
    assert scales is not None
    values = values.reshape(weight.n, -1, format.group)
    if format.zero == "int":
        assert zeros is not None
        values -= zeros.astype(np.float32)[:, :, None]
    elif format.zero == "none" and format.kind == "int4":
        values -= np.float32(8)
    values = values * scales.astype(np.float32)[:, :, None]
    if format.zero == "min":
        assert zeros is not None
        values += zeros.astype(np.float32)[:, :, None]
    return values.reshape(weight.n, weight.k)


def as_stored(values: F32Array, dtype: str) -> AnyArray:
    """float32 values rounded to nearest even in a type, bfloat16 as its bits."""
    if dtype == "bf16":
        bits = values.view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)
    return values.astype(np.float16) if dtype == "f16" else values


def _refuse_cache(q: AnyArray, kv: KVLayer) -> str | None:
    kind = kv.format.kind
    if kind not in ELEMENTS:
        return f"a {kind} cache; {', '.join(ELEMENTS)} are known"
    if q.dtype not in DTYPES:
        return f"activations are {q.dtype}"
    if kind in ("f32", "f16", "bf16") and kind != DTYPES[q.dtype]:
        return f"a {kind} cache with {DTYPES[q.dtype]} activations"
    return refuse_heads(kv.head_dim, kv.block_size)


def _at(machine: Machine, array: AnyArray) -> ptr:
    return ptr(machine.address(array))


def _count(machine: Machine, batch: Batch, which: int) -> ptr:
    return ptr(machine.address(batch.counts) + 4 * which)
