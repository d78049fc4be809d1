from __future__ import annotations

import numpy as np
import pytest
import torch

from llmctl.kernels.formats import WeightFormat
from llmctl.quant.observe import InputObserver, InputStats, output_error
from llmctl.quant.solve import awq, rtn

FORMATS = [WeightFormat("int4", 32, "int"), WeightFormat("int4", 32)]


def inputs(k: int = 64, rows: int = 400, seed: int = 0) -> torch.Tensor:
    """Correlated inputs, a few of them much larger than the others, as in real models."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(k, k, generator=generator) * 0.3 + torch.eye(k)
    x = torch.randn(rows, k, generator=generator) @ mixing
    x[:, ::17] *= 12
    return x


def observed(x: torch.Tensor) -> InputStats:
    observer = InputObserver(x.shape[1])
    observer.add(x)
    return observer.stats()


def weight(n: int, k: int = 64, seed: int = 3) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05


def error_of(exact: torch.Tensor, values: np.ndarray | torch.Tensor, stats: InputStats) -> float:
    return float(output_error(torch.as_tensor(values) - exact, stats).sum())


@pytest.mark.parametrize("format", FORMATS)
def test_scales_and_clipping_lose_less_than_rounding_to_nearest(format: WeightFormat) -> None:
    w, stats = weight(40), observed(inputs())
    baseline = error_of(w, rtn.quantize(w, format).dequantize(), stats)
    scales = awq.search_scales([w], stats, format)
    scaled = awq.scaled_stats(stats, scales)
    only_scaled = awq.quantize(w * scales, scaled, format, search_clip=False).dequantize() / scales.numpy()
    both = awq.quantize(w * scales, scaled, format).dequantize() / scales.numpy()
    assert error_of(w, both, stats) < error_of(w, only_scaled, stats) < 0.8 * baseline


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("format", FORMATS)
def test_search_is_never_worse_than_rounding_to_nearest_in_any_output(format: WeightFormat, seed: int) -> None:
    x = torch.randn(90, 64, generator=torch.Generator().manual_seed(seed))
    w, stats = weight(16, seed=seed), observed(x if seed % 2 else x.abs())
    plain = torch.as_tensor(rtn.quantize(w, format).dequantize())
    clipped = torch.as_tensor(awq.quantize(w, stats, format).dequantize())
    errors = [output_error(values - w, stats) for values in (plain, clipped)]
    assert (errors[1] <= errors[0] * 1.0001).all()
    scales = awq.search_scales([w], stats, format)
    scaled = torch.as_tensor(rtn.quantize(w * scales, format).dequantize()) / scales
    assert error_of(w, scaled, stats) <= error_of(w, plain, stats) * 1.0001


def test_the_error_that_is_minimised_is_that_of_the_outputs() -> None:
    x, w = inputs(), weight(8)
    stats = observed(x)
    values = torch.as_tensor(awq.quantize(w, stats, FORMATS[0]).dequantize())
    brute = (x @ (values - w).T).square().mean(0).sum()
    assert error_of(w, values, stats) == pytest.approx(float(brute), rel=1e-4)


def test_range_search_finds_what_trying_every_range_of_one_group_finds() -> None:
    x, w, format = inputs(32), weight(5, 32), FORMATS[0]
    w[:, 3] = 0.6  # an outlier on an input of little weight
    stats = observed(x)
    searched = awq.quantize(w, stats, format)
    steps = [1 - 0.05 * i for i in range(11)]
    low, high = w.amin(1, keepdim=True).clamp(max=0), w.amax(1, keepdim=True).clamp(min=0)
    best = torch.full((5,), torch.inf)
    for down in steps:
        for up in steps:
            scale = ((high * up - low * down) / 15).half().float()
            zero = torch.round(-low * down / scale).clamp(0, 15)
            values = ((torch.round(w / scale) + zero).clamp(0, 15) - zero) * scale
            best = torch.minimum(best, output_error(values - w, stats))
    found = output_error(torch.as_tensor(searched.dequantize()) - w, stats)
    assert (found <= best * 1.1).all()


def test_linears_of_very_different_size_all_count() -> None:
    stats = observed(inputs())
    small, large = weight(12, seed=5) * 1e-3, weight(12, seed=6) * 10
    scales = awq.search_scales([small, large], stats, FORMATS[0])
    for w in (small, large):
        plain = rtn.quantize(w, FORMATS[0]).dequantize()
        scaled = rtn.quantize(w * scales, FORMATS[0]).dequantize() / scales.numpy()
        assert error_of(w, scaled, stats) < error_of(w, plain, stats)


def test_heads_that_share_a_value_head_share_scales() -> None:
    scales = awq.search_scales([weight(20)], observed(inputs()), FORMATS[0], shared=(2, 16))
    by_head = scales.reshape(2, 2, 16)
    torch.testing.assert_close(by_head[:, 0], by_head[:, 1], rtol=0, atol=0)
    assert float(scales.max()) > 1.01


def test_dead_inputs_and_weights_leave_finite_scales() -> None:
    x, w = inputs(), weight(10)
    x[:, 5] = 0
    w[:, 9] = 0
    scales = awq.search_scales([w], observed(x), FORMATS[0])
    assert bool(torch.isfinite(scales).all()) and float(scales[5]) == float(scales[9]) == 1.0
    constant = awq.search_scales([w], observed(torch.zeros(3, 64)), FORMATS[0])
    assert bool((constant == 1).all())


def test_the_same_inputs_give_the_same_codes() -> None:
    w, stats = weight(20), observed(inputs())
    first, second = (awq.quantize(w, stats, FORMATS[0]) for _ in range(2))
    np.testing.assert_array_equal(first.data, second.data)
