"""Seeded arguments for every op: two calls with the same case give two separate worlds with the same bits in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from llmctl.kernels.cpu.pack import pack
from llmctl.kernels.formats import INT16, INT16_TOP, KVFormat, WeightFormat, parse_weight_format
from llmctl.kernels.ops import (
    NO_QUAD,
    Act,
    ActForm,
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
    U8Array,
    make_act,
    make_batch,
    make_rows,
    with_wide,
)
from llmctl.kernels.reference.act import write_act
from llmctl.kernels.reference.kv import head_view, latent_view, view_of

MAX_ROWS, MAX_SEQS, THREADS = 40, 16, 2
STORED = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "int16": torch.int16,
}
ALL_FORMS = tuple(parse_weight_format(name) for name in ("f32", "int16g32", "int4g32", "int8g32", "int4g64"))


@dataclass(frozen=True)
class Case:
    """One way to call an op. `make` builds a world; `outputs` reads what the op wrote to it."""

    op: str
    name: str
    dtype: str  # whose tolerance applies
    make: Callable[[], Any]
    outputs: Callable[[Any], dict[str, np.ndarray]]


def random_weight(format: WeightFormat, n: int, k: int, rng: np.random.Generator) -> PackedWeight:
    """A packed weight with values of about 1 / sqrt(k). A scale may be negative, as those of GGUF often are."""
    if format.is_float:
        values = torch.from_numpy((rng.standard_normal((n, k)) / np.sqrt(k)).astype(np.float32))
        if format.kind == "bf16":
            data = values.bfloat16().view(torch.uint16).numpy()
        else:
            data = values.numpy() if format.kind == "f32" else values.half().numpy()
        return PackedWeight(format, n, k, pack(format, data))
    groups = k // format.group
    if format == INT16:
        codes = rng.integers(-INT16_TOP, INT16_TOP + 1, (n, k)).astype(np.int16)
        exponents = rng.integers(-1, 2, (n, groups)) - int(np.log2(np.sqrt(k))) - 13
        return PackedWeight(format, n, k, pack(format, codes, (exponents + 127).astype(np.uint8)))
    if format.kind == "int8":
        codes = rng.integers(-127, 128, (n, k)).astype(np.int8)
        scales = rng.uniform(0.5, 1.5, (n, groups)) / np.sqrt(k) / 64
    else:
        codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
        scales = rng.uniform(0.5, 1.5, (n, groups)) / np.sqrt(k) / 4
    scales = (scales * rng.choice([-1, 1], scales.shape)).astype(np.float16)
    zeros = None
    if format.zero == "min":
        zeros = (-8 * scales * rng.uniform(0.5, 1.5, (n, groups))).astype(np.float16)
    elif format.zero == "int":
        zeros = rng.integers(0, 16, (n, groups)).astype(np.uint8)
    return PackedWeight(format, n, k, pack(format, codes, scales, zeros))


def random_batch(rng: np.random.Generator, rows: int, *, block_size: int = 0, far: int = 0) -> tuple[Batch, int]:
    """Rows shared out to sequences in uneven chunks, each at some position up to `far`, and every third with logits.

    Sequences have slots in no order and blocks in no order; no block has two owners. Also says how many blocks there
    must be: a few more than are used.
    """
    chunks = []
    while (left := rows - sum(chunks)) > 0:
        chunks.append(min(left, int(rng.integers(1, 2 + rows // 2)), 9))
    assert len(chunks) <= MAX_SEQS, chunks
    starts = [int(start) for start in rng.integers(0, far + 1, len(chunks))]
    needed = [-(-(start + take) // block_size) if block_size else 0 for start, take in zip(starts, chunks)]
    free = list(rng.permutation(sum(needed) + 3))
    table = np.full((MAX_SEQS, max(needed) + 1), -1, np.int32)
    batch = make_batch(MAX_ROWS, MAX_SEQS, MAX_ROWS, (np.zeros((MAX_SEQS, 1), np.int32), table))
    row = 0
    for i, (slot, take, start, count) in enumerate(zip(rng.permutation(MAX_SEQS), chunks, starts, needed)):
        batch.seq_first[i], batch.seq_rows[i] = row, take
        batch.position[row : row + take] = np.arange(start, start + take)
        batch.slot[row : row + take] = slot
        table[slot, :count] = [free.pop() for _ in range(count)]
        row += take
    logit_rows = np.arange(rows)[rows % 3 :: 3] if rows > 2 else np.arange(rows)[-1:]
    batch.logit_rows[: len(logit_rows)] = logit_rows
    batch.counts[:3] = rows, len(chunks), len(logit_rows)
    return batch, sum(needed) + 3


def random_rows(rng: np.random.Generator, width: int, scale: float = 1.0) -> np.ndarray:
    """A row buffer whose every row and padding column holds something."""
    rows = make_rows(width, MAX_ROWS)
    rows[:] = rng.standard_normal(rows.shape) * scale
    return rows


def act_outputs(act: Act, rows: int) -> dict[str, np.ndarray]:
    """What consumers of `rows` rows will read."""
    found = {"values": act.values[:rows]}
    for i, form in enumerate(act.forms):
        if form.wide is not None:
            found[f"{i}.wide"] = form.wide
        found[f"{i}.order"] = np.arange(act.k) if form.order is None else form.order
        found[f"{i}.{form.kind}.{form.group}.codes"] = form.codes[:rows]
        found[f"{i}.{form.kind}.{form.group}.scales"] = form.scales[:rows]
        found[f"{i}.{form.kind}.{form.group}.sums"] = form.sums[:rows]
        if form.wide is not None and form.high is not None:
            found[f"{i}.{form.kind}.{form.group}.high"] = form.high[:rows, form.wide != NO_QUAD]
    return found


def act_with_all_forms(k: int) -> Act:
    """Activations of width k in every form that divides k, and in one whose values are shuffled."""
    formats = [f for f in ALL_FORMS if f.is_float or k % f.group == 0]
    orders = [None] * len(formats)
    if k % 32 == 0:
        formats.append(parse_weight_format("int4g32"))
        orders.append(np.random.default_rng(k).permutation(k).astype(np.int32))
    act = make_act(k, MAX_ROWS, THREADS, formats, orders)
    plain = next((i for i, form in enumerate(act.forms) if form.kind == "i8" and form.order is None), 0)
    return with_wide(act, [None if i == plain else random_quads(form, k) for i, form in enumerate(act.forms)])


def random_quads(form: ActForm, k: int) -> U8Array | None:
    """Wide quads in some of the groups of a form of int8, everywhere in them."""
    if not form.can_widen:
        return None
    rng = np.random.default_rng(k + form.group)
    quads = rng.integers(0, form.group // 4, k // form.group).astype(np.uint8)
    quads[rng.random(len(quads)) < 0.3] = NO_QUAD
    return quads


def embed_case(format: WeightFormat, rows: int, vocab: int, hidden: int, scale: float = 1.0) -> Case:
    def make() -> EmbedArgs:
        rng = np.random.default_rng(rows)
        batch, _ = random_batch(rng, rows)
        batch.token[:rows] = rng.integers(0, vocab, rows)
        batch.token[0] = vocab - 1
        return EmbedArgs(batch, random_weight(format, vocab, hidden, rng), random_rows(rng, hidden), scale)

    def outputs(args: EmbedArgs) -> dict[str, np.ndarray]:
        return {"out": args.out[:rows, :hidden], "rest": args.out[rows:, :hidden]}

    name = f"{format.name}-m{rows}-{vocab}x{hidden}{f'-x{scale:.4g}' * (scale != 1)}"
    return Case("embed", name, "exact", make, outputs)


def norm_case(rows: int, k: int, logit_rows_only: bool) -> Case:
    def make() -> NormArgs:
        rng = np.random.default_rng(rows + k)
        batch, _ = random_batch(rng, rows)
        weight = rng.uniform(0.5, 1.5, k).astype(np.float32)
        act = act_with_all_forms(k)
        x = random_rows(rng, k, 3.0)
        x[0, : min(32, k)] = 0  # a whole group of zeros
        return NormArgs(batch, x, weight, 1e-5, act, logit_rows_only)

    def outputs(args: NormArgs) -> dict[str, np.ndarray]:
        return act_outputs(args.act, int(args.batch.counts[2 if logit_rows_only else 0]))

    return Case("norm", f"m{rows}-k{k}{'-logits' * logit_rows_only}", "f32", make, outputs)


def norm_add_case(rows: int, width: int) -> Case:
    def make() -> NormAddArgs:
        rng = np.random.default_rng(rows + width)
        batch, _ = random_batch(rng, rows)
        weight = rng.uniform(0.5, 1.5, width).astype(np.float32)
        return NormAddArgs(batch, random_rows(rng, width, 3.0), weight, 1e-6, random_rows(rng, width))

    def outputs(args: NormAddArgs) -> dict[str, np.ndarray]:
        return {"out": args.out[:rows, :width], "rest": args.out[rows:]}

    return Case("norm_add", f"m{rows}-{width}", "f32", make, outputs)


def linear_case(
    format: WeightFormat,
    rows: int,
    n: int,
    k: int,
    *,
    bias: bool = False,
    add: bool = False,
    logits: bool = False,
    ordered: bool = False,
    wide: bool = False,
) -> Case:
    def make() -> LinearArgs:
        rng = np.random.default_rng(rows * 7 + n)
        batch, _ = random_batch(rng, rows)
        orders = [None, rng.permutation(k).astype(np.int32)] if ordered else [None]
        act = make_act(k, MAX_ROWS, THREADS, [format] * len(orders), orders)
        used = int(batch.counts[2 if logits else 0])
        x = rng.standard_normal((used, k)).astype(np.float32)
        if wide:
            act = with_wide(act, [random_quads(form, k) for form in act.forms])
            x[:, ::5] *= 60  # outliers, in wide quads and elsewhere
        write_act(act, torch.from_numpy(x))
        padded = np.zeros(-(-n // 16) * 16, np.float32)
        padded[:n] = rng.standard_normal(n)
        weight = dataclasses.replace(random_weight(format, n, k, rng), order=orders[-1])
        return LinearArgs(batch, act, weight, padded if bias else None, random_rows(rng, n), add, logits)

    def outputs(args: LinearArgs) -> dict[str, np.ndarray]:
        used = int(args.batch.counts[2 if logits else 0])
        return {"out": args.out[:used, :n], "rest": args.out[used:, :n]}

    flags = {"-bias": bias, "-add": add, "-logits": logits, "-ordered": ordered, "-wide": wide}
    name = f"{format.name}-m{rows}-{n}x{k}" + "".join(flag for flag, on in flags.items() if on)
    return Case("linear", name, format.kind, make, outputs)


def random_kv(
    rng: np.random.Generator, format: KVFormat, blocks: int, block_size: int, kv_heads: int, head_dim: int
) -> KVLayer:
    """The second of three layers of an arena with slack behind each block; every value in it is finite."""
    layer = 2 * kv_heads * block_size * format.head_bytes(head_dim)
    stride = 3 * layer + 64
    values = torch.from_numpy(rng.standard_normal(blocks * stride // format.bytes_per_value, np.float32))
    step = {"int8": 1.0, "int16": 1 / 16}.get(format.kind, 0.0)
    if step:
        values = (values * 40 / step).round().clamp(-127 / step, 127 / step)
    arena = values.to(STORED[format.kind]).view(torch.uint8).numpy()
    for head in range(3 * kv_heads if format.scale_bytes else 0):
        view = view_of(arena, stride, 0, head, block_size, head_dim, format)
        for scales in (view.key_scales, view.value_scales):
            assert scales is not None
            scales[:] = torch.from_numpy(rng.uniform(0.01, 0.05, scales.shape)) * step
    return KVLayer(arena, stride, layer, block_size, kv_heads, head_dim, format, 1)


def stored_values(kv: KVLayer) -> np.ndarray:
    """What all blocks of the layer hold: float64 [K or V, heads, positions, head_dim]."""
    every = torch.arange(kv.arena.size // kv.block_stride)
    heads = [torch.stack(head_view(kv, head).read(every)) for head in range(kv.num_kv_heads)]
    return torch.stack(heads, 1).numpy()


def other_layers(kv: KVLayer) -> np.ndarray:
    """The bytes of every block that are not the layer's."""
    blocks = kv.arena[: kv.arena.size // kv.block_stride * kv.block_stride].reshape(-1, kv.block_stride)
    layer = 2 * kv.num_kv_heads * kv.block_size * kv.format.head_bytes(kv.head_dim)
    return np.delete(blocks, slice(kv.layer_offset, kv.layer_offset + layer), axis=1)


def rope_store_case(
    rows: int, heads: int, kv_heads: int, head_dim: int, block_size: int, kind: str, *, norm: bool, turn: bool = True
) -> Case:
    def make() -> RopeStoreArgs:
        rng = np.random.default_rng(rows + heads)
        batch, blocks = random_batch(rng, rows, block_size=block_size, far=50)
        kv = random_kv(rng, KVFormat(kind), blocks, block_size, kv_heads, head_dim)
        angles = rng.uniform(0, 6, (60 + MAX_ROWS, head_dim // 2))
        norms = rng.uniform(0.5, 1.5, (2, head_dim)).astype(np.float32)
        return RopeStoreArgs(
            batch,
            random_rows(rng, heads * head_dim),
            random_rows(rng, kv_heads * head_dim),
            random_rows(rng, kv_heads * head_dim),
            norms[0] if norm else None,
            norms[1] if norm else None,
            1e-6,
            np.cos(angles).astype(np.float32) if turn else None,
            np.sin(angles).astype(np.float32) if turn else None,
            heads,
            head_dim**-0.5,
            kv,
        )

    def outputs(args: RopeStoreArgs) -> dict[str, np.ndarray]:
        others = other_layers(args.kv)
        return {"q": args.q[:rows, : heads * head_dim], "arena": stored_values(args.kv), "other layers": others}

    name = f"m{rows}-h{heads}x{kv_heads}x{head_dim}-b{block_size}-{kind}{'-norm' * norm}{'-still' * (not turn)}"
    return Case("rope_store", name, "kv_" + kind, make, outputs)


def attend_case(
    rows: int, heads: int, kv_heads: int, head_dim: int, block_size: int, kind: str, *, window: int = 0, far: int = 50
) -> Case:
    def make() -> AttendArgs:
        rng = np.random.default_rng(rows + heads + far)
        batch, blocks = random_batch(rng, rows, block_size=block_size, far=far)
        kv = random_kv(rng, KVFormat(kind), blocks, block_size, kv_heads, head_dim)
        act = act_with_all_forms(heads * head_dim)
        q = random_rows(rng, heads * head_dim, 2 * head_dim**-0.5)
        return AttendArgs(batch, q, heads, kv, window, far + MAX_ROWS, act)

    def outputs(args: AttendArgs) -> dict[str, np.ndarray]:
        return act_outputs(args.act, rows)

    name = f"m{rows}-h{heads}x{kv_heads}x{head_dim}-b{block_size}-{kind}-w{window}-far{far}"
    return Case("attend", name, "attend_int16" if kind == "int16" else "f32", make, outputs)


def latent_case(
    rows: int,
    heads: int,
    sizes: tuple[int, int, int, int],
    block_size: int,
    kind: str,
    weight: WeightFormat,
    *,
    interleaved: bool = False,
    ordered: bool = False,
    far: int = 50,
) -> Case:
    """Attention on latents; `sizes` are rank, rope_dim, nope_dim and value_dim."""
    rank, rope, nope, value = sizes

    def make() -> LatentArgs:
        rng = np.random.default_rng(rows + far)
        batch, blocks = random_batch(rng, rows, block_size=block_size, far=far)
        layer = block_size * (rank + rope) * KVFormat(kind).bytes_per_value
        values = torch.from_numpy(rng.standard_normal((blocks, 2 * block_size * (rank + rope)), np.float32))
        arena = values.to(STORED[kind]).view(torch.uint8).numpy().reshape(-1)
        angles = rng.uniform(0, 6, (far + 60 + MAX_ROWS, rope // 2))
        up = random_weight(weight, heads * (nope + value), rank, rng)
        return LatentArgs(
            batch,
            random_rows(rng, heads * (nope + rope)),
            random_rows(rng, rank + rope),
            rng.uniform(0.5, 1.5, rank).astype(np.float32),
            1e-6,
            dataclasses.replace(up, order=rng.permutation(rank).astype(np.int32)) if ordered else up,
            np.cos(angles).astype(np.float32),
            np.sin(angles).astype(np.float32),
            interleaved,
            heads,
            nope,
            value,
            (nope + rope) ** -0.5,
            KVLayer(arena, 2 * layer, layer, block_size, 1, rank + rope, KVFormat(kind), 1),
            act_with_all_forms(heads * value),
        )

    def outputs(args: LatentArgs) -> dict[str, np.ndarray]:
        kv = args.kv
        beside = kv.arena.reshape(-1, kv.block_stride)[:, : kv.layer_offset]
        return {**act_outputs(args.act, rows), "arena": latent_view(kv).double().numpy(), "other layers": beside}

    name = f"m{rows}-h{heads}x{rank}+{rope}x{nope}x{value}-b{block_size}-{kind}-{weight.name}-far{far}"
    name += "-interleaved" * interleaved + "-ordered" * ordered
    return Case("latent", name, f"latent_{kind}", make, outputs)


def act_mul_case(rows: int, k: int, activation: str) -> Case:
    def make() -> ActMulArgs:
        rng = np.random.default_rng(rows + k)
        gate, up = random_rows(rng, k, 4.0), random_rows(rng, k)
        gate[0, :4] = 0, -100, 100, -0.0
        batch, _ = random_batch(rng, rows)
        return ActMulArgs(batch, gate, up, activation, act_with_all_forms(k))

    def outputs(args: ActMulArgs) -> dict[str, np.ndarray]:
        return act_outputs(args.act, rows)

    return Case("act_mul", f"m{rows}-k{k}-{activation}", "f32", make, outputs)


def kv_copy_case(kind: str, block_size: int, kv_heads: int, head_dim: int) -> Case:
    def make() -> KVCopyArgs:
        rng = np.random.default_rng(block_size)
        kv = random_kv(rng, KVFormat(kind), 5, block_size, kv_heads, head_dim)
        return KVCopyArgs(kv.arena, kv.block_stride, 3, block_size, kv_heads, head_dim, kv.format)

    def outputs(args: KVCopyArgs) -> dict[str, np.ndarray]:
        return {"arena": args.arena}

    return Case("kv_copy", f"{kind}-b{block_size}-h{kv_heads}x{head_dim}", "exact", make, outputs)


def all_cases() -> Iterator[Case]:
    """Every case of every op but sampling, which has tests of its own."""
    floats = [parse_weight_format(name) for name in ("f32", "f16", "bf16")]
    integers = [
        parse_weight_format(name)
        for name in (
            "int16g32",
            "int8g32",
            "int8g64",
            "int8g128",
            "int4g32",
            "int4g64",
            "int4g128",
            "int4g32min",
            "int4g64int",
        )
    ]
    whole = (WeightFormat("int8", 384), WeightFormat("int4", 384), WeightFormat("int4", 384, "min"))
    for format in (*floats, *integers, *whole):
        k = 100 if format.kind == "f32" else 384
        yield embed_case(format, 3, 37, k)
        yield embed_case(format, 7, 37, k, 640**0.5)
        for rows in (1, 2, 3, 7, 33):
            yield linear_case(format, rows, 50, k)
        yield linear_case(format, 7, 17, k, bias=True)
        yield linear_case(format, 7, 64, k, add=True)
        yield linear_case(format, 33, 33, k, bias=True, add=True, logits=True)
        yield linear_case(format, 1, 16, k, logits=True)
        if not format.is_float and format.group <= 128:
            yield linear_case(format, 3, 40, k, ordered=True)
        if format.kind == "int4":
            for rows in (1, 3, 9):
                yield linear_case(format, rows, 40, k, wide=True)
            if format.group <= 128:
                yield linear_case(format, 5, 33, k, ordered=True, wide=True)
    for k in (1, 7, 9, 33):
        yield linear_case(floats[0], 5, 20, k)
        yield norm_case(5, k, False)
        yield norm_add_case(5, k)
        yield act_mul_case(5, k, "silu")
    for rows in (1, 2, 3, 7, 33):
        for logits in (False, True):
            yield norm_case(rows, 576, logits)
        yield norm_add_case(rows, 576)
        for activation in ("silu", "gelu_tanh"):
            yield act_mul_case(rows, 192, activation)
    for rows, kind, block_size in (
        (1, "f32", 8), (2, "f16", 16), (7, "bf16", 16), (33, "f16", 64), (3, "f32", 64),
        (7, "fp8_e4m3", 8), (1, "fp8_e4m3", 64), (7, "fp8_e5m2", 16), (33, "int8", 16), (2, "int8", 64),
        (1, "int16", 8), (7, "int16", 64), (33, "int16", 16),
    ):  # fmt: skip
        for heads, kv_heads, head_dim in ((2, 2, 8), (3, 1, 16), (9, 3, 64), (7, 1, 80), (6, 2, 128)):
            for norm in (False, True):
                yield rope_store_case(rows, heads, kv_heads, head_dim, block_size, kind, norm=norm)
            yield rope_store_case(rows, heads, kv_heads, head_dim, block_size, kind, norm=rows == 7, turn=False)
            yield attend_case(rows, heads, kv_heads, head_dim, block_size, kind)
        for window in (1, 5, 64, 300):
            yield attend_case(rows, 9, 3, 64, block_size, kind, window=window, far=290)
        yield attend_case(rows, 7, 1, 80, block_size, kind, far=500)
        yield kv_copy_case(kind, block_size, 3, 16)
    for rows, kind, block_size, weight in (
        (1, "f32", 8, "f32"), (2, "f16", 16, "f16"), (7, "bf16", 16, "bf16"), (33, "f16", 64, "int8g32"),
        (7, "f32", 8, "int16g32"),
        (7, "f32", 64, "int4g32"), (3, "f16", 8, "int4g32min"), (33, "bf16", 16, "int4g64int"),
    ):  # fmt: skip
        form = parse_weight_format(weight)
        turned = kind == "f16"
        yield latent_case(rows, 3, (64, 16, 8, 24), block_size, kind, form, interleaved=turned)
        yield latent_case(rows, 17, (64, 8, 20, 16), block_size, kind, form, interleaved=not turned)
        if rows < 33:
            yield latent_case(rows, 8, (128, 32, 64, 64), block_size, kind, form, ordered=not form.is_float, far=300)
    yield latent_case(2, 16, (512, 64, 128, 128), 16, "f16", floats[1], interleaved=True, far=200)
