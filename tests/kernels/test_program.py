"""C++ programs: the same bits however a batch is cut, and what they compute against plain numpy.

A one-layer decoder is built from every op. Its prompt is fed in chunks, its blocks are scattered over an arena full of
NaN, and the logits must not show how it was done.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from llmctl.kernels import _cpu
from llmctl.kernels.cpu import ops as cpu
from llmctl.kernels.formats import KVFormat, WeightFormat, parse_weight_format
from llmctl.kernels.ops import (
    ActMulArgs,
    AttendArgs,
    EmbedArgs,
    KVCopyArgs,
    KVLayer,
    LinearArgs,
    NormArgs,
    Op,
    PackedWeight,
    RopeStoreArgs,
    make_act,
    make_batch,
    make_rows,
)

FORMATS = ("f32", "f16", "bf16", "int16g32", "int8g32", "int8g64", "int4g32", "int4g64min", "int4g64int")
KV_TOLERANCES = {"f16": 3e-3, "bf16": 3e-2, "fp8_e4m3": 0.15, "fp8_e5m2": 0.3, "int8": 3e-2, "int16": 3e-3}
EPS = 1e-5


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    _cpu.set_threads(1)
    yield
    _cpu.set_threads(1)
    _cpu.set_isa(_cpu.isas()[-1])


def bf16_bits(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def as_bytes(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in parts])


class Matrix:
    """A random [n, k] weight: packed, and as float64 values."""

    def __init__(self, rng: np.random.Generator, n: int, k: int, format: WeightFormat) -> None:
        padded = -(-n // 16) * 16
        if format.is_float:
            w = np.zeros((padded, k), np.float32)
            w[:n] = rng.standard_normal((n, k)).astype(np.float32) / np.sqrt(k)
            panels = w.reshape(-1, 16, k).transpose(0, 2, 1)
            if format.kind == "f32":
                data, values = as_bytes(panels), w
            elif format.kind == "f16":
                data, values = as_bytes(panels.astype(np.float16)), w.astype(np.float16)
            else:
                pairs = panels.reshape(-1, k, 2, 8).transpose(0, 1, 3, 2)
                data, values = as_bytes(bf16_bits(pairs)), (bf16_bits(w).astype(np.uint32) << 16).view(np.float32)
        elif format.kind == "int16":
            data, values = self._int16(rng, padded, k)
        else:
            data, values = self._integer(rng, padded, k, format)
        self.values = values[:n].astype(np.float64)
        self.packed = PackedWeight(format, n, k, data)
        self.format = format

    @staticmethod
    def _int16(rng: np.random.Generator, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
        codes = rng.integers(-8192, 8193, (n, k))
        exponents = rng.integers(-18, -15, (n, k // 32))
        parts = []
        for panel in range(0, n, 16):
            head = np.zeros(-(-(k // 32) // 4) * 64, np.uint8)
            head[: k // 2] = (exponents[panel : panel + 16].T + 127).reshape(-1)
            parts += [head, as_bytes(codes[panel : panel + 16].reshape(16, -1, 2).transpose(1, 0, 2).astype(np.int16))]
        return np.concatenate(parts), codes * np.repeat(2.0**exponents, 32, 1)

    @staticmethod
    def _integer(rng: np.random.Generator, n: int, k: int, format: WeightFormat) -> tuple[np.ndarray, np.ndarray]:
        group, groups = format.group, k // format.group
        low, high = (-128, 128) if format.kind == "int8" else (0, 16)
        codes = rng.integers(low, high, (n, groups, group))
        scales = (rng.uniform(0.5, 1.5, (n, groups)) / np.sqrt(k) / (70 if low else 5)).astype(np.float16)
        extra = {"none": np.zeros((n, groups)), "min": -8 * scales, "int": rng.integers(0, 16, (n, groups))}[
            format.zero
        ]
        extra = extra.astype(np.float16)
        offset = {"none": 0 if low else 8, "min": 0, "int": extra.astype(np.float64)[..., None]}[format.zero]
        values = (codes - offset) * scales.astype(np.float64)[..., None]
        if format.zero == "min":
            values = values + extra.astype(np.float64)[..., None]
        parts = []
        for panel in range(0, n, 16):
            for g in range(groups):
                q = codes[panel : panel + 16, g]
                parts.append(as_bytes(scales[panel : panel + 16, g]))
                if format.zero != "none":
                    parts.append(as_bytes(extra[panel : panel + 16, g]))
                if format.kind == "int8":
                    parts.append(as_bytes(q.reshape(16, -1, 2).transpose(1, 0, 2).astype(np.int8)))
                else:
                    eights = q.reshape(16, -1, 2, 4).transpose(1, 0, 2, 3)  # step, column, half, k
                    parts.append(as_bytes((eights[:, :, 0] | eights[:, :, 1] << 4).astype(np.uint8)))
        return np.concatenate(parts), values.reshape(n, k)


class Decoder:
    """One layer of a decoder on the C++ ops, with its own arena and block tables."""

    hidden, inner, vocab, max_rows, slots, context = 128, 192, 50, 72, 70, 512

    def __init__(
        self,
        format: str = "f32",
        *,
        kv: str = "f32",
        heads: tuple[int, int, int] = (6, 2, 16),
        block_size: int = 16,
        window: int = 0,
        act_threads: int = 4,
    ) -> None:
        rng = np.random.default_rng(7)
        f = parse_weight_format(format)
        self.num_heads, self.num_kv, self.dim = heads
        self.block_size, self.window, self.kv = block_size, window, kv
        q_width, kv_width = self.num_heads * self.dim, self.num_kv * self.dim
        o_format = f if f.is_float or q_width % f.group == 0 else parse_weight_format("f32")
        self.embedding = Matrix(rng, self.vocab, self.hidden, f)
        self.wq, self.wk, self.wv = (Matrix(rng, n, self.hidden, f) for n in (q_width, kv_width, kv_width))
        self.wo = Matrix(rng, self.hidden, q_width, o_format)
        self.gate, self.up = (Matrix(rng, self.inner, self.hidden, f) for _ in range(2))
        self.down = Matrix(rng, self.hidden, self.inner, f)
        self.bias = rng.standard_normal(-(-q_width // 16) * 16).astype(np.float32)
        self.norms = rng.uniform(0.5, 1.5, (3, self.hidden)).astype(np.float32)
        self.head_norms = rng.uniform(0.5, 1.5, (2, self.dim)).astype(np.float32)
        angles = np.arange(self.context)[:, None] * 100.0 ** (-np.arange(self.dim // 2) / (self.dim // 2))
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

        blocks = -(-self.context // block_size)
        table = rng.permutation(self.slots * blocks).astype(np.int32).reshape(self.slots, blocks)
        self.block_bytes = 2 * self.num_kv * block_size * KVFormat(kv).head_bytes(self.dim)
        self.arena = np.full(self.slots * blocks * self.block_bytes, 0xFF, np.uint8)  # NaN in every format
        self.batch = make_batch(self.max_rows, self.slots, self.max_rows, (table,))
        kv_layer = KVLayer(self.arena, self.block_bytes, 0, block_size, self.num_kv, self.dim, KVFormat(kv), group=0)
        rows = self.max_rows
        self.x = make_rows(self.hidden, rows)
        self.q, self.k, self.v = make_rows(q_width, rows), make_rows(kv_width, rows), make_rows(kv_width, rows)
        self.g, self.u = make_rows(self.inner, rows), make_rows(self.inner, rows)
        self.logits = make_rows(self.vocab, rows)
        normed = make_act(self.hidden, rows, act_threads, [f])
        attended = make_act(q_width, rows, act_threads, [o_format])
        mixed = make_act(self.inner, rows, act_threads, [f])
        last = make_act(self.hidden, rows, act_threads, [f])
        self.normed, self.attended = normed, attended
        b, n = self.batch, self.norms
        scale = self.dim**-0.5

        def linear(act, weight, out, *, bias=None, add=False, logit_rows=False):
            return cpu.build_linear(LinearArgs(b, act, weight.packed, bias, out, add, logit_rows))

        self.ops: tuple[Op, ...] = (
            *cpu.build_embed(EmbedArgs(b, self.embedding.packed, self.x)),
            *cpu.build_norm(NormArgs(b, self.x, n[0], EPS, normed, False)),
            *linear(normed, self.wq, self.q, bias=self.bias),
            *linear(normed, self.wk, self.k),
            *linear(normed, self.wv, self.v),
            *cpu.build_rope_store(
                RopeStoreArgs(
                    b,
                    self.q,
                    self.k,
                    self.v,
                    *self.head_norms,
                    EPS,
                    self.cos,
                    self.sin,
                    self.num_heads,
                    scale,
                    kv_layer,
                )
            ),
            *cpu.build_attend(AttendArgs(b, self.q, self.num_heads, kv_layer, window, self.context, attended)),
            *linear(attended, self.wo, self.x, add=True),
            *cpu.build_norm(NormArgs(b, self.x, n[1], EPS, normed, False)),
            *linear(normed, self.gate, self.g),
            *linear(normed, self.up, self.u),
            *cpu.build_act_mul(ActMulArgs(b, self.g, self.u, "silu", mixed)),
            *linear(mixed, self.down, self.x, add=True),
            *cpu.build_norm(NormArgs(b, self.x, n[2], EPS, last, True)),
            *linear(last, self.embedding, self.logits, logit_rows=True),
        )
        self.program = cpu.record(self.ops, self.batch)

    def step(self, chunks: list[tuple[int, int, np.ndarray]], *, recorded: bool = True) -> np.ndarray:
        """Logits of every row: chunks of (slot, first position, tokens)."""
        b, row = self.batch, 0
        for s, (slot, start, tokens) in enumerate(chunks):
            end = row + len(tokens)
            b.token[row:end], b.slot[row:end] = tokens, slot
            b.position[row:end] = np.arange(start, start + len(tokens))
            b.seq_first[s], b.seq_rows[s] = row, len(tokens)
            row = end
        b.counts[:3] = row, len(chunks), row
        b.logit_rows[:row] = np.arange(row)
        if recorded:
            self.program.replay()
        else:
            for op in self.ops:
                op.run()
        return self.logits[:row, : self.vocab].copy()

    def prompt(self, tokens: np.ndarray, chunk: int, *, slot: int = 0, recorded: bool = True) -> np.ndarray:
        """Logits of every position of a prompt fed in chunks."""
        return np.concatenate(
            [self.step([(slot, at, tokens[at : at + chunk])], recorded=recorded) for at in range(0, len(tokens), chunk)]
        )

    def plain(self, tokens: np.ndarray) -> np.ndarray:
        """The same in float64 numpy, without quantized activations and with KV as computed."""
        n, dim, count = self.norms.astype(np.float64), self.dim, len(tokens)

        def normalized(x, weight):
            return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight

        def rotated(x, weight):
            x = normalized(x.reshape(count, -1, dim), weight)
            a, b = x[..., : dim // 2], x[..., dim // 2 :]
            c, s = self.cos[:count, None].astype(np.float64), self.sin[:count, None].astype(np.float64)
            return np.concatenate([a * c - b * s, b * c + a * s], -1)

        x = self.embedding.values[tokens]
        h = normalized(x, n[0])
        q = rotated(h @ self.wq.values.T + self.bias[: self.wq.values.shape[0]], self.head_norms[0])
        k = rotated(h @ self.wk.values.T, self.head_norms[1])
        v = (h @ self.wv.values.T).reshape(count, self.num_kv, dim)
        k, v = (np.repeat(t, self.num_heads // self.num_kv, 1) for t in (k, v))
        scores = np.einsum("qhd,thd->hqt", q, k) * dim**-0.5
        distance = np.arange(count)[:, None] - np.arange(count)[None]
        hidden = (distance < 0) | ((distance >= self.window) if self.window else False)
        scores = np.exp(np.where(hidden, -np.inf, scores - scores.max(-1, keepdims=True)))
        attended = np.einsum("hqt,thd->qhd", scores / scores.sum(-1, keepdims=True), v).reshape(count, -1)
        x = x + attended @ self.wo.values.T
        h = normalized(x, n[1])
        g = h @ self.gate.values.T
        x = x + (g / (1 + np.exp(-g)) * (h @ self.up.values.T)) @ self.down.values.T
        return normalized(x, n[2]) @ self.embedding.values.T


def some_tokens(count: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, Decoder.vocab, count).astype(np.int32)


@pytest.mark.parametrize("isa", _cpu.isas())
@pytest.mark.parametrize("format", FORMATS)
def test_decoder_agrees_with_plain_numpy(format: str, isa: str) -> None:
    _cpu.set_isa(isa)
    tokens = some_tokens(150)
    decoder = Decoder(format)
    got, expected = decoder.prompt(tokens, 50), decoder.plain(tokens)
    tolerances = {"f32": 2e-5, "f16": 2e-5, "bf16": 2e-5, "int16g32": 1e-3, "int8g32": 0.02, "int8g64": 0.02}
    assert np.abs(got - expected).max() < tolerances.get(format, 0.08) * np.abs(expected).max()


@pytest.mark.parametrize("kv", KV_TOLERANCES)
@pytest.mark.parametrize("window", [0, 1, 40, 200])
@pytest.mark.parametrize("heads", [(6, 2, 16), (4, 4, 24), (16, 1, 40), (7, 1, 8), (10, 2, 64)])
def test_attention_agrees_with_plain_numpy(heads: tuple[int, int, int], window: int, kv: str) -> None:
    tokens = some_tokens(300)
    decoder = Decoder(heads=heads, window=window, kv=kv)
    got, expected = decoder.prompt(tokens, 70), decoder.plain(tokens)
    assert np.abs(got - expected).max() < KV_TOLERANCES[kv] * np.abs(expected).max()


@pytest.mark.parametrize("format", FORMATS)
def test_chunks_and_threads_do_not_change_bits(format: str) -> None:
    tokens = some_tokens(140)
    decoder = Decoder(format, kv="f16", window=100)
    expected = decoder.prompt(tokens, 1)
    for threads, chunk, slot in [
        (1, 2, 1),
        (1, 3, 2),
        (2, 1, 3),
        (2, 2, 4),
        (2, 7, 0),
        (2, 64, 1),
        (3, 16, 2),
        (3, 1, 3),
    ]:
        _cpu.set_threads(threads)
        assert np.array_equal(decoder.prompt(tokens, chunk, slot=slot), expected), (threads, chunk)


@pytest.mark.parametrize("isa", _cpu.isas())
@pytest.mark.parametrize("kv", KV_TOLERANCES)
def test_chunks_and_threads_do_not_change_bits_in_any_format_of_the_cache(kv: str, isa: str) -> None:
    _cpu.set_isa(isa)
    tokens = some_tokens(140)
    decoder = Decoder("int4g32", kv=kv, heads=(9, 3, 32), window=100)
    expected = decoder.prompt(tokens, 1)
    for threads, chunk, slot in [(1, 3, 1), (2, 1, 2), (2, 7, 3), (2, 64, 4), (3, 16, 0)]:
        _cpu.set_threads(threads)
        assert np.array_equal(decoder.prompt(tokens, chunk, slot=slot), expected), (threads, chunk)


@pytest.mark.parametrize("kv", ["f16", "fp8_e4m3", "int8", "int16"])
@pytest.mark.parametrize("heads", [(6, 2, 16), (4, 4, 24), (16, 1, 40), (7, 1, 8), (8, 2, 64)])
def test_block_size_does_not_change_bits(heads: tuple[int, int, int], kv: str) -> None:
    tokens = some_tokens(280)
    expected = Decoder(heads=heads, kv=kv, window=150).prompt(tokens, 70)
    for block_size in (8, 24, 32, 64, 512):
        decoder = Decoder(heads=heads, kv=kv, window=150, block_size=block_size)
        assert np.array_equal(decoder.prompt(tokens, 40), expected), block_size


@pytest.mark.parametrize("window", [0, 60])
@pytest.mark.parametrize("isa", _cpu.isas())
def test_a_row_has_the_same_bits_alone_and_in_company(isa: str, window: int) -> None:
    _cpu.set_isa(isa)
    decoder = Decoder("int4g32", kv="bf16", window=window)
    prompts = [some_tokens(5 + 19 * (i % 14), seed=i) for i in range(64)]
    for slot, prompt in enumerate(prompts):
        decoder.prompt(prompt[:-1], 70, slot=slot)
    last = [(slot, len(prompt) - 1, prompt[-1:]) for slot, prompt in enumerate(prompts)]
    alone = np.concatenate([decoder.step([chunk]) for chunk in last])
    for threads in (1, 2):
        _cpu.set_threads(threads)
        for size in (2, 3, 15, 16, 64):
            assert np.array_equal(decoder.step(last[:size]), alone[:size]), (threads, size)


def test_a_chunk_has_the_same_bits_beside_decodes() -> None:
    decoder = Decoder("int8g32", kv="f16")
    long, short = some_tokens(200, seed=3), some_tokens(33, seed=4)
    decoder.prompt(long[:160], 64, slot=0)
    decoder.prompt(short[:-1], 64, slot=1)
    alone = np.concatenate([decoder.step([(1, 32, short[-1:])]), decoder.step([(0, 160, long[160:])])])
    _cpu.set_threads(2)
    together = decoder.step([(1, 32, short[-1:]), (0, 160, long[160:])])
    assert np.array_equal(together, alone)


@pytest.mark.parametrize("chunk", [1, 2, 3, 40])
@pytest.mark.parametrize("threads", [1, 2])
def test_replay_equals_ops_run_one_by_one(threads: int, chunk: int) -> None:
    _cpu.set_threads(threads)
    tokens = some_tokens(80)
    decoder = Decoder("int4g64int", kv="f16")
    assert np.array_equal(decoder.prompt(tokens, chunk), decoder.prompt(tokens, chunk, slot=1, recorded=False))


def test_private_rows_save_barriers_and_change_no_bits() -> None:
    tokens = some_tokens(40)
    _cpu.set_threads(2)
    private, shared = Decoder("int4g32"), Decoder("int4g32", act_threads=0)
    assert np.array_equal(private.prompt(tokens, 2), shared.prompt(tokens, 2))
    # embed | norm qkv | rope | attend | merge o | norm gate up | act_mul down | norm head
    assert private.program.barriers(1, 1) == 7
    assert private.program.barriers(3, 1) == 11
    assert private.program.barriers(3, 3) == shared.program.barriers(1, 1) == 12


def test_more_threads_than_cpus_or_private_rows_give_the_same_bits() -> None:
    tokens = some_tokens(30)
    decoder = Decoder("int4g32", act_threads=2)
    expected = decoder.prompt(tokens, 1)
    _cpu.set_threads(6)
    assert _cpu.threads() == 6
    assert np.array_equal(decoder.prompt(tokens, 1), expected)
    assert np.array_equal(decoder.prompt(tokens, 30), expected)


def test_an_act_holds_its_rows_after_a_replay() -> None:
    _cpu.set_threads(2)
    decoder = Decoder("int4g32")
    decoder.step([(0, 0, some_tokens(2))])
    normed = decoder.normed
    (form,) = normed.forms
    groups = normed.values[:2].reshape(2, -1, form.group)
    scales = np.abs(groups).max(-1) / np.float32(127)
    codes = np.rint(groups / scales[..., None]).astype(np.int8)
    assert np.array_equal(form.scales[:2], scales)
    assert np.array_equal(form.codes[:2].reshape(codes.shape), codes)
    assert np.array_equal(form.sums[:2], codes.sum(-1, dtype=np.int32))


@pytest.mark.parametrize("format", ["f32", "int4g32", "int8g32"])
def test_a_nan_reaches_the_logits(format: str) -> None:
    decoder = Decoder(format)
    tokens = some_tokens(20)
    decoder.prompt(tokens, 20)
    decoder.arena[:] = 0xFF
    assert np.isnan(decoder.step([(0, 20, tokens[:1])])).all()
    decoder.norms[1, 5] = np.nan
    assert np.isnan(decoder.prompt(tokens, 20)).all()


@pytest.mark.parametrize("kv", KV_TOLERANCES)
def test_positions_below_the_window_are_never_read(kv: str) -> None:
    tokens = some_tokens(200)
    decoder = Decoder(kv=kv, window=50, block_size=8)
    decoder.prompt(tokens[:160], 64)
    expected = decoder.step([(0, 160, tokens[160:])])
    first_seen = 160 + 1 - 50
    for block in decoder.batch.tables[0][0, : first_seen // 8]:
        decoder.arena[block * decoder.block_bytes : (block + 1) * decoder.block_bytes] = 0xFF
    assert np.array_equal(decoder.step([(0, 160, tokens[160:])]), expected)


def test_135m_shapes_give_the_same_bits_in_a_batch_and_alone() -> None:
    rng = np.random.default_rng(5)
    format = parse_weight_format("int4g64")
    weight = Matrix(rng, 1536, 576, format)
    batch = make_batch(70, 1, 1, ())
    act, x, out = make_act(576, 70, 2, [format]), make_rows(576, 70), make_rows(1536, 70)
    norm = cpu.build_norm(NormArgs(batch, x, np.ones(576, np.float32), EPS, act, False))
    linear = cpu.build_linear(LinearArgs(batch, act, weight.packed, None, out, False, False))
    program = cpu.record([*norm, *linear], batch)
    rows = rng.standard_normal((70, 576)).astype(np.float32)
    _cpu.set_threads(2)
    x[:], batch.counts[0] = rows, 70
    program.replay()
    together = out.copy()
    batch.counts[0] = 1
    for i in range(0, 70, 9):
        x[0] = rows[i]
        program.replay()
        assert np.array_equal(out[0], together[i])
    normed = rows / np.sqrt((rows.astype(np.float64) ** 2).mean(-1, keepdims=True) + EPS)
    expected = normed @ weight.values.T
    assert np.abs(together - expected).max() < 0.01 * np.abs(expected).max()


@pytest.mark.parametrize("kv", ["f32", "f16"])
@pytest.mark.parametrize("tokens", [0, 5, 16])
def test_kv_copy_takes_the_first_tokens_of_every_head(tokens: int, kv: str) -> None:
    layers, block_size, heads, dim = 3, 16, 2, 24
    dtype = np.dtype(np.float32 if kv == "f32" else np.float16)
    arena = np.random.default_rng(2).standard_normal((4, layers, heads, 2, dim * block_size)).astype(dtype)
    before = arena.copy()
    stride = arena[0].nbytes
    args = KVCopyArgs(arena.view(np.uint8).reshape(-1), stride, layers, block_size, heads, dim, KVFormat(kv))
    cpu.build_kv_copy(args)(1, 3, tokens)
    keys = arena[:, :, :, 0].reshape(4, layers, heads, dim, block_size)
    values = arena[:, :, :, 1].reshape(4, layers, heads, block_size, dim)
    old_keys, old_values = before[:, :, :, 0].reshape(keys.shape), before[:, :, :, 1].reshape(values.shape)
    assert np.array_equal(arena[:3], before[:3])
    assert np.array_equal(keys[3, ..., :tokens], old_keys[1, ..., :tokens])
    assert np.array_equal(keys[3, ..., tokens:], old_keys[3, ..., tokens:])
    assert np.array_equal(values[3, :, :, :tokens], old_values[1, :, :, :tokens])
    assert np.array_equal(values[3, :, :, tokens:], old_values[3, :, :, tokens:])


def test_a_program_keeps_its_arrays_alive() -> None:
    decoder = Decoder("int4g32")
    expected = decoder.step([(0, 0, some_tokens(20))])
    program, logits = decoder.program, decoder.logits
    logits[:] = 0
    del decoder
    gc.collect()
    junk = [np.full(1 << 16, np.nan, np.float32) for _ in range(40)]
    program.replay()
    assert np.array_equal(logits[:20, : Decoder.vocab], expected)
    assert len(junk) == 40


def test_what_contradicts_itself_is_a_value_error() -> None:
    rng = np.random.default_rng(0)
    batch, other = make_batch(4, 1, 1, ()), make_batch(4, 1, 1, ())
    format = parse_weight_format("int4g32")
    weight = Matrix(rng, 16, 64, format).packed
    act, out = make_act(64, 4, 1, [format]), make_rows(16, 4)
    short = PackedWeight(format, 16, 64, weight.data[:-1])
    with pytest.raises(ValueError, match="has 575 bytes, its layout needs 576"):
        cpu.build_linear(LinearArgs(batch, act, short, None, out, False, False))
    with pytest.raises(ValueError, match="no i8 form of group 32"):
        cpu.build_linear(LinearArgs(batch, make_act(64, 4, 1, []), weight, None, out, False, False))
    order = np.zeros(64, np.int32)
    shuffled = PackedWeight(format, 16, 64, weight.data, order)
    with pytest.raises(ValueError, match="no permutation of 64 inputs"):
        cpu.build_linear(LinearArgs(batch, make_act(64, 4, 1, [format], [order]), shuffled, None, out, False, False))
    with pytest.raises(ValueError, match="output rows are 8 wide, 16 needed"):
        cpu.build_linear(LinearArgs(batch, act, weight, None, np.zeros((4, 8), np.float32), False, False))
    with pytest.raises(ValueError, match="another batch"):
        cpu.record(cpu.build_linear(LinearArgs(batch, act, weight, None, out, False, False)), other)
    with pytest.raises(ValueError, match="instruction set `avx9`"):
        _cpu.set_isa("avx9")
    with pytest.raises(ValueError, match="0 threads"):
        _cpu.set_threads(0)


def test_shapes_without_a_kernel_are_refused_with_the_reason() -> None:
    batch = make_batch(4, 1, 1, (np.zeros((1, 4), np.int32),))
    arena, q = np.zeros(1 << 16, np.uint8), make_rows(128, 4)

    def attend(head_dim: int, block_size: int) -> str | None:
        kv = KVLayer(arena, 1 << 14, 0, block_size, 2, head_dim, KVFormat("f16"), 0)
        return cpu.accepts_attend(AttendArgs(batch, q, 4, kv, 0, 64, make_act(4 * head_dim, 4, 1, [])))

    assert attend(16, 16) is None
    assert attend(12, 16) == "head_dim 12 is not a multiple of 8 up to 512"
    assert attend(16, 20) == "block size 20 is not a multiple of 8 up to 512"
    packed = PackedWeight(WeightFormat("int8", 11008), 16, 11008, arena)
    out = make_rows(11008, 4)
    assert "at most 8192" in str(cpu.accepts_embed(EmbedArgs(batch, packed, out)))
