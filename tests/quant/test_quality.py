from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from llmctl.kernels.errors import CheckpointError, UsageError
from llmctl.quant.quality import compare, perplexity, windows

VOCAB = 11


def model(seed: int, noise: float = 0.0) -> Callable[[Sequence[int]], np.ndarray]:
    """A bigram model, and the same one with noise in its table."""
    table = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)) * 2
    table += np.random.default_rng(seed).normal(size=(VOCAB, VOCAB)) * noise
    return lambda tokens: table[list(tokens)].astype(np.float32)


TEXT = np.random.default_rng(1).integers(0, VOCAB, 700).tolist()


def torch_numbers(length: int, noisy: Callable[[Sequence[int]], np.ndarray]) -> tuple[float, float, float, float]:
    """Perplexity, mean and p99 KL and top-1 by torch's own functions."""
    losses, kls, same = [], [], []
    for window in windows(TEXT, length):
        p, q = (torch.log_softmax(torch.tensor(f(window)[:-1]).double(), -1) for f in (model(0), noisy))
        losses.append(torch.nn.functional.nll_loss(q, torch.tensor(window[1:]), reduction="none"))
        kls.append(torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1))
        same.append((p.argmax(-1) == q.argmax(-1)).double())
    kl = torch.cat(kls)
    p99 = float(torch.quantile(kl, 0.99))
    return math.exp(float(torch.cat(losses).mean())), float(kl.mean()), p99, float(torch.cat(same).mean())


@pytest.mark.parametrize("length", [2, 64, 300, 1000])
def test_numbers_are_those_of_torch(length: int) -> None:
    noisy = model(5, noise=0.3)
    found = compare(model(0), noisy, windows(TEXT, length))
    expected = torch_numbers(length, noisy)
    assert (found.model.perplexity, found.kl_mean, found.kl_p99, found.top1) == pytest.approx(expected, rel=1e-9)
    assert found.original == perplexity(model(0), windows(TEXT, length))
    assert found.model == perplexity(noisy, windows(TEXT, length))


def test_a_model_does_not_differ_from_itself() -> None:
    found = compare(model(0), model(0), windows(TEXT, 100))
    assert (found.kl_mean, found.kl_p99, found.top1, found.ratio_error) == (0, 0, 1, 0)
    assert found.model == found.original


def test_equal_logits_have_the_perplexity_of_the_vocabulary() -> None:
    found = perplexity(lambda tokens: np.zeros((len(tokens), VOCAB), np.float32), windows(TEXT, 64))
    assert found.perplexity == pytest.approx(VOCAB) and found.log_error == pytest.approx(0, abs=1e-12)


def test_windows_cover_the_text_and_limits_hold() -> None:
    assert [len(w) for w in windows(range(10), 4)] == [4, 4, 2]
    assert [len(w) for w in windows(range(9), 4)] == [4, 4]
    assert [list(w) for w in windows(range(9), 4, limit=1)] == [[0, 1, 2, 3]]


@pytest.mark.parametrize(("tokens", "length"), [(1, 64), (0, 64), (10, 1)])
def test_a_text_without_predictions_is_an_error(tokens: int, length: int) -> None:
    with pytest.raises(UsageError, match="nothing to predict"):
        windows(range(tokens), length)


def test_logits_that_are_not_finite_are_an_error() -> None:
    def broken(tokens: Sequence[int]) -> np.ndarray:
        logits = model(0)(tokens)
        logits[3, 2] = np.nan
        return logits

    with pytest.raises(CheckpointError, match="NaN"):
        perplexity(broken, windows(TEXT, 64))
