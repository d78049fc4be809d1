"""Experts and adapters on the emulator, every access checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from llmctl.kernels import registry
from llmctl.kernels.cpu.pack import pack as cpu_pack
from llmctl.kernels.cuda import linear_tiles as tiles
from llmctl.kernels.cuda import moe, register
from llmctl.kernels.cuda.call import Call
from llmctl.kernels.cuda.emulate import Emulation, build
from llmctl.kernels.cuda.emulated_machine import EmulatedMachine
from llmctl.kernels.cuda.linear import Addresses, Linear, gather_call, mma_kernel, reduce_kernel
from llmctl.kernels.cuda.lora import Lora, LoraAddresses, lora_calls
from llmctl.kernels.cuda.moe import Routing
from llmctl.kernels.cuda.pack import pack
from llmctl.kernels.formats import WeightFormat
from llmctl.kernels.ops import ROWS, ExpertsArgs, PackedWeight, make_act, make_batch

from .linear_worlds import LIMITS, ended, exact, random_weight, stored

TILE = tiles.TILES[0]
SOFTMAX = Routing("bf16", 40, 3)
SIGMOID = Routing("f16", 5, 2, "sigmoid", normalize=False, scale=2.5)
INT4 = WeightFormat("int4", 32, "int")
UP = Linear("bf16", INT4, 48, 64, "silu")
DOWN = Linear("bf16", INT4, 40, 96, "store")
LORA = Lora("f16", 16, 34, 66, 34)


@pytest.fixture(scope="module")
def experts(builds: Path) -> Emulation:
    kernels = [
        *(moe.route_kernel(routing) for routing in (SOFTMAX, SIGMOID)),
        moe.group_kernel(TILE.rows),
        moe.combine_kernel("bf16", add=True),
        *(mma_kernel(layer, TILE, grouped=True) for layer in (UP, DOWN)),
        reduce_kernel(DOWN),
        *LORA.kernels,
        gather_call("bf16", 1, 2, out=0, x=0, order=0).kernel,
    ]
    return build(kernels, "checked", builds)


@pytest.fixture
def run(experts: Emulation) -> Iterator:
    """Launches calls on arrays by name, those whose name begins with `in_` read-only; no report may come of it."""

    def launch(calls: Sequence[Call], **arrays: np.ndarray) -> None:
        for name, array in arrays.items():
            given = name.startswith("in_")
            experts.register(array.ctypes.data, array.nbytes, name, written=given or name == "y", read_only=given)
        experts.order("random", seed=11)
        for call in calls:
            assert experts.launch(call.kernel, call.grid, call.threads, call.shared_bytes, call.arguments)
        assert experts.reports() == ()

    yield launch
    experts.order("ascending")
    experts.forget()


def expected_routes(routing: Routing, logits: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if routing.score == "softmax":
        scores = np.exp(logits - logits.max(axis=1, keepdims=True))
        scores /= scores.sum(axis=1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-logits))
    ids = np.argsort(-(scores + bias), axis=1, kind="stable")[:, : routing.choices]
    weights = np.take_along_axis(scores, ids, axis=1)
    if routing.normalize:
        weights /= weights.sum(axis=1, keepdims=True)
    return ids, weights * routing.scale


@pytest.mark.parametrize("routing", [SOFTMAX, SIGMOID], ids=lambda routing: routing.score)
def test_a_token_goes_to_its_best_experts(run, routing: Routing) -> None:
    rng = np.random.default_rng(4)
    logits = stored(rng.standard_normal((9, routing.experts)), routing.dtype)
    bias = rng.uniform(-0.1, 0.1, routing.experts).astype(np.float32)
    ids, weights = np.zeros((9, routing.choices), np.int32), np.zeros((9, routing.choices), np.float32)
    count = np.array([7], np.int32)
    at = {"ids": ids.ctypes.data, "weights": weights.ctypes.data, "logits": logits.ctypes.data}
    run(
        [moe.route_call(routing, 9, **at, bias=bias.ctypes.data, count=count.ctypes.data)],
        ids=ids,
        weights=weights,
        in_logits=logits,
        in_bias=bias,
        in_count=count,
    )
    expected_ids, expected = expected_routes(routing, exact(logits, routing.dtype), bias.astype(np.float64))
    assert np.array_equal(ids[:7], expected_ids[:7]) and not ids[7:].any(), "there are 7 tokens and room for 9"
    assert np.abs(weights[:7] - expected[:7]).max() <= 2e-6


def test_equal_scores_go_to_lower_ids_and_nan_to_experts_that_exist(run) -> None:
    logits = stored(np.array([[0.0] * 5, [np.nan] * 5, [-np.inf, 1, 1, np.inf, 0]]), "f16")
    ids, weights = np.zeros((3, 2), np.int32), np.zeros((3, 2), np.float32)
    at = {"ids": ids.ctypes.data, "weights": weights.ctypes.data, "logits": logits.ctypes.data}
    count = np.array([3], np.int32)
    run(
        [moe.route_call(SIGMOID, 3, **at, count=count.ctypes.data)],
        ids=ids, weights=weights, in_logits=logits, in_count=count,
    )  # fmt: skip
    assert ids.tolist() == [[0, 1], [0, 1], [3, 1]]


@pytest.mark.parametrize("tokens", [1, 30])
def test_rows_are_sorted_by_expert(run, tokens: int) -> None:
    ids = np.random.default_rng(tokens).integers(0, 7, (tokens, 3)).astype(np.int32)
    room = moe.max_tiles(SOFTMAX, tokens + 3, TILE.rows)
    rows, experts, count = np.zeros((room, TILE.rows), np.int32), np.zeros(room, np.int32), np.array([tokens], np.int32)
    at = {"row_ids": rows.ctypes.data, "tile_expert": experts.ctypes.data, "ids": ids.ctypes.data}
    run(
        [moe.group_call(SOFTMAX, tokens + 3, TILE.rows, **at, count=count.ctypes.data)],
        rows=rows, experts=experts, in_ids=ids, in_count=count,
    )  # fmt: skip
    used = [(int(e), [int(r) for r in row if r >= 0]) for e, row in zip(experts, rows, strict=True) if e >= 0]
    expected = []
    for expert in range(7):
        pairs = [int(p) for p in np.flatnonzero(ids.reshape(-1) == expert)]
        expected += [(expert, pairs[i : i + TILE.rows]) for i in range(0, len(pairs), TILE.rows)]
    assert used == expected


def test_experts_compute_what_each_alone_would(run) -> None:
    rng, tokens, routing = np.random.default_rng(2), 13, Routing("bf16", 4, 2)
    up, down = ([random_weight(INT4, layer.outputs, layer.inputs, rng) for _ in range(4)] for layer in (UP, DOWN))
    packed = [np.concatenate([pack(INT4, w.data, w.scales, w.zeros) for w in group]) for group in (up, down)]
    ids = rng.integers(0, 4, (tokens, 2)).astype(np.int32)
    weights = rng.uniform(0, 1, (tokens, 2)).astype(np.float32)
    x, middle = (stored(rng.standard_normal((n, k)), "bf16") for n, k in ((tokens, UP.inputs), (26, DOWN.inputs)))
    residual = stored(rng.standard_normal((tokens, DOWN.width)), "bf16")
    room = moe.max_tiles(routing, tokens, TILE.rows)
    rows, of_tile, count = np.zeros((room, TILE.rows), np.int32), np.zeros(room, np.int32), np.array([13], np.int32)
    grouped = {"row_ids": rows.ctypes.data, "tile_expert": of_tile.ctypes.data}
    first, second = np.zeros((26, UP.width), np.uint16), np.zeros((26, DOWN.width), np.uint16)
    sums, out = np.zeros((2, 26, 48), np.float32), np.zeros((tokens, DOWN.width), np.uint16)
    calls = [
        moe.group_call(routing, tokens, TILE.rows, **grouped, ids=ids.ctypes.data, count=count.ctypes.data),
        *moe.experts_calls(
            UP, routing, tokens, Addresses(first.ctypes.data, x.ctypes.data, packed[0].ctypes.data), TILE.rows,
            **grouped, row_divisor=2, steps_per_split=1,
        ),
        *moe.experts_calls(
            DOWN, routing, tokens,
            Addresses(second.ctypes.data, middle.ctypes.data, packed[1].ctypes.data, sums=sums.ctypes.data), TILE.rows,
            **grouped, row_divisor=1, splits=2, steps_per_split=1,
        ),
        moe.combine_call(
            "bf16", tokens, 2, DOWN.width, out=out.ctypes.data, y=second.ctypes.data, weights=weights.ctypes.data,
            count=count.ctypes.data, residual=residual.ctypes.data,
        ),
    ]  # fmt: skip
    run(
        calls, in_count=count, in_up=packed[0], in_down=packed[1], in_ids=ids, in_weights=weights, in_x=x,
        in_middle=middle, in_residual=residual, rows=rows, of_tile=of_tile, first=first, second=second, sums=sums,
        out=out,
    )  # fmt: skip
    chosen = ids.reshape(-1)
    for pair in range(26):
        row = exact(x[pair // 2], "bf16")[None]
        expected = ended(UP, row @ up[chosen[pair]].values.T, None)
        assert np.abs(exact(first[pair], "bf16") - expected).max() <= LIMITS["bf16"] * max(1, np.abs(expected).max())
        row = exact(middle[pair], "bf16")
        size = (np.abs(down[chosen[pair]].values) @ np.abs(row)).max()
        error = np.abs(exact(second[pair], "bf16") - down[chosen[pair]].values @ row).max()
        assert error <= LIMITS["bf16"] * size
    parts = exact(second, "bf16").reshape(tokens, 2, -1) * weights[:, :, None]
    expected = parts.sum(axis=1) + exact(residual, "bf16")
    assert np.abs(exact(out, "bf16") - expected).max() <= LIMITS["bf16"] * np.abs(parts).sum(axis=1).max() + 2**-8 * 4


@pytest.mark.parametrize(("format", "rows"), [(WeightFormat("f32"), 5), (INT4, 40)], ids=["f32", "int4"])
def test_the_op_computes_in_float32_what_the_reference_does(builds: Path, format: WeightFormat, rows: int) -> None:
    rng, hidden, ffn, experts = np.random.default_rng(6), 64, 32, 6
    batch = make_batch(48, 1, 1, ())
    batch.counts[ROWS] = rows
    act = make_act(hidden, 48, 1, (WeightFormat("f32"),))
    act.values[:48] = rng.standard_normal((48, hidden))
    gate, up = (tuple(packed_weight(format, ffn, hidden, rng) for _ in range(experts)) for _ in range(2))
    down = tuple(packed_weight(format, hidden, ffn, rng) for _ in range(experts))
    router, bias = packed_weight(WeightFormat("f32"), experts, hidden, rng), rng.uniform(-0.1, 0.1, experts)
    before, found = rng.standard_normal((48, hidden)).astype(np.float32), []
    register.use(EmulatedMachine(builds, mode="checked"))
    for device, kernels in (("cuda", "auto"), ("cpu", "reference")):
        args = ExpertsArgs(
            batch, act, router, bias.astype(np.float32), gate, up, down, 3, "softmax", True, 1.5, "silu", before.copy()
        )  # fmt: skip
        for op in registry.bind("experts", args, device=device, kernels=kernels):
            op.run()
        found.append(args.out)
    register.use(None)
    assert np.array_equal(found[0][rows:], before[rows:])
    assert np.abs(found[0] - found[1]).max() <= 3e-6 * np.abs(found[1]).max()


def packed_weight(format: WeightFormat, n: int, k: int, rng: np.random.Generator) -> PackedWeight:
    weight = random_weight(format, n, k, rng)
    return PackedWeight(format, n, k, cpu_pack(format, weight.data, weight.scales, weight.zeros))


def test_each_row_gets_its_own_adapter_and_rows_without_stay(run) -> None:
    rng, slots = np.random.default_rng(9), np.array([1, -1, 0, 1], np.int32)
    x, y = (stored(rng.standard_normal((4, n)), "f16") for n in (LORA.inputs, LORA.width))
    a = stored(rng.standard_normal((2, LORA.rank, LORA.inputs)) / 8, "f16")
    b = stored(rng.standard_normal((2, LORA.outputs, LORA.rank)) / 4, "f16")
    scales, low, before = np.array([0.5, 2], np.float32), np.zeros((4, LORA.rank), np.float32), y.copy()
    at = LoraAddresses(*(array.ctypes.data for array in (y, x, low, a, b, scales, slots)))
    run(lora_calls(LORA, 4, at), y=y, in_x=x, low=low, in_a=a, in_b=b, in_scales=scales, in_slots=slots)
    for row, slot in enumerate(slots):
        expected, size = before[row].astype(np.float64), np.abs(before[row].astype(np.float64)).max()
        if slot >= 0:
            a64, b64, x64 = (array.astype(np.float64) for array in (a[slot], b[slot], x[row]))
            expected = expected + scales[slot] * (b64 @ (a64 @ x64))
            size += scales[slot] * (np.abs(b64) @ (np.abs(a64) @ np.abs(x64))).max()
        assert np.abs(y[row] - expected).max() <= LIMITS["f16"] * size


def test_inputs_are_gathered_in_the_order_of_a_weight(run) -> None:
    rng = np.random.default_rng(1)
    x, order = stored(rng.standard_normal((3, 600)), "bf16"), rng.permutation(600).astype(np.int32)
    out = np.zeros_like(x)
    call = gather_call("bf16", 3, 600, out=out.ctypes.data, x=x.ctypes.data, order=order.ctypes.data)
    run([call], out=out, in_x=x, in_order=order)
    assert np.array_equal(out, x[:, order])
