from __future__ import annotations

import math
import weakref

import numpy as np
import pytest
import torch

from llmctl.kernels.errors import CapacityError, CheckpointError
from llmctl.quant import calibrate
from llmctl.quant.calibrate import Activations, QuantizedBlock, embed, quantize_blocks
from llmctl.quant.scheme import Scheme

from .blocks import FFN, WIDTH, TinyBlock, no_attention

BLOCKS = 3


def embedded(limit: int = 1 << 30) -> Activations:
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 40, (6, 20), generator=generator)
    return embed(tokens, torch.randn(40, WIDTH, generator=generator), limit)


def walk(scheme: Scheme, **options: object) -> list[QuantizedBlock]:
    activations = options.pop("activations", embedded())
    format = scheme.format([WIDTH, FFN])
    return list(quantize_blocks(TinyBlock, BLOCKS, scheme, format, activations, no_attention, **options))


def rebuilt(index: int, block: QuantizedBlock) -> TinyBlock:
    module = TinyBlock(index)
    state = {**{f"{n}.weight": torch.from_numpy(w.dequantize()) for n, w in block.linears.items()}, **block.rest}
    module.load_state_dict(state)
    return module


def run(blocks: list[TinyBlock]) -> torch.Tensor:
    x = next(embedded().batches())
    for block in blocks:
        x = block(x, torch.arange(x.shape[1]), no_attention)
    return x


def test_awq_walk_is_closer_to_the_model_than_rounding() -> None:
    exact = run([TinyBlock(i) for i in range(BLOCKS)])
    errors = {}
    for method in ("rtn", "awq"):
        blocks = walk(Scheme(method, group_size=32))
        assert all(set(block.linears) == {"gate", "up", "down"} for block in blocks)
        assert all(set(block.rest) == {"norm.weight", "up.bias"} for block in blocks)
        out = run([rebuilt(i, block) for i, block in enumerate(blocks)])
        errors[method] = float((out - exact).square().mean())
    assert errors["awq"] < 0.6 * errors["rtn"]


def test_reports_say_what_the_outputs_lost() -> None:
    blocks = walk(Scheme("awq", group_size=32))
    assert [report.module for report in blocks[0].reports] == ["gate", "up", "down"]
    assert all(report.method == "awq" and 0 < report.error < 0.02 for block in blocks for report in block.reports)


def test_later_blocks_see_the_outputs_of_quantized_blocks_unless_told_otherwise() -> None:
    scheme = Scheme("awq", group_size=32)
    activations = embedded()
    blocks = walk(scheme, activations=activations)
    expected = run([rebuilt(i, block) for i, block in enumerate(blocks[:-1])])
    torch.testing.assert_close(next(activations.batches()), expected)
    exact = embedded()
    walk(scheme, activations=exact, exact_inputs=True)
    torch.testing.assert_close(next(exact.batches()), run([TinyBlock(i) for i in range(BLOCKS)]))


def test_activations_on_disk_give_the_same_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_TOKENS_AT_ONCE", 40)
    scheme = Scheme("awq", group_size=32)
    in_memory, on_disk = walk(scheme), walk(scheme, activations=embedded(limit=0))
    for a, b in zip(in_memory, on_disk):
        for name in a.linears:
            np.testing.assert_array_equal(a.linears[name].data, b.linears[name].data)


def test_activations_that_do_not_fit_on_the_disk_are_refused_before_the_walk() -> None:
    with pytest.raises(CapacityError, match="GiB of activations"):
        Activations(1 << 20, 1 << 20, 1 << 16, memory_limit=0)


def test_inputs_that_are_not_finite_fall_back_to_rounding_with_a_log_line(caplog: pytest.LogCaptureFixture) -> None:
    activations = embedded()
    next(activations.batches())[0, 0, 0] = torch.nan
    blocks = walk(Scheme("awq", group_size=32), activations=activations)
    report = blocks[0].reports[0]
    assert report.method == "rtn" and math.isnan(report.error)
    assert "layer 0: the inputs of gate, up are not finite" in caplog.text
    assert all(np.isfinite(w.dequantize()).all() for block in blocks for w in block.linears.values())


def test_weights_that_are_not_finite_are_an_error_that_names_them() -> None:
    def make(index: int) -> TinyBlock:
        block = TinyBlock(index)
        if index == 1:
            block.up.weight[3, 4] = torch.inf
        return block

    scheme = Scheme("rtn", group_size=32)
    with pytest.raises(CheckpointError, match=r"`up.weight` of layer 1"):
        list(quantize_blocks(make, BLOCKS, scheme, scheme.format([WIDTH, FFN]), None, no_attention))


def test_one_block_is_alive_at_a_time_and_progress_is_told() -> None:
    alive: list[weakref.ref[TinyBlock]] = []
    told = []

    def make(index: int) -> TinyBlock:
        assert all(ref() is None for ref in alive)
        block = TinyBlock(index)
        alive.append(weakref.ref(block))
        return block

    scheme = Scheme("awq", group_size=32)
    format = scheme.format([WIDTH, FFN])
    progress = lambda description, done, total: told.append((done, total))  # noqa: E731
    for _ in quantize_blocks(make, BLOCKS, scheme, format, embedded(), no_attention, progress=progress):
        pass
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_an_ignored_linear_keeps_its_function_and_is_not_rounded() -> None:
    ignored = [(0, "down"), (1, "gate"), (1, "up"), (1, "down"), (2, "gate")]
    blocks = walk(Scheme("awq", group_size=32), ignored=ignored)
    assert [set(block.linears) for block in blocks] == [{"gate", "up"}, set(), {"up", "down"}]
    assert "gate.weight" in blocks[2].rest and len(blocks[2].reports) == 2
    untouched = TinyBlock(1)
    assert all(torch.equal(tensor, untouched.get_parameter(name)) for name, tensor in blocks[1].rest.items())
    exact, ours = TinyBlock(2), rebuilt(2, blocks[2])
    x = next(embedded().batches())
    assert (ours.gate(ours.norm(x)) - exact.gate(exact.norm(x))).abs().max() < 2e-3


def test_rounding_needs_no_calibration_text() -> None:
    blocks = walk(Scheme("rtn", group_size=-1, symmetric=True), activations=None)
    assert blocks[0].linears["gate"].format.name == f"int4g{WIDTH}" and blocks[0].linears["down"].format.group == FFN
