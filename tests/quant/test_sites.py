from __future__ import annotations

import torch
from torch import nn

from llmctl.quant.sites import fold_scales


def test_folding_into_a_norm_keeps_the_function_and_leaves_float16_values() -> None:
    torch.manual_seed(0)
    norm, linear = nn.RMSNorm(48), nn.Linear(48, 20)
    norm.weight.data = torch.randn(48)
    x, scales = torch.randn(5, 48), torch.rand(48) * 4 + 0.1
    before = linear(norm(x))
    used = fold_scales(norm, [linear], scales, None)
    torch.testing.assert_close(linear(norm(x)), before, rtol=1e-5, atol=1e-5)
    assert bool((norm.weight.half().float() == norm.weight).all())
    torch.testing.assert_close(used, scales, rtol=1e-3, atol=0)


def test_folding_into_a_norm_that_adds_something_to_its_weight() -> None:
    torch.manual_seed(0)
    norm, linear = nn.RMSNorm(48), nn.Linear(48, 20)
    norm.weight.data = torch.randn(48) - 1

    def through(x: torch.Tensor) -> torch.Tensor:
        return linear(nn.functional.rms_norm(x, (48,)) * (1 + norm.weight))

    x, scales = torch.randn(5, 48), torch.rand(48) * 4 + 0.1
    before = through(x)
    fold_scales(norm, [linear], scales, None, offset=1.0)
    torch.testing.assert_close(through(x), before, rtol=1e-4, atol=1e-5)
    assert bool((norm.weight.half().float() == norm.weight).all())


def test_folding_into_a_linear_keeps_the_function_and_its_bias() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(16, 48), nn.Linear(48, 20)
    x, scales = torch.randn(5, 16), torch.rand(48) * 4 + 0.1
    before = second(first(x))
    fold_scales(first, [second], scales, None)
    torch.testing.assert_close(second(first(x)), before, rtol=1e-5, atol=1e-5)


def test_folding_into_value_heads_that_query_heads_share() -> None:
    torch.manual_seed(0)
    heads, kv_heads, head_dim = 6, 2, 4
    value, out = nn.Linear(16, kv_heads * head_dim), nn.Linear(heads * head_dim, 20)

    def through(x: torch.Tensor) -> torch.Tensor:
        return out(
            value(x).reshape(-1, kv_heads, 1, head_dim).expand(-1, -1, heads // kv_heads, -1).reshape(len(x), -1)
        )

    x = torch.randn(5, 16)
    before = through(x)
    scales = (torch.rand(kv_heads, 1, head_dim) + 0.5).expand(-1, heads // kv_heads, -1).reshape(-1)
    fold_scales(value, [out], scales, (heads // kv_heads, head_dim))
    torch.testing.assert_close(through(x), before, rtol=1e-5, atol=1e-5)


def test_a_norm_weight_of_zero_stays_zero() -> None:
    norm, linear = nn.RMSNorm(4), nn.Linear(4, 2)
    norm.weight.data = torch.tensor([0.0, 1.0, 2.0, -3.0])
    fold_scales(norm, [linear], torch.tensor([2.0, 2.0, 4.0, 3.0]), None)
    assert norm.weight.tolist() == [0.0, 0.5, 0.5, -1.0] and bool(torch.isfinite(linear.weight).all())
