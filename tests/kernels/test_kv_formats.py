"""KV formats that are not plain floats: what is stored, bit for bit, and what attention makes of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmctl.kernels import _cpu, registry
from llmctl.kernels.cpu import ops as cpu
from llmctl.kernels.formats import KVFormat
from llmctl.kernels.ops import AttendArgs, KVCopyArgs, KVLayer, RopeStoreArgs, make_act, make_batch, make_rows
from llmctl.kernels.reference import attend, rope_store
from llmctl.kernels.reference.kv import head_view

from .cases import Case, all_cases

BYTES = ("fp8_e4m3", "fp8_e5m2", "int8")
TOPS = {"int8": (127, 127), "int16": (8191, 2047)}  # of K and V
KINDS = (*BYTES, "int16")
LIMITS = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
DIM, BLOCK, POSITIONS = 16, 8, 40


class Cache:
    """Five blocks of one KV head, and one sequence that lies in them."""

    def __init__(self, kind: str, fill: int = 0, scales: tuple[float, float] | None = None) -> None:
        stride = 2 * BLOCK * KVFormat(kind).head_bytes(DIM)
        self.batch = make_batch(POSITIONS, 1, 1, (np.array([[3, 1, 4, 0, 2]], np.int32),))
        self.batch.position[:] = np.arange(POSITIONS)
        self.kv = KVLayer(
            np.full(5 * stride, fill, np.uint8), stride, 0, BLOCK, 1, DIM, KVFormat(kind), 0,
            scales=None if scales is None else np.array(scales, np.float32)[:, None],
        )  # fmt: skip

    def store(
        self, k: np.ndarray, v: np.ndarray, *, first: int = 0, q: float = 0.0, reference: bool = False
    ) -> np.ndarray:
        """Store K and V [rows, DIM] from position `first` on, without norm and rotation; what queries `q` become."""
        rows = len(k)
        self._rows(first, rows)
        buffers = [make_rows(DIM, rows) for _ in range(3)]
        buffers[0][:], buffers[1][:], buffers[2][:] = q, k, v
        args = RopeStoreArgs(self.batch, *buffers, None, None, 0.0, None, None, 1, 1.0, self.kv)
        if reference:
            rope_store.build(args).run()
        else:
            for op in cpu.build_rope_store(args):
                op.run()
        return buffers[0]

    def attend(self, q: np.ndarray, *, first: int, reference: bool = False) -> np.ndarray:
        """What queries [rows, DIM] at positions from `first` on see."""
        rows = len(q)
        self._rows(first, rows)
        padded = make_rows(DIM, rows)
        padded[:] = q
        act = make_act(DIM, rows, 2, ())
        args = AttendArgs(self.batch, padded, 1, self.kv, 0, POSITIONS, act)
        if reference:
            attend.build(args).run()
        else:
            for op in cpu.build_attend(args):
                op.run()
        return act.values[:rows].copy()

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        k, v = head_view(self.kv, 0).read(torch.from_numpy(self.batch.tables[0][0]).long())
        return k.numpy(), v.numpy()

    def _rows(self, first: int, rows: int) -> None:
        self.batch.counts[:2] = rows, 1
        self.batch.position[:rows] = np.arange(first, first + rows)
        self.batch.seq_first[0], self.batch.seq_rows[0] = 0, rows


@pytest.fixture(params=_cpu.isas())
def isa(request: pytest.FixtureRequest):
    _cpu.set_isa(request.param)
    yield request.param
    _cpu.set_isa(_cpu.isas()[-1])


def some_values(count: int, seed: int = 0) -> np.ndarray:
    """Float32 of every size, with both zeros."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((count, DIM)) * 10.0 ** rng.integers(-9, 7, (count, 1))
    values[:, 0], values[::3, 1] = 0.0, -0.0
    return values.astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32), min_size=2 * DIM, max_size=2 * DIM))
def test_every_float_is_stored_as_the_reference_stores_it(kind: str, values: list[float]) -> None:
    k, v = np.array(values, np.float32).reshape(2, 1, DIM)
    expected = Cache(kind)
    expected.store(k, v, reference=True)
    for isa in _cpu.isas():
        _cpu.set_isa(isa)
        cache = Cache(kind)
        cache.store(k, v)
        assert np.array_equal(cache.kv.arena, expected.kv.arena), isa


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_every_size_are_stored_as_the_reference_stores_them(kind: str, isa: str) -> None:
    k, v = some_values(POSITIONS, 1), some_values(POSITIONS, 2)
    ours, expected = Cache(kind), Cache(kind)
    ours.store(k, v)
    expected.store(k, v, reference=True)
    assert np.array_equal(ours.kv.arena, expected.kv.arena)


@pytest.mark.parametrize("kind", LIMITS)
def test_fp8_is_torch_s_fp8_where_that_is_finite(kind: str, isa: str) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[kind]
    finite = torch.sort(codes.view(dtype).float().unique()).values
    finite = finite[finite.isfinite()]
    halfway = (finite[1:] + finite[:-1]) / 2
    around = torch.cat([finite, halfway, halfway * (1 + 2**-23), halfway * (1 - 2**-23)])
    values = torch.nn.functional.pad(around, (0, -len(around) % (DIM * POSITIONS))).reshape(-1, POSITIONS, DIM)
    for page in values:
        cache = Cache(kind)
        cache.store(page.numpy(), page.numpy())
        expected = page.to(dtype).double().numpy()
        assert np.array_equal(cache.read()[0], expected)
        assert np.array_equal(cache.read()[1], expected)


@pytest.mark.parametrize("kind", LIMITS)
def test_what_fp8_cannot_hold_becomes_its_largest_value(kind: str, isa: str) -> None:
    k = np.zeros((1, DIM), np.float32)
    k[0, :4] = np.inf, -np.inf, 3e38, LIMITS[kind] * 1.001
    cache = Cache(kind)
    cache.store(k, -k)
    for got, sign in zip(cache.read(), (1, -1), strict=True):
        assert (got[0, :4] * sign).tolist() == [LIMITS[kind], -LIMITS[kind], LIMITS[kind], LIMITS[kind]]


@pytest.mark.parametrize("kind", LIMITS)
def test_scales_of_k_and_v_widen_the_range_and_come_off_in_attention(kind: str, isa: str) -> None:
    scales = 16.0, 0.75
    rng = np.random.default_rng(5)
    k, v = (rng.standard_normal((POSITIONS, DIM)).astype(np.float32) for _ in range(2))
    k[:, 3] = LIMITS[kind] * 4
    cache, expected, plain = Cache(kind, scales=scales), Cache(kind, scales=scales), Cache("f32")
    cache.store(k, v)
    expected.store(k, v, reference=True)
    plain.store(k, v)
    assert np.array_equal(cache.kv.arena, expected.kv.arena)
    for got, meant, scale in zip(cache.read(), plain.read(), scales, strict=True):
        assert np.abs(got * scale - meant).max() <= np.abs(meant).max() / (16 if kind == "fp8_e4m3" else 8)
    for reference in (False, True):  # queries have been multiplied by the scale of K when they were rotated
        q = rng.standard_normal((1, DIM)).astype(np.float32) * 1e-9
        got = cache.attend(q, first=POSITIONS - 1, reference=reference)
        assert np.abs(got - cache.read()[1].mean(axis=0) * scales[1]).max() < 1e-4


def test_queries_are_multiplied_by_the_scale_of_k(isa: str) -> None:
    for reference in (False, True):
        cache = Cache("fp8_e4m3", scales=(16.0, 0.75))
        q = cache.store(np.ones((1, DIM), np.float32), np.ones((1, DIM), np.float32), q=3.0, reference=reference)
        assert (q == 48.0).all()


@pytest.mark.parametrize("kind", TOPS)
def test_codes_are_within_half_a_step_of_what_was_stored(kind: str, isa: str) -> None:
    k, v = some_values(POSITIONS, 1), some_values(POSITIONS, 2)
    cache = Cache(kind)
    cache.store(k, v)
    for got, stored, top in zip(cache.read(), (k, v), TOPS[kind], strict=True):
        step = np.abs(stored).max(1, keepdims=True) / top * (1 + 2**-7)
        assert (np.abs(got - stored) <= step / 2 * (1 + 1e-6)).all()


@pytest.mark.parametrize("kind", TOPS)
def test_codes_hold_infinity_as_something_finite(kind: str, isa: str) -> None:
    k = np.full((1, DIM), 1e20, np.float32)
    k[0, 3] = -np.inf
    cache = Cache(kind)
    cache.store(k, k)
    for got in cache.read():
        assert np.isfinite(got).all() and got[0, 3] < -3e38


@pytest.mark.parametrize("kind", BYTES)
def test_attention_reads_every_code_as_it_is_meant(kind: str, isa: str) -> None:
    cache = Cache(kind)
    codes = np.random.default_rng(3).permutation(np.resize(np.arange(256, dtype=np.uint8), cache.kv.arena.size))
    largest = {"fp8_e4m3": 0x7E, "fp8_e5m2": 0x7B, "int8": 0x7F}[kind]
    codes[(codes & 0x7F) > largest] = 0
    cache.kv.arena[:] = codes
    if kind == "int8":
        for scales in (head_view(cache.kv, 0).key_scales, head_view(cache.kv, 0).value_scales):
            assert scales is not None
            scales[:] = torch.linspace(0.001, 0.1, scales.numel()).view_as(scales)
    largest_k = np.abs(cache.read()[0]).max()
    for dimension in range(DIM):  # scores are single values of K times a factor
        q = np.zeros((1, DIM), np.float32)
        q[0, dimension] = 2 / largest_k
        ours = cache.attend(q, first=POSITIONS - 1)
        expected = cache.attend(q, first=POSITIONS - 1, reference=True)
        assert np.abs(ours - expected).max() <= 3e-6 * np.abs(expected).max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["k", "v"])
@pytest.mark.parametrize("dimension", [0, 9])
def test_a_nan_reaches_what_sees_it_and_nothing_else(kind: str, where: str, dimension: int, isa: str) -> None:
    bad = 21
    k, v, q = (some_values(POSITIONS, seed).clip(-3, 3) for seed in (1, 2, 3))
    cache = Cache(kind, fill=0xFF)
    cache.store(k[:30], v[:30])
    expected = cache.attend(q[:30], first=0)
    assert np.isfinite(expected).all()
    {"k": k, "v": v}[where][bad, dimension] = np.nan
    cache.store(k[:30], v[:30])
    for rows in (1, 5, 30):
        got = np.concatenate([cache.attend(q[at : at + rows], first=at) for at in range(0, 30, rows)])
        assert np.array_equal(got[:bad], expected[:bad])
        assert np.isnan(got[bad:]).all()
    assert np.isfinite(cache.read()[1][:30]).all()
    assert np.isnan(cache.attend(q[:30], first=0, reference=True)[bad:]).all()


def largest_codes(cache: Cache, dim: int) -> np.ndarray:
    """Fills an int16 cache with its largest codes, such that every product of a run is as large as it gets."""
    half = dim * BLOCK * 2
    for at in range(0, cache.kv.arena.size, half + 2 * BLOCK):
        top = TOPS["int16"][at // (half + 2 * BLOCK) % 2]
        cache.kv.arena[at : at + half].view(np.int16)[:] = -top
        cache.kv.arena[at + half : at + half + 2 * BLOCK].view(np.uint16)[:] = 0x3A80  # 2^-10
    return np.full((1, dim), 1.0, np.float32)


@pytest.mark.parametrize("dim", [64, 192])
def test_the_largest_codes_of_int16_do_not_overflow(dim: int, isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "DIM", dim)
    cache = Cache("int16")
    got = cache.attend(largest_codes(cache, dim), first=POSITIONS - 1)
    assert np.abs(got + TOPS["int16"][1] * 2.0**-10).max() < 1e-5


def test_what_follows_in_a_block_of_int16_is_neither_read_nor_copied(isa: str) -> None:
    k, v, q = (some_values(POSITIONS, seed).clip(-3, 3) for seed in (1, 2, 3))
    ours, other = Cache("int16", fill=0x00), Cache("int16", fill=0xFF)
    for cache in (ours, other):
        cache.store(k[:13], v[:13])
    assert np.array_equal(ours.attend(q[:13], first=0), other.attend(q[:13], first=0))
    args = KVCopyArgs(ours.kv.arena, ours.kv.block_stride, 1, BLOCK, 1, DIM, KVFormat("int16"))
    target = np.full_like(ours.kv.arena, 0xA5)
    target[: 4 * ours.kv.block_stride] = ours.kv.arena[: 4 * ours.kv.block_stride]
    ours.kv.arena[:] = target
    cpu.build_kv_copy(args)(1, 4, 5)
    got = head_view(ours.kv, 0)
    assert torch.equal(got.keys[4, ..., :5], got.keys[1, ..., :5])
    assert torch.equal(got.values[4].reshape(BLOCK, DIM)[:5], got.values[1].reshape(BLOCK, DIM)[:5])
    assert (got.keys[4, ..., 5:] == -0x5A5B).all()
    assert (got.values[4].reshape(BLOCK, DIM)[5:] == -0x5A5B).all()


ATTENTION = [case for case in all_cases() if case.op == "attend"]


@pytest.mark.parametrize("case", ATTENTION, ids=[case.name for case in ATTENTION])
def test_wider_vectors_have_the_bits_of_narrow_ones(case: Case) -> None:
    if "avx512" not in _cpu.isas():
        pytest.skip("no AVX-512 here")
    found = []
    for isa in ("avx2", "avx512"):
        args = case.make()
        (entry,) = (entry for entry in registry.entries() if entry.op == "attend" and entry.isa == isa)
        for op in entry.build(args):
            op.run()
        found.append(args.act.values.tobytes())
    assert found[0] == found[1]


def test_an_unknown_format_is_refused() -> None:
    cache = Cache("int8")
    kv = KVLayer(cache.kv.arena, cache.kv.block_stride, 0, BLOCK, 1, DIM, KVFormat("fp4"), 0)
    args = AttendArgs(cache.batch, make_rows(DIM, 1), 1, kv, 0, POSITIONS, make_act(DIM, 1, 1, ()))
    reasons = {entry.accepts(args) for entry in registry.entries() if entry.op == "attend"}
    assert any(reason and "KV format fp4, not one of" in reason for reason in reasons)
