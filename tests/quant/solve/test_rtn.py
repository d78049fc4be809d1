from __future__ import annotations

import numpy as np
import pytest
import torch

from llmctl.kernels.errors import CheckpointError
from llmctl.kernels.formats import WeightFormat
from llmctl.quant.solve.rtn import quantize

ASYMMETRIC, SYMMETRIC = WeightFormat("int4", 32, "int"), WeightFormat("int4", 32)


def weights(n: int = 12, k: int = 96, shift: float = 0.3) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(n, k) * torch.rand(n, 1) + shift


@pytest.mark.parametrize("format", [ASYMMETRIC, SYMMETRIC])
@pytest.mark.parametrize("search_clip", [False, True])
def test_every_weight_is_at_the_nearest_code_of_its_stored_grid(format: WeightFormat, search_clip: bool) -> None:
    weight = weights()
    tensor = quantize(weight, format, search_clip)
    zeros = 8 if tensor.zeros is None else tensor.zeros[:, :, None].astype(np.float32)
    grid = (np.arange(16, dtype=np.float32) - zeros) * tensor.scales[:, :, None].astype(np.float32)  # [n, groups, 16]
    exact = weight.numpy().reshape(12, 3, 32)
    least = np.abs(exact[..., None] - grid[:, :, None, :]).min(-1)
    taken = np.abs(tensor.dequantize().reshape(12, 3, 32) - exact)
    np.testing.assert_allclose(taken, least, atol=1e-6)


def test_without_clipping_no_weight_moves_by_more_than_about_half_a_step() -> None:
    weight = weights(shift=0)
    tensor = quantize(weight, ASYMMETRIC)
    moved = np.abs(tensor.dequantize() - weight.numpy()).reshape(12, 3, 32).max(-1)
    assert (moved <= tensor.scales.astype(np.float32) * 1.01).all()  # rounding the zero point can cost another half


def test_zero_stays_zero_and_groups_of_zeros_are_finite() -> None:
    weight = weights()
    weight[2, 32:64] = 0
    weight[5, 7] = 0
    for format in (ASYMMETRIC, SYMMETRIC):
        values = quantize(weight, format).dequantize()
        assert (values[2, 32:64] == 0).all() and values[5, 7] == 0 and np.isfinite(values).all()


@pytest.mark.parametrize("format", [ASYMMETRIC, SYMMETRIC])
def test_search_never_has_a_larger_squared_error(format: WeightFormat) -> None:
    weight = weights()
    weight[:, ::31] *= 6
    plain, searched = (quantize(weight, format, clip).dequantize() for clip in (False, True))
    errors = [np.square(v - weight.numpy()).reshape(12, 3, 32).sum(-1) for v in (plain, searched)]
    assert (errors[1] <= errors[0] * 1.00001).all() and errors[1].sum() < 0.97 * errors[0].sum()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e7])
def test_weights_that_no_scale_can_hold_are_an_error(value: float) -> None:
    weight = weights()
    weight[3, 3] = value
    with pytest.raises(CheckpointError):
        quantize(weight, ASYMMETRIC)
