"""Rounding K to 8 bits with errors steered to where queries do not look."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from llmctl.engine.runner.steering import _feedback, _raised, _turned_back, find_steering
from llmctl.kernels import _cpu
from llmctl.kernels.cpu import ops as cpu
from llmctl.kernels.formats import KVFormat
from llmctl.kernels.ops import KeySteering, KVLayer, RopeStoreArgs, make_batch, make_rows, steering_width
from llmctl.kernels.reference import rope_store
from llmctl.kernels.reference.kv import head_view

KINDS = ("fp8_e4m3", "fp8_e5m2", "int8")
HEADS, BLOCK, ROWS = 2, 8, 24


def stored(kind: str, k: np.ndarray, steering: KeySteering | None, turn: float = 0.0, *, reference: bool = False):
    """The arena after rows of K [ROWS, HEADS, head_dim], the same V, and what is read back [HEADS, ROWS, head_dim].

    Pair d is turned by `turn` * (d + 1) per position.
    """
    dim = k.shape[2]
    stride = 2 * HEADS * BLOCK * KVFormat(kind).head_bytes(dim)
    table = np.array([[2, 0, 1]], np.int32)
    batch = make_batch(ROWS, 1, 1, (table,))
    batch.counts[:2], batch.position[:], batch.seq_rows[0] = (ROWS, 1), np.arange(ROWS), ROWS
    kv = KVLayer(np.zeros(3 * stride, np.uint8), stride, 0, BLOCK, HEADS, dim, KVFormat(kind), 0, steering)
    buffers = [make_rows(HEADS * dim, ROWS) for _ in range(3)]
    for rows in buffers:
        rows[:] = k.reshape(ROWS, -1)
    angles = turn * np.outer(np.arange(ROWS), np.arange(1, dim // 2 + 1))
    tables = (np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)) if turn else (None, None)
    args = RopeStoreArgs(batch, *buffers, None, None, 0.0, *tables, HEADS, 1.0, kv)
    for op in [rope_store.build(args)] if reference else cpu.build_rope_store(args):
        op.run()
    read = [head_view(kv, head).read(torch.from_numpy(table[0]).long())[0].numpy() for head in range(HEADS)]
    return kv.arena, np.stack(read), buffers[1].reshape(ROWS, -1)[:, : HEADS * dim].reshape(ROWS, HEADS, dim)


def some_keys(dim: int) -> np.ndarray:
    rng = np.random.default_rng(dim)
    return (rng.standard_normal((ROWS, HEADS, dim)) * rng.lognormal(0, 1, (1, HEADS, dim))).astype(np.float32)


def moments(dim: int) -> np.ndarray:
    """Second moments of queries that look in few directions, one for each head."""
    looks = np.random.default_rng(7).standard_normal((HEADS, dim // 8, dim))
    return np.swapaxes(looks, 1, 2) @ looks


def steering(dim: int) -> KeySteering:
    rng = np.random.default_rng(3)
    orders = [rng.permutation(dim // 2) for _ in range(HEADS)]
    follows = [_feedback(_raised(moment), order) for moment, order in zip(moments(dim), orders, strict=True)]
    return KeySteering(np.stack(orders).astype(np.int32), np.stack(follows))


@pytest.fixture(params=_cpu.isas())
def isa(request: pytest.FixtureRequest):
    _cpu.set_isa(request.param)
    yield request.param
    _cpu.set_isa(_cpu.isas()[-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [8, 24, 64])
def test_every_instruction_set_chooses_the_codes_of_the_reference(kind: str, dim: int, isa: str) -> None:
    k = some_keys(dim)
    k[3, 0, 1], k[5, 1, 2], k[7], k[8, 1, 0] = np.nan, np.inf, 0.0, 3e30
    ours, _, _ = stored(kind, k, steering(dim))
    expected, _, _ = stored(kind, k, steering(dim), reference=True)
    assert np.array_equal(ours, expected)


def levelled(dim: int) -> KeySteering:
    """With levels, and centres of half the pairs."""
    rng = np.random.default_rng(4)
    level = np.exp2(rng.integers(-5, 6, (HEADS, dim // 2))).astype(np.float32)
    centre = 30 * rng.standard_normal((HEADS, dim)) * np.tile(rng.integers(0, 2, dim // 2), 2)
    return dataclasses.replace(steering(dim), level=level, centre=centre.astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [8, 24, 64])
def test_so_does_it_with_levels_and_centres(kind: str, dim: int, isa: str) -> None:
    k = some_keys(dim)
    k[3, 0, 1], k[5, 1, 2], k[7], k[8, 1, 0] = np.nan, np.inf, 0.0, 3e30
    ours, _, meant = stored(kind, k, levelled(dim))
    expected, _, same = stored(kind, k, levelled(dim), reference=True)
    assert np.array_equal(ours, expected) and np.array_equal(meant, same, equal_nan=True)
    assert not np.array_equal(ours, stored(kind, k, steering(dim))[0])


@pytest.mark.parametrize("kind", KINDS)
def test_without_feedback_values_go_to_the_nearest(kind: str, isa: str) -> None:
    calm = steering(16)
    calm = dataclasses.replace(calm, follow=np.zeros_like(calm.follow))
    k = some_keys(16)
    assert np.array_equal(stored(kind, k, calm, 0.3)[0], stored(kind, k, None, 0.3)[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reference", [False, True])
def test_queries_notice_far_less_of_the_error(kind: str, reference: bool) -> None:
    """In the frame of each token, whatever its position: what is stored is turned, the moments are not."""
    dim, turn = 64, 0.37
    k = some_keys(dim)

    def noticed(how: KeySteering | None) -> float:
        _, read, meant = stored(kind, k, how, turn, reference=reference)
        total = 0.0
        for position in range(ROWS):
            angles = turn * position * np.arange(1, dim // 2 + 1)
            cos, sin = np.cos(angles), np.sin(angles)
            for head in range(HEADS):
                a, b = np.split(read[head, position] - meant[position, head], 2)
                error = np.concatenate([a * cos + b * sin, b * cos - a * sin])
                total += error @ moments(dim)[head] @ error
        return total

    assert noticed(steering(dim)) < 0.15 * noticed(None)


def test_where_the_rotation_stretches_the_feedback_shrinks() -> None:
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((40, 2, 16), (1, 40, 16), (1, 40, 16)))
    angles = np.outer(np.arange(40), np.arange(1, 9) * 0.1)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    plain, stretched = (find_steering(q, k, v, cos * f, sin * f, 0) for f in (np.float32(1), np.float32(1.25)))
    assert np.allclose(plain.follow, stretched.follow * 1.25**2, atol=2e-3) and plain.follow.any()
    assert np.array_equal(plain.order, stretched.order)


def test_a_moment_turned_back_is_that_of_vectors_turned_back() -> None:
    rng = np.random.default_rng(1)
    vectors, angles = rng.standard_normal((9, 12)), rng.uniform(0, 6, 6)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    a, b = vectors[:, :6], vectors[:, 6:]
    back = np.concatenate([a * cos + b * sin, b * cos - a * sin], axis=1)
    assert np.allclose(_turned_back(vectors.T @ vectors, cos, sin), back.T @ back)


def test_a_steering_of_other_sizes_is_refused() -> None:
    wrong = dataclasses.replace(steering(16), follow=np.zeros((HEADS, 8, 4, 2 * steering_width(16)), np.float32))
    with pytest.raises(ValueError, match="follow has shape"):
        stored("int8", some_keys(16), wrong)
    twice = dataclasses.replace(steering(16), order=np.zeros((HEADS, 8), np.int32))
    with pytest.raises(ValueError, match="not a permutation of 8 pairs"):
        stored("int8", some_keys(16), twice)
    level = np.ones((HEADS, 8), np.float32)
    level[1, 3] = 1.5
    with pytest.raises(ValueError, match="levels are not powers of two"):
        stored("int8", some_keys(16), dataclasses.replace(steering(16), level=level))
    with pytest.raises(ValueError, match="centre is not finite and .2, 16."):
        stored("int8", some_keys(16), dataclasses.replace(steering(16), centre=np.zeros((HEADS, 8), np.float32)))
