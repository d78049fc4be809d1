"""A layer bound through the registry computes the same recorded, op by op, and with any number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from llmctl.kernels import _cpu, registry
from llmctl.kernels.formats import KVFormat, WeightFormat
from llmctl.kernels.ops import (
    ActMulArgs,
    AttendArgs,
    Batch,
    EmbedArgs,
    F32Array,
    LinearArgs,
    NormAddArgs,
    NormArgs,
    Op,
    RopeStoreArgs,
    make_act,
    make_rows,
)

from .cases import MAX_ROWS, random_batch, random_kv, random_weight

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, BLOCK = 96, 6, 2, 16, 160, 83, 16
FORMATS = (WeightFormat("f32"), WeightFormat("int4", 32), WeightFormat("int8", 32))


def bind_layer(format: WeightFormat, rows: int, kernels: str, threads: int = 2) -> tuple[Batch, list[Op], F32Array]:
    """(batch, ops from tokens to logits, logits) of a model with one layer, in a seeded world of its own."""
    rng = np.random.default_rng(11)
    batch, blocks = random_batch(rng, rows, block_size=BLOCK, far=200)
    batch.token[:rows] = rng.integers(0, VOCAB, rows)
    kv = random_kv(rng, KVFormat("f16"), blocks, BLOCK, KV_HEADS, HEAD_DIM)
    angles = rng.uniform(0, 6, (200 + MAX_ROWS, HEAD_DIM // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    x, half, q, k, v, gate, up, logits = (
        make_rows(width, MAX_ROWS)
        for width in (HIDDEN, HIDDEN, HIDDEN, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, FFN, FFN, VOCAB)
    )
    hidden, wide = (make_act(width, MAX_ROWS, threads, (format,)) for width in (HIDDEN, FFN))
    ops: list[Op] = []

    def add(op, args):
        ops.extend(registry.bind(op, args, kernels=kernels))

    def linear(act, n, out, adds=False, only_logits=False):
        add("linear", LinearArgs(batch, act, random_weight(format, n, act.k, rng), None, out, adds, only_logits))

    def norm(only_logits=False):
        weight = rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32)
        add("norm", NormArgs(batch, x, weight, 1e-5, hidden, only_logits))

    def norm_add():
        add("norm_add", NormAddArgs(batch, half, rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32), 1e-5, x))

    add("embed", EmbedArgs(batch, random_weight(format, VOCAB, HIDDEN, rng), x, HIDDEN**0.5))
    norm()
    for width, out in ((HIDDEN, q), (KV_HEADS * HEAD_DIM, k), (KV_HEADS * HEAD_DIM, v)):
        linear(hidden, width, out)
    add("rope_store", RopeStoreArgs(batch, q, k, v, None, None, 1e-5, cos, sin, HEADS, HEAD_DIM**-0.5, kv))
    add("attend", AttendArgs(batch, q, HEADS, kv, 0, 200 + MAX_ROWS, hidden))
    linear(hidden, HIDDEN, x, adds=True)
    norm()
    linear(hidden, FFN, gate)
    linear(hidden, FFN, up)
    add("act_mul", ActMulArgs(batch, gate, up, "silu", wide))
    linear(wide, HIDDEN, half)
    norm_add()
    norm(only_logits=True)
    linear(hidden, VOCAB, logits, only_logits=True)
    return batch, ops, logits


def logits_of(format: WeightFormat, rows: int, kernels: str, *, recorded: bool) -> np.ndarray:
    batch, ops, logits = bind_layer(format, rows, kernels)
    if recorded:
        registry.record(ops, batch, kernels=kernels).replay()
    else:
        for op in ops:
            op.run()
    return logits[: batch.counts[2], :VOCAB].copy()


@pytest.fixture(params=[1, 2])
def threads(request):
    before = _cpu.threads()
    _cpu.set_threads(request.param)
    yield request.param
    _cpu.set_threads(before)


@pytest.mark.parametrize("rows", [1, 2, 3, 33])
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("kernels", ["auto", "generic", "reference"])
def test_a_recorded_layer_gives_the_bits_of_its_ops_one_by_one(kernels, format, rows, threads):
    recorded = logits_of(format, rows, kernels, recorded=True)
    assert np.isfinite(recorded).all() and recorded.std() > 0.1
    assert recorded.tobytes() == logits_of(format, rows, kernels, recorded=False).tobytes()


@pytest.mark.parametrize("rows", [1, 2, 33])
@pytest.mark.parametrize("kernels", ["auto", "generic"])
def test_a_layer_is_as_close_to_the_reference_as_its_ops(kernels, rows):
    expected = logits_of(WeightFormat("f32"), rows, "reference", recorded=True)
    assert np.allclose(logits_of(WeightFormat("f32"), rows, kernels, recorded=True), expected, atol=2e-3)


def test_native_ops_make_a_native_program_and_mixed_ones_do_not():
    batch, ops, _ = bind_layer(FORMATS[0], 3, "auto")
    _, others, _ = bind_layer(FORMATS[0], 3, "reference")
    assert not isinstance(registry.record(ops, batch), registry.PythonProgram)
    assert isinstance(registry.record([*ops[:2], others[2]], batch), registry.PythonProgram)
