"""Mixture of experts as an op: scores, routing, the experts' linear layers on rows sorted by expert, and their sum.

Gate and up of an expert share a weight, whose kernel also multiplies them. An expert's inputs are never split, so a row
gives the same bits in any company as far as its scores do. The GPU counts the step's rows: what a graph has room for
beyond them is given to no expert, and so reads none's weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..cpu.pack import unpack
from ..ops import ROWS, AnyArray, ExpertsArgs, PackedWeight, U8Array
from . import linear, moe, pack
from .call import Call
from .jit import architecture
from .linear import Addresses, Linear
from .linear_tiles import expert_tiles, shared_limit
from .machine import Machine
from .moe import Routing
from .steps import DTYPES, as_stored, refuse_rows

_KEPT_CALLS = 64  # numbers of rows that calls are kept for
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class _Places:
    """Offsets into the workspace, and its size, for one number of rows."""

    scores: int
    ids: int
    weights: int
    row_ids: int
    tile_expert: int
    product: int
    results: int
    sums: int
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsOp:
    """The experts of a layer on a machine, for the rows now in the batch. `gates` are gates and ups."""

    args: ExpertsArgs
    machine: Machine
    routing: Routing
    router: Linear
    gates: Linear
    down: Linear
    addresses: tuple[int, int, int]  # of the weights, in this order
    bias: int
    calls: dict[int, list[Call]] = field(default_factory=dict)

    def run(self) -> None:
        if (rows := int(self.args.batch.counts[ROWS])) == 0:
            return
        if rows not in self.calls:
            if len(self.calls) == _KEPT_CALLS:
                self.calls.clear()
            self.calls[rows] = self._calls(rows)
        self.machine.launch(self.calls[rows])

    def _calls(self, rows: int) -> list[Call]:
        args, machine, routing = self.args, self.machine, self.routing
        router, gates, down = self.addresses
        at, tile_rows = _places(self, rows), _tile_rows(self, rows)
        work = machine.workspace(at.num_bytes)
        x, out, count = machine.address(args.act.values), machine.address(args.out), machine.address(args.batch.counts)
        ids, weights = work + at.ids, work + at.weights
        grouped = {"row_ids": work + at.row_ids, "tile_expert": work + at.tile_expert}
        scored = Addresses(work + at.scores, x, router, sums=work + at.sums)
        return [
            *linear.linear_calls(
                self.router, rows, scored, machine.processors,
                deterministic=machine.deterministic, shared_limit=shared_limit(machine.capability),
            ),
            moe.route_call(
                routing, rows, ids=ids, weights=weights, logits=work + at.scores, count=count + 4 * ROWS, bias=self.bias
            ),
            moe.group_call(routing, rows, tile_rows, **grouped, ids=ids, count=count + 4 * ROWS),
            *moe.experts_calls(
                self.gates, routing, rows, Addresses(work + at.product, x, gates), tile_rows,
                **grouped, row_divisor=routing.choices,
            ),
            *moe.experts_calls(
                self.down, routing, rows, Addresses(work + at.results, work + at.product, down), tile_rows,
                **grouped, row_divisor=1,
            ),
            moe.combine_call(
                routing.dtype, rows, routing.choices, self.down.width, out=out, y=work + at.results, weights=weights,
                count=count + 4 * ROWS, residual=out,
            ),
        ]  # fmt: skip


def refuse_experts(args: ExpertsArgs) -> str | None:
    """Why no kernels serve these experts, None if there are."""
    hidden = args.router.k
    if (reason := refuse_rows(args.act.values, hidden) or refuse_rows(args.out, hidden)) is not None:
        return reason
    if args.activation != "silu":
        return f"experts with activation {args.activation}"
    if args.router.n % 2 != 0:
        return f"{args.router.n} experts, an odd number"
    for weights in ((*args.gate, *args.up), args.down):
        if len({(weight.format, weight.n, weight.k) for weight in weights}) != 1:
            return "experts of one layer in several formats"
    if any(weight.order is not None for weight in (args.router, *args.gate, *args.up, *args.down)):
        return "experts whose inputs are in an order of their own (desc_act)"
    if args.gate[0].n % 8 != 0:
        return f"experts of {args.gate[0].n} inner values, no multiple of 8"
    routing, router, gates, down = _layers(args)
    return moe.refusal(routing) or next(filter(None, map(linear.refusal, (router, gates, down))), None)


def build_experts(args: ExpertsArgs, machine: Machine) -> tuple[ExpertsOp]:
    """The experts' packed weights lie one behind the other."""
    routing, router, gates, down = _layers(args)
    both = [_packed_gates(*pair) for pair in zip(args.gate, args.up, strict=True)]
    downs = [pack.pack(weight.format, *unpack(weight)) for weight in args.down]
    addresses = (
        machine.upload(pack.pack(args.router.format, *unpack(args.router))),
        machine.upload(np.concatenate(both)),
        machine.upload(np.concatenate(downs)),
    )
    bias = 0 if args.bias is None else machine.upload(as_stored(args.bias, "f32"))
    op = ExpertsOp(args, machine, routing, router, gates, down, addresses, bias)
    # Reserved now for the most rows that can come, so that no step has to.
    machine.workspace(_places(op, args.act.max_rows).num_bytes)
    return (op,)


def _layers(args: ExpertsArgs) -> tuple[Routing, Linear, Linear, Linear]:
    """The routing, and the linear layers of scores, of gates and ups, and back."""
    dtype, hidden, ffn = DTYPES[args.act.values.dtype], args.router.k, args.gate[0].n
    return (
        Routing(dtype, args.router.n, args.choices, args.score, args.normalize, args.scale),
        Linear(dtype, args.router.format, args.router.n, hidden, stride=args.router.n),
        Linear(dtype, args.gate[0].format, 2 * ffn, hidden, "silu"),
        Linear(dtype, args.down[0].format, hidden, ffn, stride=args.out.shape[1]),
    )


def _packed_gates(gate: PackedWeight, up: PackedWeight) -> U8Array:
    def both(first: AnyArray | None, second: AnyArray | None) -> AnyArray | None:
        return None if first is None or second is None else pack.interleave(first, second)

    data, scales, zeros = map(both, unpack(gate), unpack(up))
    assert data is not None
    return pack.pack(gate.format, data, scales, zeros)


def _tile_rows(op: ExpertsOp, rows: int) -> int:
    formats = op.gates.weight, op.down.weight
    capability = op.machine.capability
    return moe.choose_rows(op.routing, rows, formats, shared_limit(capability), expert_tiles(architecture(*capability)))


def _places(op: ExpertsOp, rows: int) -> _Places:
    """What is kept between the calls: enough for any number of rows up to this one."""
    routing, value = op.routing, 4 if op.routing.dtype == "f32" else 2
    pairs = rows * routing.choices
    sums = linear.linear_workspace(
        op.router, rows, op.machine.processors,
        deterministic=op.machine.deterministic, shared_limit=shared_limit(op.machine.capability),
    )  # fmt: skip
    tiles = [(each, moe.max_tiles(routing, rows, each)) for each in moe.TILE_ROWS]
    sizes = (
        value * rows * routing.experts,
        4 * pairs,
        4 * pairs,
        max(4 * each * count for each, count in tiles),
        max(4 * count for _, count in tiles),
        value * pairs * op.gates.width,
        value * pairs * op.down.width,
        sums,
    )
    return _Places(*_offsets(sizes))


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where each begins, and where the last ends."""
    found = [0]
    for size in sizes:
        found.append(found[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return found
