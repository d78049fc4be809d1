"""The CUDA entries of the registry: they accept what their kernels can do on the machine that is in use.

Three entries serve linear layers. `cuda` gives a row the same bits in any company and is always there; `cuda-fast` also
cuts the inputs by the number of rows and has a kernel of its own for a single row, and `cuda-library` is NVIDIA's for
16-bit weights: classes of bits that only a machine without `deterministic` may bind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..cpu.pack import unpack
from ..entry import Entry
from ..errors import NoKernel
from ..ops import (
    LOGIT_ROWS,
    ROWS,
    ActMulArgs,
    AttendArgs,
    EmbedArgs,
    ExpertsArgs,
    LatentArgs,
    LinearArgs,
    NormAddArgs,
    NormArgs,
    PackedWeight,
    RopeStoreArgs,
)
from . import linear, steps
from .attend import compute_of
from .call import Call
from .experts_op import build_experts, refuse_experts
from .jit import architecture
from .latent_op import build_latent, refuse_latent
from .library import build_library, refuse_library
from .linear import Addresses, Linear
from .linear_tiles import shared_limit
from .machine import Machine
from .pack import pack
from .steps import DTYPES, as_stored
from .tiles import missing, too_wide

MIN_CAPABILITY = (7, 5)  # matrix loads, and tensor cores whose operands lie as in all later ones

_KEPT_CALLS = 64  # numbers of rows that a layer's calls are kept for

_machine: list[Machine] = []


def use(machine: Machine | None) -> None:
    """Ops that are bound from now on run on this machine; None for none."""
    _machine[:] = [] if machine is None else [machine]


def machine_in_use() -> Machine:
    """The machine that ops are bound to. Raises NoKernel if there is none."""
    if not _machine:
        raise NoKernel("no GPU is in use", "run on the CPU with `--device cpu`")
    return _machine[0]


def entries() -> tuple[Entry, ...]:
    """Every entry; without a machine they refuse."""
    step = (
        ("embed", steps.refuse_embed, steps.build_embed, "rows.cuh"),
        ("norm", steps.refuse_norm, steps.build_norm, "rows.cuh"),
        ("norm_add", steps.refuse_norm_add, steps.build_norm_add, "rows.cuh"),
        ("latent", refuse_latent, build_latent, "latent.cuh"),
        ("rope_store", steps.refuse_rope_store, steps.build_rope_store, "rope_store.cuh"),
        ("attend", steps.refuse_attend, steps.build_attend, "attend.cuh"),
        ("experts", refuse_experts, build_experts, "moe.cuh"),
        ("act_mul", steps.refuse_act_mul, steps.build_act_mul, "apart.cuh"),
        ("kv_copy", steps.refuse_kv_copy, steps.build_kv_copy, "kv_blocks.cuh"),
    )
    return (
        _entry("linear", "cuda-library", 30, _refuse_library, build_library, "library.py"),
        _entry("linear", "cuda-fast", 20, _refuse_fast, _build_linear, "linear_vector.cuh"),
        _entry("linear", "cuda", 10, _refuse_linear, _build_linear, "linear_mma.cuh"),
        *(_entry(op, "cuda", 10, refuse, build, source) for op, refuse, build, source in step),
    )


def _entry(
    op: str,
    bits: str,
    priority: int,
    refuse: Callable[[Any], str | None],
    build: Callable[[Any, Machine], Any],
    source: str,
) -> Entry:
    def accepts(args: Any) -> str | None:
        if not _machine:
            return "no GPU is in use"
        if (capability := _machine[0].capability) < MIN_CAPABILITY:
            return f"the GPU has compute capability {capability[0]}.{capability[1]}, 7.5 is needed"
        return _refuse_types(capability, args) or refuse(args)

    return Entry(op, "cuda", bits, "sm_80", priority, accepts, lambda args: build(args, _machine[0]), f"cuda/{source}")


def _refuse_types(capability: tuple[int, int], args: Any) -> str | None:
    """Why an old GPU does not compute in the types of these arguments."""
    arch = architecture(*capability)
    match args:
        case LinearArgs() | ActMulArgs() | ExpertsArgs():
            dtype = DTYPES.get(args.act.values.dtype)
        case NormArgs() | NormAddArgs():
            dtype = DTYPES.get(args.x.dtype)
        case RopeStoreArgs() | AttendArgs() | LatentArgs():
            dtype = DTYPES.get(args.q.dtype)
        case EmbedArgs():
            dtype = DTYPES.get(args.out.dtype)
        case _:
            dtype = None
    if dtype == "bf16":
        return missing(arch, dtype)
    if isinstance(args, AttendArgs) and dtype is not None:
        wanted = args.compute or compute_of(dtype, args.kv.format.kind)
        return missing(arch, wanted) or too_wide(arch, args.kv.head_dim)
    return None


@dataclass(frozen=True, slots=True, eq=False)
class LinearOp:
    """A linear layer on a machine, for the rows now in the batch; the calls of each number of rows are made once."""

    args: LinearArgs
    layer: Linear
    machine: Machine
    weight: int
    bias: int
    order: int
    calls: dict[int, list[Call]] = field(default_factory=dict)

    def run(self) -> None:
        rows = int(self.args.batch.counts[LOGIT_ROWS if self.args.logit_rows_only else ROWS])
        if rows == 0:
            return
        if rows not in self.calls:
            if len(self.calls) == _KEPT_CALLS:
                self.calls.clear()
            self.calls[rows] = self._calls(rows)
        self.machine.launch(self.calls[rows])

    def _calls(self, rows: int) -> list[Call]:
        args, layer, machine = self.args, self.layer, self.machine
        x, y, calls = machine.address(args.act.values), machine.address(args.out), []
        sums_bytes, ordered_bytes = _workspace(layer, args.act.max_rows, machine, ordered=self.order != 0)
        work = machine.workspace(sums_bytes + ordered_bytes)
        if self.order:
            ordered = work + sums_bytes
            calls.append(linear.gather_call(layer.dtype, rows, layer.inputs, out=ordered, x=x, order=self.order))
            x = ordered
        at = Addresses(y, x, self.weight, self.bias, y if args.add else 0, work)
        return calls + linear.linear_calls(
            layer, rows, at, machine.processors,
            deterministic=machine.deterministic, shared_limit=shared_limit(machine.capability),
        )  # fmt: skip


def _refuse_library(args: LinearArgs) -> str | None:
    return refuse_library(args, _machine[0])


def _refuse_fast(args: LinearArgs) -> str | None:
    if _machine[0].deterministic:
        return "its bits depend on the number of rows, which `--deterministic` forbids"
    return _refuse_linear(args)


def _refuse_linear(args: LinearArgs) -> str | None:
    if args.act.values.dtype not in DTYPES:
        return f"activations are {args.act.values.dtype}"
    return linear.refusal(_layer(args))


def _build_linear(args: LinearArgs, machine: Machine) -> tuple[LinearOp]:
    layer, weight = _layer(args), args.weight
    # Reserved now for the most rows that can come, so that no step has to.
    machine.workspace(sum(_workspace(layer, args.act.max_rows, machine, ordered=weight.order is not None)))
    return (
        LinearOp(
            args,
            layer,
            machine,
            machine.upload(pack(weight.format, *unpack(weight))),
            0 if args.bias is None else machine.upload(as_stored(args.bias, layer.dtype)),
            0 if weight.order is None else machine.upload(weight.order),
        ),
    )


def _layer(args: LinearArgs) -> Linear:
    weight: PackedWeight = args.weight
    layer = Linear(DTYPES[args.act.values.dtype], weight.format, weight.n, weight.k, "add" if args.add else "store")
    return replace(layer, stride=args.out.shape[1])


def _workspace(layer: Linear, rows: int, machine: Machine, *, ordered: bool) -> tuple[int, int]:
    """Bytes of partial sums, and of the inputs in the weight's order."""
    sums = linear.linear_workspace(
        layer,
        rows,
        machine.processors,
        deterministic=machine.deterministic,
        shared_limit=shared_limit(machine.capability),
    )
    return -(-sums // 16) * 16, 4 * rows * layer.inputs if ordered else 0
