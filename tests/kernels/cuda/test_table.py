"""What ops ask for on a GPU is registered: whatever they do not refuse, every kernel of it is in the table."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from llmctl.kernels import registry
from llmctl.kernels.cuda import register
from llmctl.kernels.cuda.call import Call
from llmctl.kernels.cuda.experts_op import ExpertsOp, _layers
from llmctl.kernels.cuda.jit import ARCHITECTURES, architecture
from llmctl.kernels.cuda.linear_table import CODES, WHOLE
from llmctl.kernels.cuda.register import LinearOp
from llmctl.kernels.cuda.rows import ACTIVATION
from llmctl.kernels.cuda.source import Kernel
from llmctl.kernels.cuda.steps import StepOp, build_attend
from llmctl.kernels.cuda.table import all_kernels
from llmctl.kernels.formats import KVFormat, WeightFormat
from llmctl.kernels.ops import (
    ActMulArgs,
    AttendArgs,
    EmbedArgs,
    ExpertsArgs,
    KeySteering,
    KVLayer,
    LinearArgs,
    NormAddArgs,
    NormArgs,
    PackedWeight,
    RopeStoreArgs,
    make_act,
    make_batch,
)

CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
TYPES = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.uint16))
KINDS = ("f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8", "int16")
BATCH = make_batch(4, 2, 4, (np.zeros((2, 8), np.int32),))
FORMATS = (*CODES, *(WeightFormat(kind) for kind in ("f32", "f16", "bf16")))
ROWS = (1, 2, 16, 17, 32, 33, 64, 65, 128, 129, 4096)


@dataclass(eq=False)
class Asked:
    """A machine on which nothing runs."""

    capability: tuple[int, int]
    deterministic: bool = False
    processors: int = 100
    shared: dict[Hashable, Any] = field(default_factory=dict)

    def prepare(self, kernels: Sequence[Kernel]) -> None: ...

    def address(self, array: np.ndarray) -> int:
        return 16

    def reserve(self, num_bytes: int) -> np.ndarray:
        return np.zeros(0, np.uint8)

    def upload(self, array: np.ndarray) -> int:
        return 16

    def workspace(self, num_bytes: int) -> int:
        return 16

    def send(self, array: np.ndarray) -> int:
        return 16

    def bring(self, array: np.ndarray, count: int) -> None: ...

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        return self.shared.setdefault(key, None) or make()

    def launch(self, calls: Sequence[Call]) -> None: ...


@pytest.fixture(params=CAPABILITIES, ids=lambda capability: architecture(*capability))
def asked(request: pytest.FixtureRequest) -> Iterator[Asked]:
    machine = Asked(request.param)
    register.use(machine)
    yield machine
    register.use(None)


@pytest.fixture
def registered(asked: Asked) -> set[Kernel]:
    return {item.kernel for item in all_kernels(architecture(*asked.capability))}


def accepted(op: str, args: object) -> bool:
    return any(entry.accepts(args) is None for entry in registry.entries("cuda") if entry.op == op)


def act_of(width: int, dtype: np.dtype):
    return dataclasses.replace(make_act(width, 4, 1, [], []), values=np.zeros((4, width), dtype))


def layer(kind: str, dim: int, block: int = 32, steering: KeySteering | None = None) -> KVLayer:
    return KVLayer(np.zeros(0, np.uint8), 1 << 20, 0, block, 1, dim, KVFormat(kind), 0, steering)


def test_every_architecture_is_asked() -> None:
    assert {architecture(*capability) for capability in CAPABILITIES} == set(ARCHITECTURES)


def test_all_attention_that_is_not_refused_is_registered(asked: Asked, registered: set[Kernel]) -> None:
    found: set[Kernel] = set()
    for dtype, kind, dim, compute in itertools.product(
        TYPES, KINDS, range(8, 289, 8), ("", "f32", "tf32", "bf16", "f16")
    ):
        q = np.zeros((4, 2 * dim), dtype)
        for window, sinks in ((0, None), (128, np.zeros(2, np.float32))):
            args = AttendArgs(
                BATCH, q, 2, layer(kind, dim), window, 64, act_of(2 * dim, dtype), sinks=sinks, compute=compute
            )
            if not accepted("attend", args):
                continue
            for asked.deterministic in (False, True):
                (op,) = build_attend(args, asked)
                for lane in op.lanes:
                    found |= {lane.shape.kernel, lane.shape.merge_kernel}
    assert found == {kernel for kernel in registered if kernel.header == "attend.cuh"}


def test_all_stores_that_are_not_refused_are_registered(asked: Asked, registered: set[Kernel]) -> None:
    found: set[Kernel] = set()
    for dtype, kind, dim, block in itertools.product(TYPES, KINDS, range(8, 289, 8), (8, 16, 512)):
        steering = KeySteering(np.zeros((1, dim // 2), np.int32), np.zeros((1, 1), np.float32))
        q, norm = np.zeros((4, dim), dtype), np.zeros(dim, np.float32)
        for steered, normed in itertools.product((None, steering), (None, norm)):
            args = RopeStoreArgs(
                BATCH, q, q, q, normed, normed, 1e-6, None, None, 1, 1.0, layer(kind, dim, block, steered)
            )
            if accepted("rope_store", args):
                found |= kernels_of("rope_store", args)
    assert found == {kernel for kernel in registered if kernel.header == "rope_store.cuh"}


def test_all_that_is_done_to_rows_is_registered(asked: Asked, registered: set[Kernel]) -> None:
    for dtype, width in itertools.product(TYPES, (64, 576, 2048, 2304, 4096, 5120, 8192, 16384)):
        x, weight = np.zeros((4, width), dtype), np.zeros(width, np.float32)
        table = PackedWeight(WeightFormat("f32"), 16, width, np.zeros(64 * width, np.uint8))
        for op, args in (
            ("norm", NormArgs(BATCH, x, weight, 1e-6, act_of(width, dtype), False)),
            ("norm_add", NormAddArgs(BATCH, x, weight, 1e-6, x)),
            ("embed", EmbedArgs(BATCH, table, x)),
            *(("act_mul", ActMulArgs(BATCH, x, x, name, act_of(width, dtype))) for name in ACTIVATION),
        ):
            if accepted(op, args):
                assert kernels_of(op, args) <= registered, (op, dtype, width)


def test_all_linear_layers_and_experts_are_registered(asked: Asked, registered: set[Kernel]) -> None:
    found: set[Kernel] = set()
    for dtype, weight, inputs, add in itertools.product(TYPES, FORMATS, (WHOLE, 40960), (False, True)):
        packed = dataclasses.replace(packed_weight(weight, 64, inputs), order=np.zeros(inputs, np.int32))
        args = LinearArgs(BATCH, act_of(inputs, dtype), packed, None, np.zeros((4, 64), dtype), add, False)
        for asked.deterministic in (False, True):
            if accepted("linear", args):
                op = LinearOp(args, register._layer(args), asked, 16, 0, 16)
                found |= {call.kernel for rows in ROWS for call in op._calls(rows)}
    for dtype, weight, score in itertools.product(TYPES, FORMATS, ("softmax", "sigmoid")):
        router, gate, down = (packed_weight(weight, n, k) for n, k in ((8, 256), (384, 256), (256, 384)))
        act, out = act_of(256, dtype), np.zeros((4, 256), dtype)
        many = (8 * (gate,), 8 * (gate,), 8 * (down,))
        experts = ExpertsArgs(BATCH, act, router, None, *many, 2, score, True, 1.0, "silu", out)
        for asked.deterministic in (False, True):
            if accepted("experts", experts):
                mixture = ExpertsOp(experts, asked, *_layers(experts), (16, 16, 16), 0)
                found |= {call.kernel for rows in ROWS for call in mixture._calls(rows)}
    assert found - registered == set()
    headers = {kernel.header for kernel in found}
    assert {kernel for kernel in registered if kernel.header in headers} - found == set()


def packed_weight(format: WeightFormat, n: int, k: int) -> PackedWeight:
    """Without its bytes; one group per output where `format` has WHOLE."""
    whole = dataclasses.replace(format, group=k) if format.group == WHOLE else format
    return PackedWeight(whole, n, k, np.zeros(0, np.uint8))


def kernels_of(op: str, args: object) -> set[Kernel]:
    found: set[Kernel] = set()
    for bound in registry.bind(op, args, device="cuda"):  # type: ignore[call-overload]
        assert isinstance(bound, StepOp)
        found |= {call.kernel for rows in (1, 4) for call in bound.calls(rows)}
    return found
