"""The C++ ops: whether a record of arguments can be computed, the op built from it, and programs of such ops.

Each op is a C++ object bound to addresses; it keeps its record alive, and with it every array that those addresses
point into. What no kernel here can do is refused by `accepts_*` in a few words; what contradicts itself
(a weight whose bytes do not fit its shape) is a ValueError of `build_*`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .. import _cpu
from ..formats import INT16, KV_BYTES, WeightFormat
from ..ops import (
    NO_QUAD,
    Act,
    ActForm,
    ActMulArgs,
    AttendArgs,
    Batch,
    EmbedArgs,
    F32Array,
    I32Array,
    KVCopyArgs,
    KVLayer,
    LatentArgs,
    LinearArgs,
    NormAddArgs,
    NormArgs,
    Op,
    PackedWeight,
    RopeStoreArgs,
    SampleArgs,
    find_form,
    steering_width,
)

ACTIVATIONS = ("silu", "gelu_tanh")
MAX_HEAD_DIM = 512
BLOCK_SIZES = range(8, 513)
MAX_LATENT_ROPE, MAX_LATENT_NOPE = 128, 256
LATENT_KINDS = ("f32", "f16", "bf16")
MAX_INT8_GROUP = 8192  # 8192 x 128 x 2047 is just below 2^31


@dataclass(frozen=True, slots=True, eq=False)
class CpuKVCopy:
    """The C++ block copy of one arena."""

    native: _cpu.KvCopy
    args: KVCopyArgs

    def __call__(self, source: int, target: int, tokens: int) -> None:
        blocks = self.args.arena.size // self.args.block_stride
        if not (0 <= source < blocks and 0 <= target < blocks and 0 <= tokens <= self.args.block_size):
            raise ValueError(
                f"copy of {tokens} tokens from block {source} to {target}: "
                f"{blocks} blocks of {self.args.block_size} tokens"
            )
        self.native(source, target, tokens)


@dataclass(frozen=True, slots=True, eq=False)
class CpuSample:
    """The C++ sampler of one logits buffer."""

    native: _cpu.Sampler
    args: SampleArgs

    def __call__(self, rows: int) -> None:
        if not 0 <= rows <= len(self.args.token):
            raise ValueError(f"{rows} rows to sample, at most {len(self.args.token)}")
        self.native(rows)


def record(ops: Sequence[Op], batch: Batch) -> _cpu.Program:
    """A program of C++ ops, all built for this batch, replayed in one call."""
    native = []
    for op in ops:
        if not isinstance(op, _cpu.Op):
            raise ValueError(f"a C++ program cannot hold {type(op).__name__}")
        native.append(op)
    return _cpu.Program(tuple(native), _batch(batch))


def accepts_embed(args: EmbedArgs) -> str | None:
    """Why there is no kernel for this, None if there is one."""
    if args.weight.order is not None:
        return "an embedding with its columns in another order"
    return _refuse_weight(args.weight.format, args.weight.k)


def build_embed(args: EmbedArgs) -> tuple[_cpu.Op, ...]:
    return (_cpu.embed(_batch(args.batch), _weight(args.weight), _rows(args.out), args.scale, args),)


def accepts_norm(args: NormArgs) -> str | None:
    """None: any width is fine."""
    return None


def build_norm(args: NormArgs) -> tuple[_cpu.Op, ...]:
    weight = _vector(args.weight, args.act.k, "norm weight")
    x, act = _rows(args.x), _act(args.act)
    return (_cpu.norm(_batch(args.batch), x, weight, args.eps, act, args.logit_rows_only, args),)


def accepts_norm_add(args: NormAddArgs) -> str | None:
    """None: any width is fine."""
    return None


def build_norm_add(args: NormAddArgs) -> tuple[_cpu.Op, ...]:
    width = args.weight.size
    weight, x, out = _vector(args.weight, width, "norm weight"), _rows(args.x), _rows(args.out)
    return (_cpu.norm_add(_batch(args.batch), x, weight, width, args.eps, out, args),)


def accepts_linear(args: LinearArgs) -> str | None:
    """Why there is no kernel for this, None if there is one."""
    return _refuse_weight(args.weight.format, args.weight.k)


def build_linear(args: LinearArgs) -> tuple[_cpu.Op, ...]:
    padded = -(-args.weight.n // 16) * 16
    bias = 0 if args.bias is None else _vector(args.bias, padded, "bias")
    form = find_form(args.act, args.weight)
    order = 0 if form is None else _order(form.order, args.act.k)
    act, weight, out = _act(args.act), _weight(args.weight), _rows(args.out)
    flags = args.add, args.logit_rows_only, args.may_screen
    return (_cpu.linear(_batch(args.batch), act, weight, order, bias, out, *flags, args),)


def accepts_rope_store(args: RopeStoreArgs) -> str | None:
    """Why there is no kernel for this, None if there is one."""
    return _refuse_kv(args.kv, args.num_heads)


def build_rope_store(args: RopeStoreArgs) -> tuple[_cpu.Op, ...]:
    kv = args.kv
    half = kv.head_dim // 2
    tables = [table for table in (args.cos, args.sin) if table is not None]
    shapes = [table.shape for table in tables]
    if len(tables) == 1 or len(set(shapes)) > 1 or any(shape[1] != half for shape in shapes):
        raise ValueError(f"cos and sin are not both [positions, {half}] or both None: {shapes}")
    cos, sin = (_address(table, np.float32) for table in tables) if tables else (0, 0)
    native = _cpu.rope_store(
        _batch(args.batch),
        _rows(args.q),
        _rows(args.k),
        _rows(args.v),
        0 if args.q_norm is None else _vector(args.q_norm, kv.head_dim, "query norm"),
        0 if args.k_norm is None else _vector(args.k_norm, kv.head_dim, "key norm"),
        args.norm_eps,
        cos,
        sin,
        args.num_heads,
        args.q_scale,
        _kv(args.kv, args.batch),
        *_steering(kv),
        args,
    )
    return (native,)


def accepts_attend(args: AttendArgs) -> str | None:
    """Why there is no kernel for this, None if there is one."""
    if args.soft_cap or args.sinks is not None:
        return "scores with a soft cap" if args.soft_cap else "scores with sinks"
    if args.compute not in ("", "f32"):
        return f"attention in {args.compute}, which a GPU has"
    return _refuse_kv(args.kv, args.num_heads)


def build_attend(args: AttendArgs) -> tuple[_cpu.Op, ...]:
    q, kv, act = _rows(args.q), _kv(args.kv, args.batch), _act(args.act)
    return (_cpu.attend(_batch(args.batch), q, args.num_heads, kv, args.window, args.max_positions, act, args),)


def accepts_latent(args: LatentArgs) -> str | None:
    """Why there is no kernel for this, None if there is one."""
    kv, rank = args.kv, args.up.k
    if kv.format.kind not in LATENT_KINDS:
        return f"no latents in format `{kv.format.kind}`"
    if rank % 8 or rank > MAX_HEAD_DIM:
        return f"latents of rank {rank}, not a multiple of 8 up to {MAX_HEAD_DIM}"
    rope_dim = kv.head_dim - rank
    if rope_dim % 8 or not 8 <= rope_dim <= MAX_LATENT_ROPE:
        return f"rotated keys of {rope_dim} values, not a multiple of 8 up to {MAX_LATENT_ROPE}"
    if not 0 < args.nope_dim <= MAX_LATENT_NOPE:
        return f"keys of {args.nope_dim} values that are not rotated, at most {MAX_LATENT_NOPE}"
    return _refuse_weight(args.up.format, rank)


def build_latent(args: LatentArgs) -> tuple[_cpu.Op, ...]:
    kv, rank = args.kv, args.up.k
    half = (kv.head_dim - rank) // 2
    if args.cos.shape != args.sin.shape or args.cos.shape[1] != half:
        raise ValueError(f"cos and sin are not both [positions, {half}]: {args.cos.shape}, {args.sin.shape}")
    native = _cpu.latent(
        _batch(args.batch),
        _rows(args.q),
        _rows(args.latent),
        _vector(args.kv_norm, rank, "latent norm"),
        args.norm_eps,
        _weight(args.up),
        _order(args.up.order, rank),
        _address(args.cos, np.float32),
        _address(args.sin, np.float32),
        args.interleaved,
        args.num_heads,
        args.nope_dim,
        args.value_dim,
        args.q_scale,
        _latents(kv, args.batch),
        args.cos.shape[0],
        _act(args.act),
        args,
    )
    return (native,)


def accepts_act_mul(args: ActMulArgs) -> str | None:
    """Why there is no kernel for this, None if there is one."""
    if args.activation not in ACTIVATIONS:
        return f"activation `{args.activation}`, not one of {', '.join(ACTIVATIONS)}"
    return None


def build_act_mul(args: ActMulArgs) -> tuple[_cpu.Op, ...]:
    gate, up, act = _rows(args.gate), _rows(args.up), _act(args.act)
    return (_cpu.act_mul(_batch(args.batch), gate, up, args.activation, act, args),)


def accepts_kv_copy(args: KVCopyArgs) -> str | None:
    """Why there is no kernel for this, None if there is one."""
    if args.format.kind not in KV_BYTES:
        return f"KV format {args.format.kind}, not one of {', '.join(KV_BYTES)}"
    return None


def build_kv_copy(args: KVCopyArgs) -> CpuKVCopy:
    head_bytes = args.format.head_bytes(args.head_dim)
    block_bytes = 2 * args.num_layers * args.num_kv_heads * args.block_size * head_bytes
    if args.layer_offset + block_bytes > args.block_stride:
        raise ValueError(f"a block holds {args.layer_offset + block_bytes} bytes, its stride is {args.block_stride}")
    native = _cpu.KvCopy(
        _address(args.arena, np.uint8) + args.layer_offset,
        args.block_stride,
        args.num_layers,
        args.block_size,
        args.num_kv_heads,
        args.head_dim,
        args.format.bytes_per_value,
        args.format.scale_bytes,
        args.format.pairs,
    )
    return CpuKVCopy(native, args)


def accepts_sample(args: SampleArgs) -> str | None:
    """None: any vocabulary is fine."""
    return None


def build_sample(args: SampleArgs) -> CpuSample:
    native = _cpu.Sampler(
        _rows(args.logits),
        args.vocab_size,
        args.rows.ctypes.data,
        _address(args.token, np.int32),
        _address(args.logprob, np.float32),
        _address(args.top_ids, np.int32),
        _address(args.top_logprobs, np.float32),
        _address(args.finite, np.uint8),
    )
    return CpuSample(native, args)


def _refuse_weight(format: WeightFormat, k: int) -> str | None:
    if format.is_float:
        return None
    if format == INT16:
        return None if k % format.group == 0 else f"{k} inputs are not a multiple of {format.group}"
    if format.kind not in ("int4", "int8") or (format.kind == "int8" and format.zero != "none"):
        return f"weight format {format.name}"
    if format.group <= 0 or format.group % 32 or k % format.group:
        return f"group {format.group} is not a multiple of 32 that divides {k} inputs"
    if format.kind == "int8" and format.group > MAX_INT8_GROUP:
        return f"int8 group {format.group}, at most {MAX_INT8_GROUP} sum exactly in int32"
    return None


def _refuse_kv(kv: KVLayer, num_heads: int) -> str | None:
    if kv.format.kind not in KV_BYTES:
        return f"KV format {kv.format.kind}, not one of {', '.join(KV_BYTES)}"
    if kv.head_dim % 8 or not 8 <= kv.head_dim <= MAX_HEAD_DIM:
        return f"head_dim {kv.head_dim} is not a multiple of 8 up to {MAX_HEAD_DIM}"
    if kv.block_size % 8 or kv.block_size not in BLOCK_SIZES:
        return f"block size {kv.block_size} is not a multiple of 8 up to {BLOCK_SIZES[-1]}"
    if num_heads % kv.num_kv_heads:
        return f"{num_heads} heads are not a multiple of {kv.num_kv_heads} KV heads"
    return None


def _address(array: npt.NDArray[np.generic], dtype: npt.DTypeLike) -> int:
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"array of {array.dtype} with strides {array.strides}, contiguous {np.dtype(dtype)} needed")
    return array.ctypes.data


def _vector(array: F32Array, length: int, what: str) -> int:
    if array.size < length:
        raise ValueError(f"{what} has {array.size} values, {length} needed")
    return _address(array, np.float32)


def _order(order: I32Array | None, k: int) -> int:
    if order is None:
        return 0
    if order.shape != (k,) or not np.array_equal(np.sort(order), np.arange(k)):
        raise ValueError(f"an order of inputs of shape {order.shape} is no permutation of {k} inputs")
    return _address(order, np.int32)


def _rows(array: F32Array) -> _cpu.Rows:
    """Rows may be a slice of columns of a wider buffer."""
    if array.dtype != np.float32 or array.ndim != 2 or array.strides[1] != 4:
        raise ValueError(f"rows of {array.dtype} with shape {array.shape} and strides {array.strides}")
    return _cpu.Rows(array.ctypes.data, array.strides[0] // 4, array.shape[0])


def _batch(batch: Batch) -> _cpu.Batch:
    return _cpu.Batch(
        *(
            _address(array, np.int32)
            for array in (
                batch.counts,
                batch.token,
                batch.position,
                batch.slot,
                batch.seq_first,
                batch.seq_rows,
                batch.logit_rows,
            )
        )
    )


def _weight(weight: PackedWeight) -> _cpu.Weight:
    form = weight.format
    return _cpu.Weight(
        form.kind, form.group, form.zero, weight.n, weight.k, _address(weight.data, np.uint8), weight.data.size
    )


def _act(act: Act) -> _cpu.Act:
    forms = [
        _cpu.Form(
            form.kind,
            form.group,
            _address(form.codes, np.int8 if form.kind == "i8" else np.int16),
            _address(form.scales, np.float32),
            _address(form.sums, np.int32),
            _order(form.order, act.k),
            _wide(form, act.k),
            0 if form.high is None else _address(form.high, np.int32),
        )
        for form in act.forms
    ]
    return _cpu.Act(act.k, act.max_rows, act.values.shape[0], _address(act.values, np.float32), forms)


def _wide(form: ActForm, k: int) -> int:
    """The address of a form's wide quads, 0 without any."""
    if form.wide is None:
        return 0
    if form.wide.shape != (k // form.group,):
        raise ValueError(f"wide quads of shape {form.wide.shape} for {k // form.group} groups")
    if ((form.wide != NO_QUAD) & (form.wide >= form.group // 4)).any():
        raise ValueError(f"a wide quad is outside of its group of {form.group}")
    return _address(form.wide, np.uint8)


def _steering(kv: KVLayer) -> tuple[int, int, int, int]:
    """Addresses of the steering's order, follow, levels and centre, zeros without one."""
    steering, heads, half = kv.steering, kv.num_kv_heads, kv.head_dim // 2
    if steering is None:
        return 0, 0, 0, 0
    shape = heads, half, 4, steering_width(kv.head_dim)
    if not np.array_equal(np.sort(steering.order, axis=1), np.tile(np.arange(half), (heads, 1))):
        raise ValueError(f"a steering's order is not a permutation of {half} pairs for each of {heads} heads")
    if steering.follow.shape != shape:
        raise ValueError(f"a steering's follow has shape {steering.follow.shape}, not {shape}")
    level, centre = steering.level, steering.centre
    if level is not None and (level.shape != (heads, half) or (level <= 0).any() or (np.frexp(level)[0] != 0.5).any()):
        raise ValueError(f"a steering's levels are not powers of two and {[heads, half]}: {level.tolist()}")
    if centre is not None and (centre.shape != (heads, kv.head_dim) or not np.isfinite(centre).all()):
        raise ValueError(f"a steering's centre is not finite and {[heads, kv.head_dim]}: {centre.tolist()}")
    return (
        _address(steering.order, np.int32),
        _address(steering.follow, np.float32),
        0 if level is None else _address(level, np.float32),
        0 if centre is None else _address(centre, np.float32),
    )


def _kv(kv: KVLayer, batch: Batch) -> _cpu.Kv:
    table = batch.tables[kv.group]
    return _cpu.Kv(
        kv.format.kind,
        _address(kv.arena, np.uint8),
        kv.block_stride,
        kv.layer_offset,
        kv.block_size,
        kv.num_kv_heads,
        kv.head_dim,
        _address(table, np.int32),
        table.shape[1],
        0 if kv.scales is None else _kv_scales(kv.scales, kv),
    )


def _latents(kv: KVLayer, batch: Batch) -> _cpu.Latents:
    table = batch.tables[kv.group]
    return _cpu.Latents(
        kv.format.kind,
        _address(kv.arena, np.uint8),
        kv.block_stride,
        kv.layer_offset,
        kv.block_size,
        kv.head_dim,
        _address(table, np.int32),
        table.shape[1],
    )


def _kv_scales(scales: F32Array, kv: KVLayer) -> int:
    if scales.shape != (2, kv.num_kv_heads) or not np.isfinite(scales).all() or scales.min() <= 0:
        raise ValueError(f"scales of K and V are not positive and [2, {kv.num_kv_heads}]: {scales.tolist()}")
    return _address(scales, np.float32)
