"""Attention on latents against keys and values that are expanded for every position and head."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from llmctl.kernels import registry
from llmctl.kernels.errors import NoKernel
from llmctl.kernels.formats import KVFormat, parse_weight_format
from llmctl.kernels.ops import KVLayer, LatentArgs
from llmctl.kernels.reference.kv import latent_view
from llmctl.kernels.reference.weight import dequantize

from .cases import MAX_ROWS, STORED, act_with_all_forms, random_batch, random_rows, random_weight

RANK, NOPE, ROPE, VALUE, HEADS = 32, 8, 16, 24, 3


def make(rows: int, block_size: int, kind: str, interleaved: bool, weight: str) -> LatentArgs:
    rng = np.random.default_rng(rows)
    batch, blocks = random_batch(rng, rows, block_size=block_size, far=50)
    size = block_size * (RANK + ROPE) * KVFormat(kind).bytes_per_value
    values = torch.from_numpy(rng.standard_normal((blocks, 2 * block_size * (RANK + ROPE)), np.float32))
    arena = values.to(STORED[kind]).view(torch.uint8).numpy().reshape(-1)
    angles = rng.uniform(0, 6, (60 + MAX_ROWS, ROPE // 2))
    return LatentArgs(
        batch,
        random_rows(rng, HEADS * (NOPE + ROPE)),
        random_rows(rng, RANK + ROPE),
        rng.uniform(0.5, 1.5, RANK).astype(np.float32),
        1e-6,
        random_weight(parse_weight_format(weight), HEADS * (NOPE + VALUE), RANK, rng),
        np.cos(angles).astype(np.float32),
        np.sin(angles).astype(np.float32),
        interleaved,
        HEADS,
        NOPE,
        VALUE,
        (NOPE + ROPE) ** -0.5,
        KVLayer(arena, 2 * size, size, block_size, 1, RANK + ROPE, KVFormat(kind), 1),
        act_with_all_forms(HEADS * VALUE),
    )


@pytest.mark.parametrize(
    ("rows", "block_size", "kind", "interleaved", "weight"),
    [(1, 8, "f32", False, "f32"), (7, 16, "f16", True, "f16"), (33, 64, "bf16", False, "int4g32"),
     (7, 8, "f32", True, "int8g32")],
)  # fmt: skip
def test_what_is_absorbed_gives_what_is_expanded(rows, block_size, kind, interleaved, weight):
    args = make(rows, block_size, kind, interleaved, weight)
    before = latent_view(args.kv).clone()
    for op in registry.bind("latent", args):
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
        np.testing.assert_allclose(args.act.values[row], expected, rtol=1e-5, atol=1e-6)


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
