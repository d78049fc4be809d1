"""What is stored of K and V on a GPU, in the checked emulation: the codes of the CPU's kernels, steered and scaled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llmctl.kernels import registry
from llmctl.kernels.cuda import register
from llmctl.kernels.cuda.emulated_machine import EmulatedMachine
from llmctl.kernels.device import read_machine
from llmctl.kernels.formats import KVFormat
from llmctl.kernels.ops import AttendArgs, KeySteering, KVCopyArgs, KVLayer, RopeStoreArgs, make_act, make_batch
from llmctl.kernels.reference import attend as reference

HEADS, KV_HEADS, BLOCK, ROWS, BLOCKS = 4, 2, 16, 22, 3
KINDS = (("fp8_e4m3", True), ("fp8_e5m2", True), ("int8", False))


@pytest.fixture(autouse=True)
def machine(builds: Path) -> Iterator[None]:
    register.use(EmulatedMachine(builds, mode="checked"))
    yield
    register.use(None)


def layer(kind: str, dim: int, steering: KeySteering | None, scales: np.ndarray | None) -> KVLayer:
    stride = 2 * KV_HEADS * BLOCK * KVFormat(kind).head_bytes(dim)
    arena = np.zeros(BLOCKS * stride, np.uint8)
    return KVLayer(arena, stride, 0, BLOCK, KV_HEADS, dim, KVFormat(kind), 0, steering, scales)


def steering(dim: int) -> KeySteering:
    rng, half = np.random.default_rng(3), dim // 2
    order = np.stack([rng.permutation(half) for _ in range(KV_HEADS)]).astype(np.int32)
    follow = np.triu(rng.standard_normal((KV_HEADS, 4, half, half)) * 0.2, 1).transpose(0, 2, 1, 3)
    level = np.exp2(rng.integers(-4, 5, (KV_HEADS, half))).astype(np.float32)
    centre = (9 * rng.standard_normal((KV_HEADS, dim)) * rng.integers(0, 2, dim)).astype(np.float32)
    return KeySteering(order, np.ascontiguousarray(follow, np.float32), level, centre)


def store(kv: KVLayer, turn: bool) -> RopeStoreArgs:
    rng, dim = np.random.default_rng(kv.head_dim), kv.head_dim
    batch = make_batch(ROWS, 1, 1, (np.array([[2, 0, 1]], np.int32),))
    batch.counts[:2], batch.position[:], batch.seq_rows[0] = (ROWS, 1), np.arange(ROWS), ROWS
    q, k, v = (rng.standard_normal((ROWS, heads * dim)).astype(np.float32) for heads in (HEADS, KV_HEADS, KV_HEADS))
    k *= 3 * rng.lognormal(0, 1, k.shape[1]).astype(np.float32)
    k[3, 2], k[5, dim + 1], v[6, 7], k[8], k[9, 1], v[10, 3] = np.nan, np.inf, np.nan, 0.0, 3e30, 1e9
    angles = rng.uniform(0, 6, (ROWS, dim // 2))
    tables = (np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)) if turn else (None, None)
    return RopeStoreArgs(batch, q, k, v, None, None, 1e-6, *tables, HEADS, dim**-0.5, kv)


def run(op: str, args: object, device: str) -> None:
    for bound in registry.bind(op, args, device=device):  # type: ignore[call-overload]
        bound.run()


def codes(kv: KVLayer, *, transposed: bool) -> tuple[np.ndarray, np.ndarray]:
    """(codes [blocks, heads, K and V, tokens, head_dim], scales) as stored, K by columns on a CPU."""
    size = BLOCK * kv.head_dim
    halves = kv.arena.reshape(BLOCKS, KV_HEADS, 2, -1)
    found = halves[..., :size].reshape(BLOCKS, KV_HEADS, 2, BLOCK, kv.head_dim).copy()
    if transposed:
        found[:, :, 0] = halves[:, :, 0, :size].reshape(BLOCKS, KV_HEADS, kv.head_dim, BLOCK).swapaxes(2, 3)
    scales = halves[..., size:].copy().view(np.uint16)
    scales[(scales & 0x7F80) == 0x7F80] = 0x7FC0  # any NaN
    return found, scales


@pytest.mark.parametrize("turn", [True, False])
@pytest.mark.parametrize("steered", [True, False])
@pytest.mark.parametrize(("kind", "scaled"), KINDS)
def test_codes_are_those_of_the_cpu(kind: str, scaled: bool, steered: bool, turn: bool) -> None:
    if "fma" not in read_machine().features:
        pytest.skip("this CPU's kernels round products")
    dim = 96 if turn else 64
    scales = np.array([[0.7, 2.0], [1.5, 0.3]], np.float32) if scaled else None
    how = steering(dim) if steered else None
    ours, theirs = (store(layer(kind, dim, how, scales), turn) for _ in range(2))
    run("rope_store", ours, "cuda")
    run("rope_store", theirs, "cpu")
    for got, expected in zip(codes(ours.kv, transposed=False), codes(theirs.kv, transposed=True), strict=True):
        assert np.array_equal(got, expected)
    assert np.array_equal(ours.q, theirs.q)


@pytest.mark.parametrize(("kind", "scaled"), KINDS)
def test_attention_reads_what_was_stored_with_its_scales(kind: str, scaled: bool) -> None:
    scales = np.array([[0.7, 2.0], [1.5, 0.3]], np.float32) if scaled else None
    ours, theirs = (store(layer(kind, 64, None, scales), turn=False) for _ in range(2))
    for args, device in ((ours, "cuda"), (theirs, "cpu")):
        args.k[:] = np.nan_to_num(args.k, posinf=1.0) / 4
        args.v[:] = np.nan_to_num(args.v)
        args.k[9, 1] = 1.0
        run("rope_store", args, device)
    asked, expected = (attention(args) for args in (ours, theirs))
    run("attend", asked, "cuda")
    reference.build(expected).run()
    size = np.abs(expected.act.values[:ROWS]).max(axis=1, keepdims=True)
    assert np.abs(asked.act.values[:ROWS] - expected.act.values[:ROWS]).max() < 1e-6 * size.max()


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({"soft_cap": 5.0}, 1e-6),
        ({"sinks": np.array([0.5, -1.0, 2.0, 0.0], np.float32)}, 1e-6),
        ({"window": 5, "soft_cap": 3.0, "sinks": np.ones(4, np.float32)}, 1e-6),
        ({"compute": "tf32"}, 2e-3),
    ],
    ids=str,
)
def test_caps_sinks_and_what_is_multiplied_are_options_of_the_op(changes: dict, bound: float) -> None:
    ours, theirs = (store(layer("f32", 64, None, None), turn=False) for _ in range(2))
    for args, device in ((ours, "cuda"), (theirs, "cpu")):
        for rows in (args.k, args.v):
            rows[:] = np.clip(np.nan_to_num(rows), -3, 3)
        run("rope_store", args, device)
    asked, expected = (dataclasses.replace(attention(args), **changes) for args in (ours, theirs))
    run("attend", asked, "cuda")
    reference.build(expected).run()
    off = np.abs(asked.act.values[:ROWS] - expected.act.values[:ROWS]).max()
    assert off < bound * np.abs(expected.act.values[:ROWS]).max()
    if "compute" in changes:
        assert off > 0


def attention(stored: RopeStoreArgs) -> AttendArgs:
    width = HEADS * stored.kv.head_dim
    return AttendArgs(stored.batch, stored.q, HEADS, stored.kv, 0, 64, make_act(width, ROWS, 1, ()))


def test_what_a_gpu_does_not_store_or_multiply_is_refused_with_the_reason() -> None:
    stored = store(layer("int16", 64, None, None), turn=False)
    wanted = dataclasses.replace(attention(store(layer("f32", 64, None, None), turn=False)), compute="bf16")
    reasons = {
        op: next(entry.accepts(args) for entry in registry.entries("cuda") if entry.op == op)
        for op, args in (("rope_store", stored), ("attend", wanted))
    }
    assert reasons["rope_store"] == "a int16 cache; f32, f16, bf16, fp8_e4m3, fp8_e5m2, int8 are known"
    assert reasons["attend"] == "a f32 cache is multiplied in f32 or tf32, not in bf16"


def test_copies_begin_at_the_layers_that_have_the_format() -> None:
    kv = layer("int8", 64, None, None)
    kv.arena[:] = np.random.default_rng(1).integers(0, 256, kv.arena.size)
    before, half = kv.arena.reshape(BLOCKS, KV_HEADS, -1).copy(), kv.block_stride // 2
    args = KVCopyArgs(kv.arena, kv.block_stride, 1, BLOCK, 1, 64, kv.format, layer_offset=half)
    registry.bind("kv_copy", args, device="cuda")(0, 2, BLOCK)
    after = kv.arena.reshape(BLOCKS, KV_HEADS, -1)
    assert np.array_equal(after[2, 1], before[0, 1]) and np.array_equal(after[2, 0], before[2, 0])
