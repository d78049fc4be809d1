from __future__ import annotations

import torch

from llmctl.quant.observe import InputObserver, output_error


def test_the_moment_gives_the_mean_squared_error_of_the_outputs() -> None:
    torch.manual_seed(0)
    observer = InputObserver(24)
    batches = [torch.randn(3, 17, 24), torch.randn(5, 24) * 4 + 1]
    for batch in batches:
        observer.add(batch)
    stats = observer.stats()
    x = torch.cat([batch.reshape(-1, 24) for batch in batches])
    error = torch.randn(7, 24)
    assert stats.rows == len(x)
    torch.testing.assert_close(output_error(error, stats), (x @ error.T).square().mean(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stats.rms, x.square().mean(0).sqrt())


def test_stats_without_inputs_or_with_nan_are_not_usable() -> None:
    observer = InputObserver(4)
    assert not observer.stats().is_usable
    observer.add(torch.ones(2, 4, dtype=torch.bfloat16))
    assert observer.stats().is_usable
    observer.add(torch.tensor([[0.0, 1.0, float("nan"), 1.0]]))
    assert not observer.stats().is_usable
