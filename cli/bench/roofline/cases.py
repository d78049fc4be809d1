"""Every measurement that `llmctl bench kernels` can make: an op, its arguments, and what it has to move and compute.

Weights, keys and values come from memory, as in a model, where a whole layer lies between two uses of one: an op is
therefore built over many copies of them, more than the caches hold. Rows of activations were written a moment ago and
are in a cache. Their bytes are random but finite in every format: each byte is from 0x20 to 0x3F, which as any float
format, scale or code is a number of ordinary size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ....kernels.cpu.pack import packed_bytes
from ....kernels.formats import F16, KVFormat, WeightFormat
from ....kernels.ops import (
    ATTEND_SPLIT,
    MAX_TOP,
    NO_QUAD,
    SAMPLE_ROW,
    ActMulArgs,
    AttendArgs,
    Batch,
    EmbedArgs,
    KVCopyArgs,
    KVLayer,
    LatentArgs,
    LinearArgs,
    NormAddArgs,
    NormArgs,
    PackedWeight,
    RopeStoreArgs,
    SampleArgs,
    U8Array,
    make_act,
    make_batch,
    make_rows,
    with_wide,
)
from .shapes import CONTEXTS, KV_KINDS, LATENT_KINDS, ROWS, SHAPES, Shape

BLOCK_SIZE = 32
MAX_COPIES = 1024
WARM_COPIES = 16  # of an op whose data is in a cache anyway: starting a program then takes little of the time
_FILLER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement. `make(copies, threads)` gives the arguments of that many ops, which run one after another.

    cold_bytes  what one op reads or writes that comes from memory;  warm_bytes: from a cache
    unit        which peak its multiplications are measured against: "fma", "int16", "int8", "" if they do not matter
    """

    op: str
    size: str
    part: str
    format: str
    rows: int
    cold_bytes: int
    warm_bytes: int
    ops: float
    unit: str
    make: Callable[[int, int], Sequence[object]]

    @property
    def name(self) -> str:
        """Such as `linear/0.1B/q_proj/int4g32/m16`."""
        return "/".join(filter(None, (self.op, self.size, self.part, self.format, f"m{self.rows}")))

    def copies(self, cold_target: int) -> int:
        """How many ops to build: so many that what they read from memory, each its own, fills `cold_target` bytes."""
        return min(MAX_COPIES, -(-cold_target // self.cold_bytes)) if self.cold_bytes else WARM_COPIES

    def needed_bytes(self, cold_target: int) -> int:
        """Memory that the ops take, about."""
        return self.cold_bytes * self.copies(cold_target) + 3 * self.warm_bytes


def all_cases() -> Iterator[Case]:
    """Every case, small models first; cases that share a weight follow one another."""
    for shape in SHAPES:
        yield from _linears(shape)
        for kind in KV_KINDS:
            yield from _attention(shape, kind)
        for kind in LATENT_KINDS:
            yield from _latents(shape, kind)
        for rows in ROWS:
            yield from _rowwise(shape, rows)
            yield from _sampling(shape, rows)


def _linears(shape: Shape) -> Iterator[Case]:
    for part, n, k in shape.linears():
        for form in shape.weight_formats():
            if not form.is_float and k % form.group:
                continue
            size = packed_bytes(form, n, k)
            unit = "fma" if form.is_float else "int8" if form.kind == "int4" else "int16"
            for rows in ROWS:
                yield Case(
                    "linear", shape.size, part, form.name, rows, size, _act_bytes(rows, k, form) + 4 * rows * n,
                    2.0 * rows * n * k, unit, functools.partial(_linear_args, form, rows, n, k, size),
                )  # fmt: skip


def _linear_args(form: WeightFormat, rows: int, n: int, k: int, size: int, copies: int, threads: int) -> list[object]:
    batch, act, out = _batch(rows, 0), make_act(k, rows, threads, (form,)), make_rows(n, rows)
    act.values[:] = 0.5
    for part in act.forms:
        part.codes[:] = 3
        part.scales[:] = 0.01
        part.sums[:] = 3 * part.group
    act = with_wide(act, [_half_wide(k // part.group) if part.kind == "i8" else None for part in act.forms])
    weights = filler(copies * size).reshape(copies, size)
    return [LinearArgs(batch, act, PackedWeight(form, n, k, data), None, out, False, False) for data in weights]


def _half_wide(groups: int) -> U8Array:
    """Wide quads in every second group, as a model has them."""
    return np.where(np.arange(groups) % 2 == 0, np.uint8(3), np.uint8(NO_QUAD))


def _attention(shape: Shape, kind: str) -> Iterator[Case]:
    form = KVFormat(kind)
    per_token = 2 * shape.kv_heads * form.head_bytes(shape.head_dim)
    for context in CONTEXTS:
        for rows in ROWS:
            cold = rows * (context + 1) * per_token
            yield _attend_case(shape, form, f"decode after {context}", rows, context, True, cold)
    for context in (0, *CONTEXTS):
        for rows in ROWS[-2:]:
            cold = (context + rows) * per_token
            yield _attend_case(shape, form, f"prefill after {context}", rows, context, False, cold)


def _attend_case(
    shape: Shape, form: KVFormat, part: str, rows: int, context: int, decode: bool, cold: int
) -> Case:  # fmt: skip
    width = shape.heads * shape.head_dim
    attended = rows * (context + 1) if decode else sum(range(context + 1, context + rows + 1))
    return Case(
        "attend", shape.size, part, form.kind, rows, cold, _act_bytes(rows, width, F16) + 4 * rows * width,
        4.0 * width * attended, "int16" if form.pairs else "fma",
        functools.partial(_attend_args, shape, form, rows, context, decode),
    )  # fmt: skip


def _attend_args(
    shape: Shape, form: KVFormat, rows: int, context: int, decode: bool, copies: int, threads: int
) -> list[object]:
    batch = _batch(rows, context, one_sequence=not decode)
    width = shape.heads * shape.head_dim
    q, act = make_rows(width, rows), make_act(width, rows, threads, ())
    q[:] = 0.1
    positions = -(-(context + rows + 1) // ATTEND_SPLIT) * ATTEND_SPLIT
    layers = _kv_layers(shape, form, batch, copies)
    return [AttendArgs(batch, q, shape.heads, layer, 0, positions, act) for layer in layers]


def _latents(shape: Shape, kind: str) -> Iterator[Case]:
    """A model of this size with attention on latents: of four heads' width, with a rotated key of half a head."""
    rank, rope, outputs = 4 * shape.head_dim, shape.head_dim // 2, 2 * shape.heads * shape.head_dim
    per_token = KVFormat(kind).head_bytes(rank + rope)
    for decode, contexts, counts in ((True, CONTEXTS, ROWS), (False, (0, *CONTEXTS), ROWS[-2:])):
        for context in contexts:
            for rows in counts:
                attended = rows * (context + 1) if decode else sum(range(context + 1, context + rows + 1))
                stored = (rows * (context + 1) if decode else context + rows) * per_token
                queries = 4 * rows * shape.heads * (rank + rope)  # that latents are multiplied with
                yield Case(
                    "latent", shape.size, f"{'decode' if decode else 'prefill'} after {context}", kind, rows,
                    stored + packed_bytes(F16, outputs, rank), 2 * queries,
                    2.0 * (shape.heads * attended * (2 * rank + rope) + rows * outputs * rank), "fma",
                    functools.partial(_latent_args, shape, KVFormat(kind), rows, context, decode),
                )  # fmt: skip


def _latent_args(
    shape: Shape, form: KVFormat, rows: int, context: int, decode: bool, copies: int, threads: int
) -> list[object]:
    batch, head = _batch(rows, context, one_sequence=not decode), shape.head_dim
    rank, rope, outputs = 4 * head, head // 2, 2 * shape.heads * head
    q, latent = _ones(shape.heads * (head + rope), rows), _ones(rank + rope, rows)
    turn, act = np.zeros((context + rows + 1, rope // 2), np.float32), make_act(shape.heads * head, rows, threads, ())
    layer = BLOCK_SIZE * form.head_bytes(rank + rope)
    stride = copies * layer
    arena = filler(batch.tables[0].size * stride)
    weights = filler(copies * packed_bytes(F16, outputs, rank)).reshape(copies, -1)
    return [
        LatentArgs(
            batch, q, latent, np.ones(rank, np.float32), 1e-6, PackedWeight(F16, outputs, rank, weights[index]),
            turn + 1, turn, False, shape.heads, head, head, (head + rope) ** -0.5,
            KVLayer(arena, stride, index * layer, BLOCK_SIZE, 1, rank + rope, form, 0), act,
        )
        for index in range(copies)
    ]  # fmt: skip


def _rowwise(shape: Shape, rows: int) -> Iterator[Case]:
    """The ops that touch every value of a row a few times; how many additions that takes is no matter."""
    hidden, ffn, width = shape.hidden, shape.ffn, shape.heads * shape.head_dim
    kv_width = shape.kv_heads * shape.head_dim
    x = 4 * rows * hidden

    def case(op: str, part: str, form: str, cold: int, warm: int, make: Callable[[int, int], Sequence[object]]) -> Case:
        return Case(op, shape.size, part, form, rows, cold, warm, 0.0, "", make)

    def norm(copies: int, threads: int) -> list[object]:
        act = make_act(hidden, rows, threads, (WeightFormat("int4", 32),))
        return [NormArgs(_batch(rows, 0), _ones(hidden, rows), np.ones(hidden, np.float32), 1e-5, act, False)] * copies

    def norm_add(copies: int, threads: int) -> list[object]:
        weight = np.ones(hidden, np.float32)
        return [NormAddArgs(_batch(rows, 0), _ones(hidden, rows), weight, 1e-5, _ones(hidden, rows))] * copies

    def act_mul(copies: int, threads: int) -> list[object]:
        act = make_act(ffn, rows, threads, (WeightFormat("int4", 32),))
        return [ActMulArgs(_batch(rows, 0), _ones(ffn, rows), _ones(ffn, rows), "silu", act)] * copies

    def embed(copies: int, threads: int) -> list[object]:
        form = WeightFormat("int8", 32)
        weight = PackedWeight(form, shape.vocab, hidden, filler(packed_bytes(form, shape.vocab, hidden)))
        batch = _batch(rows, 0)
        batch.token[:] = np.random.default_rng(0).integers(0, shape.vocab, rows)
        return [EmbedArgs(batch, weight, make_rows(hidden, rows))] * copies

    quantized = WeightFormat("int4", 32)
    yield case("norm", "", "i8 form", 0, x + _act_bytes(rows, hidden, quantized), norm)
    yield case("norm_add", "", "", 0, 3 * x, norm_add)
    yield case("act_mul", "silu", "i8 form", 0, 8 * rows * ffn + _act_bytes(rows, ffn, quantized), act_mul)
    if shape.size != "8B":  # a table of 8B's vocabulary only to read a few rows of it
        yield case("embed", "", "int8g32", 0, rows * hidden + x, embed)
    for kind in KV_KINDS:
        form = KVFormat(kind)
        stored = rows * 2 * shape.kv_heads * form.head_bytes(shape.head_dim)
        moved = 4 * rows * (2 * width + 2 * kv_width)
        yield case("rope_store", "", kind, 0, stored + moved, functools.partial(_rope_args, shape, form, rows))
        if rows == 1:
            copied = 2 * BLOCK_SIZE * 2 * shape.kv_heads * form.head_bytes(shape.head_dim)
            yield case("kv_copy", "a block", kind, 0, copied, functools.partial(_copy_args, shape, form))


def _rope_args(shape: Shape, form: KVFormat, rows: int, copies: int, threads: int) -> list[object]:
    batch = _batch(rows, 0)
    q, k, v = (_ones(heads * shape.head_dim, rows) for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    turn = np.zeros((rows + 1, shape.head_dim // 2), np.float32)
    (layer,) = _kv_layers(shape, form, batch, 1)
    return [RopeStoreArgs(batch, q, k, v, None, None, 1e-5, turn + 1, turn, shape.heads, 1.0, layer)] * copies


def _copy_args(shape: Shape, form: KVFormat, copies: int, threads: int) -> list[object]:
    (layer,) = _kv_layers(shape, form, _batch(2, 0), 1)
    return [
        KVCopyArgs(layer.arena, layer.block_stride, 1, BLOCK_SIZE, shape.kv_heads, shape.head_dim, form)
    ] * copies  # fmt: skip


def _sampling(shape: Shape, rows: int) -> Iterator[Case]:
    for part, temperature in (("greedy", 0.0), ("top-k 40, top-p 0.9", 0.8)):
        yield Case(
            "sample", shape.size, part, "", rows, 0, 4 * rows * shape.vocab, 0.0, "",
            functools.partial(_sample_args, shape.vocab, rows, temperature),
        )  # fmt: skip


def _sample_args(vocab: int, rows: int, temperature: float, copies: int, threads: int) -> list[object]:
    logits = make_rows(vocab, rows)
    logits[:] = np.random.default_rng(0).standard_normal(logits.shape[1], np.float32)
    settings = np.zeros(rows, SAMPLE_ROW)
    settings["temperature"], settings["logprobs"] = temperature, -1
    settings["top_p"], settings["repetition_penalty"] = 1.0 if temperature == 0 else 0.9, 1.0
    settings["top_k"] = 0 if temperature == 0 else 40
    top = np.zeros((rows, MAX_TOP), np.int32)
    args = SampleArgs(
        logits, vocab, settings, np.zeros(rows, np.int32), np.zeros(rows, np.float32), top,
        np.zeros((rows, MAX_TOP), np.float32), np.zeros(rows, np.uint8),
    )  # fmt: skip
    return [args] * copies


def _batch(rows: int, context: int, *, one_sequence: bool = False) -> Batch:
    """`rows` rows, each of a sequence of its own after `context` tokens, or all of one; every row has logits."""
    seqs = 1 if one_sequence else rows
    blocks = -(-(context + (rows if one_sequence else 1)) // BLOCK_SIZE)
    order = np.random.default_rng(0).permutation(seqs * blocks).astype(np.int32)
    batch = make_batch(rows, seqs, rows, (order.reshape(seqs, blocks),))
    batch.counts[:3] = rows, seqs, rows
    batch.logit_rows[:] = np.arange(rows)
    if one_sequence:
        batch.position[:] = context + np.arange(rows)
        batch.seq_rows[0] = rows
    else:
        batch.position[:] = context
        batch.slot[:] = batch.seq_first[:] = np.arange(rows)
        batch.seq_rows[:] = 1
    return batch


def _kv_layers(shape: Shape, form: KVFormat, batch: Batch, copies: int) -> list[KVLayer]:
    """`copies` layers of an arena that has the blocks of the batch's table."""
    layer = 2 * shape.kv_heads * BLOCK_SIZE * form.head_bytes(shape.head_dim)
    stride = copies * layer
    arena = filler(batch.tables[0].size * stride)
    return [
        KVLayer(arena, stride, index * layer, BLOCK_SIZE, shape.kv_heads, shape.head_dim, form, 0)
        for index in range(copies)
    ]


def _act_bytes(rows: int, k: int, form: WeightFormat) -> int:
    """Bytes of activations in the form that this weight format is multiplied with, written or read."""
    if form.is_float:
        return 4 * rows * k
    return rows * k * (1 if form.kind == "int4" else 2) + rows * (k // form.group) * 8


def _ones(width: int, rows: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    buffer = make_rows(width, rows)
    buffer[:] = 1.0
    return buffer


@functools.lru_cache(maxsize=1)
def filler(size: int) -> U8Array:
    """`size` bytes that are ordinary numbers in any format. The last size asked for is kept: cases share weights."""
    block = np.random.default_rng(0).integers(0x20, 0x40, min(size, _FILLER_BYTES), np.uint8)
    filled: U8Array = np.resize(block, size)
    return filled
