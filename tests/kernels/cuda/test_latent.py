"""Attention on latents on the emulator, every access checked: what the reference computes, whatever the type."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from llmctl.kernels import registry
from llmctl.kernels.cuda import register
from llmctl.kernels.cuda.emulated_machine import EmulatedMachine
from llmctl.kernels.cuda.jit import ARCHITECTURES, architecture
from llmctl.kernels.cuda.latent import LatentShape, choose_latent
from llmctl.kernels.cuda.latent_op import LatentLane, LatentOp, _lane
from llmctl.kernels.cuda.latent_table import SIZES
from llmctl.kernels.cuda.linear import Linear
from llmctl.kernels.cuda.steps import as_stored
from llmctl.kernels.cuda.table import ModelNeeds, activations, all_kernels, model_kernels
from llmctl.kernels.cuda.tiles import SMS
from llmctl.kernels.errors import NoKernel
from llmctl.kernels.formats import WeightFormat
from llmctl.kernels.ops import LatentArgs
from llmctl.kernels.reference.kv import latent_view

from ..cases import latent_case
from .linear_worlds import exact

SMALL, LARGER = (32, 32, 16, 24), (64, 32, 8, 16)
# Of the largest result: what is rounded on the way are queries, weights and results.
LIMITS = {"f32": 3e-6, "f16": 3e-3, "bf16": 2.5e-2}


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    register.use(None)


def typed(args: LatentArgs, kind: str) -> LatentArgs:
    """The same arguments with activations of this type."""
    q, latent, values = (as_stored(array, kind) for array in (args.q, args.latent, args.act.values))
    return dataclasses.replace(args, q=q, latent=latent, act=dataclasses.replace(args.act, values=values))


@pytest.mark.parametrize(
    ("kind", "rows", "heads", "sizes", "far", "interleaved", "deterministic"),
    [
        ("f32", 3, 4, SMALL, 300, True, True),
        ("f32", 17, 10, LARGER, 40, False, False),
        ("f16", 3, 40, SMALL, 300, False, False),
        ("bf16", 9, 16, LARGER, 150, True, True),
        pytest.param("bf16", 3, 40, LARGER, 400, False, False, marks=pytest.mark.slow),
    ],
)
def test_the_op_computes_what_the_reference_does(
    builds: Path,
    kind: str,
    rows: int,
    heads: int,
    sizes: tuple[int, int, int, int],
    far: int,
    interleaved: bool,
    deterministic: bool,
) -> None:
    case = latent_case(rows, heads, sizes, 16, kind, WeightFormat("f32"), interleaved=interleaved, far=far)
    args, given = typed(case.make(), kind), case.make()
    given.q[:], given.latent[:] = exact(args.q, kind), exact(args.latent, kind)
    register.use(EmulatedMachine(builds, mode="checked", deterministic=deterministic, processors=2))
    for op in registry.bind("latent", args, device="cuda"):
        op.run()
    for op in registry.bind("latent", given, kernels="reference"):
        op.run()
    width = heads * args.value_dim
    found, expected = exact(args.act.values[:rows, :width], kind), given.act.values[:rows, :width].astype(np.float64)
    assert np.abs(found - expected).max() <= LIMITS[kind] * np.abs(expected).max()
    stored, wanted = latent_view(args.kv).double().numpy(), latent_view(given.kv).double().numpy()
    assert np.abs(stored - wanted).max() <= LIMITS[kind] / 2 * np.abs(wanted).max()
    assert np.array_equal(case.outputs(args)["other layers"], case.outputs(given)["other layers"])


def test_a_row_has_the_same_bits_alone_and_in_company(builds: Path) -> None:
    case = latent_case(6, 4, SMALL, 16, "f32", WeightFormat("f32"), far=200)
    found = []
    for count in (6, 1):
        args = case.make()
        args.batch.counts[:3] = count, 1, 1
        args.batch.seq_rows[0] = min(count, int(args.batch.seq_rows[0]))
        if count == 6:
            args = case.make()
        register.use(EmulatedMachine(builds))
        for op in registry.bind("latent", args, device="cuda"):
            op.run()
        found.append(args.act.values[0].tobytes())
    assert found[0] == found[1]


def test_a_model_of_many_heads_has_a_shape_on_every_architecture_with_enough_memory() -> None:
    for arch in ARCHITECTURES:
        for act in ("f16", "bf16"):
            if arch == "sm_75":
                continue
            shape = choose_latent(arch, act, 128, 512, 64)
            assert shape.shared_bytes <= SMS[arch].block_shared and shape.warps == 8, (arch, shape)
    assert choose_latent("sm_90a", "bf16", 128, 512, 64) == LatentShape("bf16", 512, 64, 2, 64)
    assert choose_latent("sm_90a", "bf16", 16, 512, 64).tiles_m == 1
    with pytest.raises(NoKernel, match="no tensor cores for f32"):
        choose_latent("sm_75", "f32", 16, 64, 32)
    with pytest.raises(NoKernel, match="of f32 does not fit"):
        choose_latent("sm_86", "f32", 16, 512, 64)


def test_sizes_without_a_kernel_are_refused_with_the_reason(builds: Path) -> None:
    register.use(EmulatedMachine(builds))
    for sizes, kind, said in (
        ((40, 32, 16, 24), "f32", "latents of rank 40; multiples of 32 up to 512 are known"),
        ((32, 8, 16, 24), "f32", "rotated keys of 8 values; multiples of 32 up to 128 are known"),
        ((32, 32, 16, 24), "f16", "latents in f16 with f32 activations"),
    ):
        args = latent_case(2, 4, sizes, 16, kind, WeightFormat("f32")).make()
        with pytest.raises(NoKernel, match=said):
            registry.bind("latent", args, device="cuda")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (9, 0)])
def test_what_models_that_are_known_ask_for_is_registered(builds: Path, capability: tuple[int, int]) -> None:
    arch = architecture(*capability)
    registered = {item.kernel for item in all_kernels(arch)}
    needs = ModelNeeds(activations(arch)[-1], "f16", "f16", 192, 2048, "silu", latent=SIZES[0])
    assert {item.kernel for item in model_kernels(arch, needs)} <= registered
    case = latent_case(3, 4, SMALL, 16, "f32", WeightFormat("f32")).make()
    for (heads, rank, rope), act in itertools.product(SIZES, activations(arch)):
        try:
            shape = choose_latent(arch, act, heads, rank, rope)
        except NoKernel:
            continue
        machine = EmulatedMachine(builds, capability=capability)
        args = dataclasses.replace(case, num_heads=heads)
        lane = LatentLane(shape, _lane(args, machine, shape).work)
        keys, values = Linear(act, WeightFormat(act), rank, 128 + rope), Linear(act, WeightFormat(act), 128, rank)
        op = LatentOp(args, machine, lane, keys, values, (16,) * 5)
        for rows in (1, 16, 17, 64, 300):
            calls = [*op._before(rows), *op._attend(2, 1), *op._after(rows)]
            assert {call.kernel for call in calls} <= registered, (act, heads, rows)
