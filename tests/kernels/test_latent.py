"""Attention on latents: against keys and values that are expanded for every position, and the same bits however cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from llmctl.kernels import _cpu, registry
from llmctl.kernels.cpu import ops as cpu
from llmctl.kernels.errors import NoKernel
from llmctl.kernels.formats import KVFormat, parse_weight_format
from llmctl.kernels.ops import KVLayer, LatentArgs, LinearArgs, make_act, make_batch, make_rows
from llmctl.kernels.reference import ENTRIES as REFERENCE
from llmctl.kernels.reference.kv import latent_view
from llmctl.kernels.reference.weight import dequantize

from .cases import latent_case, random_weight

RANK, NOPE, ROPE, VALUE, HEADS = 32, 8, 16, 24, 3


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    _cpu.set_threads(1)
    yield
    _cpu.set_threads(1)
    _cpu.set_isa(_cpu.isas()[-1])


def make(rows: int, block_size: int, kind: str, interleaved: bool, weight: str) -> LatentArgs:
    sizes, form = (RANK, ROPE, NOPE, VALUE), parse_weight_format(weight)
    return latent_case(rows, HEADS, sizes, block_size, kind, form, interleaved=interleaved).make()


@pytest.mark.parametrize("bits", ["best", "reference"])
@pytest.mark.parametrize(
    ("rows", "block_size", "kind", "interleaved", "weight"),
    [(1, 8, "f32", False, "f32"), (7, 16, "f16", True, "f16"), (33, 64, "bf16", False, "int4g32"),
     (7, 8, "f32", True, "int8g32"), (3, 8, "f32", False, "int16g32")],
)  # fmt: skip
def test_what_is_absorbed_gives_what_is_expanded(rows, block_size, kind, interleaved, weight, bits):
    args = make(rows, block_size, kind, interleaved, weight)
    before = latent_view(args.kv).clone()
    (reference,) = (entry for entry in REFERENCE if entry.op == "latent")
    for op in registry.bind("latent", args) if bits == "best" else reference.build(args):
        op.run()
    stored = latent_view(args.kv)
    assert int((stored != before).any(dim=2).sum()) == rows, "more was stored than the rows"
    up = dequantize(args.up).double().view(HEADS, NOPE + VALUE, RANK)
    for row in range(rows):
        position, slot = int(args.batch.position[row]), int(args.batch.slot[row])
        table = args.batch.tables[1][slot, : position // block_size + 1]
        seen = stored[torch.from_numpy(table).long()].reshape(-1, RANK + ROPE)[: position + 1].double()
        x = torch.from_numpy(args.latent)[row, : RANK + ROPE].double()
        normed = x[:RANK] / torch.sqrt((x[:RANK] ** 2).mean() + 1e-6) * torch.from_numpy(args.kv_norm).double()
        fresh = torch.cat((normed, turn(args, x[RANK:], position)))
        assert torch.allclose(seen[-1], fresh, rtol=1e-2, atol=1e-2)
        expanded = torch.einsum("hdr,tr->htd", up, seen[:, :RANK])
        keys = torch.cat((expanded[:, :, :NOPE], seen[None, :, RANK:].expand(HEADS, -1, -1)), dim=2)
        q = torch.from_numpy(args.q)[row, : HEADS * (NOPE + ROPE)].double().view(HEADS, -1)
        q = torch.cat((q[:, :NOPE], turn(args, q[:, NOPE:], position)), dim=1)
        weights = torch.softmax(torch.einsum("hd,htd->ht", q, keys) * args.q_scale, dim=1)
        expected = torch.einsum("ht,htd->hd", weights, expanded[:, :, NOPE:]).reshape(-1).numpy()
        np.testing.assert_allclose(args.act.values[row], expected, rtol=1e-5, atol=3e-6)


def turn(args: LatentArgs, x: torch.Tensor, position: int) -> torch.Tensor:
    """The rotation as a product of complex numbers."""
    pairs = x.view(*x.shape[:-1], -1, 2) if args.interleaved else torch.stack(x.chunk(2, dim=-1), dim=-1)
    angle = torch.complex(torch.from_numpy(args.cos)[position].double(), torch.from_numpy(args.sin)[position].double())
    turned = torch.view_as_complex(pairs.contiguous()) * angle
    return torch.cat((turned.real, turned.imag), dim=-1)


def test_latents_in_8_bits_are_refused_by_name():
    args = make(1, 8, "f32", False, "f32")
    byte = KVLayer(args.kv.arena, 1024, 0, 8, 1, RANK + ROPE, KVFormat("int8"), 1)
    with pytest.raises(NoKernel, match="no latents in format `int8`"):
        registry.bind("latent", dataclasses.replace(args, kv=byte))


def test_sizes_that_no_kernel_has_are_refused_with_the_limit():
    args = make(1, 8, "f32", False, "f32")
    form = parse_weight_format("f32")
    wide = dataclasses.replace(args, up=random_weight(form, 4, 520, np.random.default_rng(0)))
    assert cpu.accepts_latent(wide) == "latents of rank 520, not a multiple of 8 up to 512"
    odd = dataclasses.replace(args, kv=dataclasses.replace(args.kv, head_dim=RANK + 4))
    assert cpu.accepts_latent(odd) == "rotated keys of 4 values, not a multiple of 8 up to 128"
    assert cpu.accepts_latent(dataclasses.replace(args, nope_dim=300)).startswith("keys of 300 values")


class Layer:
    """Attention on latents and the linear behind it in one program, for tokens whose inputs are drawn beforehand."""

    tokens, max_rows, slots, context = 150, 72, 10, 192

    def __init__(self, kind: str, weight: str, *, heads: int = 17, block_size: int = 16, act_threads: int = 4) -> None:
        rng = np.random.default_rng(11)
        rank, rope, nope, value = 64, 16, 24, 16
        blocks = -(-self.context // block_size)
        table = rng.permutation(self.slots * blocks).astype(np.int32).reshape(self.slots, blocks)
        rng = np.random.default_rng(12)
        self.block_bytes = block_size * (rank + rope) * KVFormat(kind).bytes_per_value
        self.arena = np.full(table.size * self.block_bytes, 0xFF, np.uint8)  # NaN in every format
        self.batch = make_batch(self.max_rows, self.slots, self.max_rows, (table,))
        self.given = rng.standard_normal((self.tokens, heads * (nope + rope))).astype(np.float32)
        self.latents = rng.standard_normal((self.tokens, rank + rope)).astype(np.float32)
        self.q, self.latent = make_rows(self.given.shape[1], self.max_rows), make_rows(rank + rope, self.max_rows)
        angles = rng.uniform(0, 6, (self.context, rope // 2))
        form, behind = parse_weight_format(weight), parse_weight_format("int4g32" if heads % 2 == 0 else "f32")
        self.act, self.out = (
            make_act(heads * value, self.max_rows, act_threads, [behind]),
            make_rows(32, self.max_rows),
        )
        args = LatentArgs(
            self.batch, self.q, self.latent, rng.uniform(0.5, 1.5, rank).astype(np.float32), 1e-6,
            random_weight(form, heads * (nope + value), rank, rng),
            np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), True, heads, nope, value,
            (nope + rope) ** -0.5,
            KVLayer(self.arena, self.block_bytes, 0, block_size, 1, rank + rope, KVFormat(kind), 0), self.act,
        )  # fmt: skip
        linear = LinearArgs(
            self.batch, self.act, random_weight(behind, 32, heads * value, rng), None, self.out, False, False
        )  # fmt: skip
        self.ops = (*cpu.build_latent(args), *cpu.build_linear(linear))
        self.program = cpu.record(self.ops, self.batch)

    def step(self, chunks: list[tuple[int, int, int]], *, recorded: bool = True) -> np.ndarray:
        """What the linear gives for chunks of (slot, first position, how many)."""
        b, row = self.batch, 0
        for s, (slot, start, count) in enumerate(chunks):
            end = row + count
            b.slot[row:end], b.position[row:end] = slot, np.arange(start, start + count)
            b.seq_first[s], b.seq_rows[s] = row, count
            self.q[row:end, : self.given.shape[1]] = self.given[start : start + count]
            self.latent[row:end, : self.latents.shape[1]] = self.latents[start : start + count]
            row = end
        b.counts[:3] = row, len(chunks), row
        if recorded:
            self.program.replay()
        else:
            for op in self.ops:
                op.run()
        return self.out[:row].copy()

    def prompt(self, chunk: int, slot: int, *, recorded: bool = True, tokens: int = 150) -> np.ndarray:
        """Of every token of a prompt that comes in chunks."""
        cuts = [(at, min(chunk, tokens - at)) for at in range(0, tokens, chunk)]
        return np.concatenate([self.step([(slot, *cut)], recorded=recorded) for cut in cuts])


@pytest.mark.parametrize("isa", _cpu.isas())
@pytest.mark.parametrize(
    ("kind", "weight", "heads"), [("f32", "f16", 4), ("f16", "int4g32", 17), ("bf16", "int8g64", 16)]
)
def test_chunks_threads_and_replay_change_no_bit(isa, kind, weight, heads):
    _cpu.set_isa(isa)
    layer = Layer(kind, weight, heads=heads)
    expected = layer.prompt(1, 0)
    assert np.isfinite(expected).all()
    for threads, chunk, slot, recorded in [
        (1, 3, 1, True),
        (1, 72, 2, True),
        (2, 1, 3, True),
        (2, 2, 4, False),
        (2, 7, 5, True),
        (2, 72, 6, False),
        (3, 40, 7, True),
    ]:
        _cpu.set_threads(threads)
        assert np.array_equal(layer.prompt(chunk, slot, recorded=recorded), expected), (threads, chunk)


def test_wider_columns_have_the_bits_of_avx2():
    if "avx512" not in _cpu.isas():
        pytest.skip("no AVX-512 here")
    _cpu.set_isa("avx2")
    expected = Layer("f16", "int4g32").prompt(20, 0)
    _cpu.set_isa("avx512")
    assert np.array_equal(Layer("f16", "int4g32").prompt(20, 0), expected)


def test_block_sizes_and_private_rows_change_no_bit():
    _cpu.set_threads(2)
    expected = Layer("f16", "f32", heads=4).prompt(50, 0)
    for block_size in (8, 24, 64, 512):
        assert np.array_equal(Layer("f16", "f32", heads=4, block_size=block_size).prompt(2, 0), expected), block_size
    assert np.array_equal(Layer("f16", "f32", heads=4, act_threads=0).prompt(2, 0), expected)


@pytest.mark.parametrize("isa", _cpu.isas())
def test_a_row_has_the_same_bits_alone_and_in_company(isa):
    _cpu.set_isa(isa)
    layer = Layer("f16", "int4g32")
    lengths = [5 + 13 * slot for slot in range(10)]
    for slot, length in enumerate(lengths):
        layer.prompt(72, slot, tokens=length)
    last = [(slot, length, 1) for slot, length in enumerate(lengths)]
    alone = np.concatenate([layer.step([chunk]) for chunk in last])
    for threads in (1, 2):
        _cpu.set_threads(threads)
        for size in (2, 3, 10):
            assert np.array_equal(layer.step(last[:size]), alone[:size]), (threads, size)
        mixed = layer.step([*last[:4], (9, lengths[9], 20), *last[4:9]])
        assert np.array_equal(mixed[[0, 1, 2, 3, 4, 24, 28]], alone[[0, 1, 2, 3, 9, 4, 8]]), threads


def test_a_nan_in_a_latent_reaches_every_later_row_and_no_other_sequence():
    layer = Layer("f16", "f32", heads=4)
    layer.latents[3, 5] = np.nan
    broken = layer.prompt(1, 0, tokens=20)
    assert np.isfinite(broken[:3]).all() and np.isnan(broken[3:]).all()
    layer.latents[3, 5] = 1.0
    fine = layer.prompt(10, 1, tokens=20)
    assert np.isfinite(fine).all() and np.array_equal(fine[:3], broken[:3])
