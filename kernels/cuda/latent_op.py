"""Attention on latents as ops: the store of a step's tokens, and attention with what brings queries there and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..formats import WeightFormat
from ..ops import ATTEND_SPLIT, ROWS, F32Array, LatentArgs
from . import latent, pack
from .arguments import Argument, f32, i32, i64, ptr
from .attend import MERGE_ROWS, MERGE_THREADS
from .call import Call
from .jit import architecture
from .latent import LatentShape
from .linear import Addresses, Linear
from .machine import Machine
from .steps import DTYPES, as_stored, refuse_rows, values_of
from .types import ELEMENT_BYTES, block_bits
from .work_list import Tiles, WorkList, make_work_list

_ALL = 1 << 30  # rows, of any sequence


@dataclass(frozen=True, slots=True, eq=False)
class LatentLane:
    """A specialization, and the list of sequences that it computes: all."""

    shape: LatentShape
    work: WorkList


@dataclass(frozen=True, slots=True, eq=False)
class LatentOp:
    """Attention on latents, for the rows now in the batch. A list that is held has been planned for them.

    keys, values   layers of each head: of a query (its part for rotated keys counts nothing) to a latent, and of a
                   latent to a value; their weights, and those of the norm and the tables of angles, are at `addresses`
    """

    args: LatentArgs
    machine: Machine
    lane: LatentLane
    keys: Linear
    values: Linear
    addresses: tuple[int, int, int, int, int]

    @property
    def lanes(self) -> tuple[LatentLane, ...]:
        return (self.lane,)

    def run(self) -> None:
        if (rows := int(self.args.batch.counts[ROWS])) == 0:
            return
        machine, work = self.machine, self.lane.work
        self.machine.launch(self._before(rows))
        if not work.held:
            work.plan()
        for number in range(len(work.rounds)):
            needed = work.bring(machine, number)
            machine.launch(self._attend(*(work.grid if any(work.grid) else needed)))
        machine.launch(self._after(rows))

    def _places(self) -> tuple[int, int, int]:
        """Addresses in the workspace: parts of contexts, queries, and what attention gives."""
        sizes = self.sizes
        start = self.machine.workspace(sum(sizes))
        return start, start + sizes[0], start + sizes[0] + sizes[1]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Bytes of these."""
        args, work = self.args, self.lane.work
        pairs = args.act.max_rows * args.num_heads * ELEMENT_BYTES[self.keys.dtype]
        found = work.max_parts * work.tiles.part_bytes, pairs * self.keys.width, pairs * self.values.inputs
        parts, queries, results = (-(-size // 256) * 256 for size in found)
        return parts, queries, results

    def _before(self, rows: int) -> list[Call]:
        args, machine, kv = self.args, self.machine, self.args.kv
        batch, table, rank = args.batch, args.batch.tables[kv.group], args.up.k
        up, _, norm, cosines, sines = self.addresses
        _, queries, _ = self._places()
        q, at = machine.address(args.q), machine.address
        storing: tuple[Argument, ...] = (
            ptr(queries), ptr(at(kv.arena)), ptr(q), ptr(at(args.latent)), ptr(norm), ptr(cosines), ptr(sines),
            ptr(at(table)), ptr(at(batch.slot)), ptr(at(batch.position)), ptr(at(batch.counts) + 4 * ROWS),
            i64(kv.block_stride), i64(kv.layer_offset), i32(table.shape[1]), i32(block_bits(kv.block_size)),
            i32(args.num_heads), i32(args.nope_dim), i32(rank), i32(kv.head_dim - rank), i32(args.latent.shape[1]),
            i32(args.interleaved), f32(args.norm_eps),
        )  # fmt: skip
        grid = (rows, args.num_heads // 4 + 1, 1)
        return [
            Call(latent.store_kernel(self.keys.dtype), grid, latent.STORE_THREADS, 0, storing),
            *latent.heads_calls(self.keys, args.num_heads, rows, Addresses(queries, q, up), machine.capability),
        ]

    def _attend(self, items: int, merges: int) -> list[Call]:
        args, machine, kv, shape, work = self.args, self.machine, self.args.kv, self.lane.shape, self.lane.work
        parts, queries, results = self._places()
        table, rank, heads = args.batch.tables[kv.group], args.up.k, args.num_heads
        scales = parts + work.max_parts * 4 * shape.rows * rank
        counts = machine.address(work.counts)
        attending: tuple[Argument, ...] = (
            ptr(results), ptr(parts), ptr(scales), ptr(queries), ptr(machine.address(kv.arena)),
            ptr(machine.address(table)), ptr(machine.address(work.work)), ptr(counts), i64(kv.block_stride),
            i64(kv.layer_offset), i32(table.shape[1]), i32(heads), f32(args.q_scale * np.log2(np.e)),
            i32(block_bits(kv.block_size)),
        )  # fmt: skip
        calls = [Call(shape.kernel, (items, 1, 1), shape.threads, shape.shared_bytes, attending)]
        if merges:
            merging: tuple[Argument, ...] = (
                ptr(results), ptr(parts), ptr(scales), ptr(machine.address(work.merge)), ptr(counts + 4), ptr(0),
                i32(heads * rank), i32(heads), ptr(0),
            )  # fmt: skip
            grid = (merges, 1, MERGE_ROWS)
            calls.append(Call(shape.merge_kernel, grid, MERGE_THREADS, shape.merge_shared_bytes, merging))
        return calls

    def _after(self, rows: int) -> list[Call]:
        args, machine = self.args, self.machine
        _, _, results = self._places()
        at = Addresses(machine.address(args.act.values), results, self.addresses[1])
        return latent.heads_calls(self.values, args.num_heads, rows, at, machine.capability)


def refuse_latent(args: LatentArgs) -> str | None:
    """Why no kernels serve these latents, None if there are."""
    kv, heads, rank = args.kv, args.num_heads, args.up.k
    if (reason := refuse_rows(args.act.values, heads * args.value_dim)) is not None:
        return reason
    dtype = DTYPES[args.act.values.dtype]
    if kv.format.kind != dtype:
        return f"latents in {kv.format.kind} with {dtype} activations"
    rope = kv.head_dim - rank
    return latent.refusal(heads, rank, rope, args.nope_dim, args.value_dim, kv.block_size)


def build_latent(args: LatentArgs, machine: Machine) -> tuple[LatentOp]:
    """`up` is kept as values of the activations' type: of its part for keys rows and columns change places."""
    heads, rank = args.num_heads, args.up.k
    dtype, rope = DTYPES[args.act.values.dtype], args.kv.head_dim - rank
    plain = WeightFormat(dtype)
    parts = _up_values(args).reshape(heads, args.nope_dim + args.value_dim, rank)
    to_latent = np.zeros((heads, rank, args.nope_dim + rope), np.float32)
    to_latent[:, :, : args.nope_dim] = parts[:, : args.nope_dim].transpose(0, 2, 1)
    addresses = (
        machine.upload(_packed(to_latent, plain)),
        machine.upload(_packed(parts[:, args.nope_dim :], plain)),
        machine.upload(args.kv_norm),
        machine.upload(args.cos),
        machine.upload(args.sin),
    )
    shape = latent.choose_latent(architecture(*machine.capability), dtype, heads, rank, rope)
    op = LatentOp(
        args,
        machine,
        _lane(args, machine, shape),
        Linear(dtype, plain, rank, args.nope_dim + rope, stride=rank + rope),
        Linear(dtype, plain, args.value_dim, rank, stride=args.value_dim),
        addresses,
    )
    # Reserved now for the most rows that can come, so that no step has to.
    machine.workspace(sum(op.sizes))
    return (op,)


def _lane(args: LatentArgs, machine: Machine, shape: LatentShape) -> LatentLane:
    split = ATTEND_SPLIT if machine.deterministic else 0
    assert split % shape.tile == 0, shape.tile
    tiles = Tiles(args.num_heads, shape.rows, shape.tile, 0, 1, shape.rank)
    limits = {"above": 0, "most": _ALL, "max_positions": len(args.cos)}
    work = machine.once(
        ("work list", id(args.batch), tiles, split, *limits.values()),
        lambda: make_work_list(machine, args.batch, tiles, split, **limits),
    )
    return LatentLane(shape, work)


def _up_values(args: LatentArgs) -> F32Array:
    """The values of `up` [outputs, rank], column j of input j."""
    values = values_of(args.up)
    if args.up.order is None:
        return values
    ordered = np.empty_like(values)
    ordered[:, args.up.order] = values
    return ordered


def _packed(weights: Sequence[F32Array] | F32Array, format: WeightFormat) -> F32Array:
    """The packed weights of every head, one behind the other."""
    found: F32Array = np.concatenate(
        [pack.pack(format, as_stored(np.ascontiguousarray(each), format.kind)) for each in weights]
    )
    return found
