"""Attention on latents as ops: the store of a step's tokens, and attention with what brings queries there and back."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..formats import WeightFormat
from ..ops import ATTEND_SPLIT, ROWS, F32Array, LatentArgs
from . import latent, pack
from .attend import MERGE_ROWS, MERGE_THREADS
from .call import Argument, Call
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
            _p(queries), _p(at(kv.arena)), _p(q), _p(at(args.latent)), _p(norm), _p(cosines), _p(sines),
            _p(at(table)), _p(at(batch.slot)), _p(at(batch.position)), _p(at(batch.counts) + 4 * ROWS),
            _l(kv.block_stride), _l(kv.layer_offset), _i(table.shape[1]), _i(block_bits(kv.block_size)),
            _i(args.num_heads), _i(args.nope_dim), _i(rank), _i(kv.head_dim - rank), _i(args.latent.shape[1]),
            _i(args.interleaved), ctypes.c_float(args.norm_eps),
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
            _p(results), _p(parts), _p(scales), _p(queries), _p(machine.address(kv.arena)),
            _p(machine.address(table)), _p(machine.address(work.work)), _p(counts), _l(kv.block_stride),
            _l(kv.layer_offset), _i(table.shape[1]), _i(heads), ctypes.c_float(args.q_scale * np.log2(np.e)),
            _i(block_bits(kv.block_size)),
        )  # fmt: skip
        calls = [Call(shape.kernel, (items, 1, 1), shape.threads, shape.shared_bytes, attending)]
        if merges:
            merging: tuple[Argument, ...] = (
                _p(results), _p(parts), _p(scales), _p(machine.address(work.merge)), _p(counts + 4), _p(0),
                _i(heads * rank), _i(heads), _p(0),
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


def _p(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def _i(value: int) -> ctypes.c_int32:
    return ctypes.c_int32(value)


def _l(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)
