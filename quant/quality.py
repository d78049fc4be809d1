"""How much a quantized model differs from the original: perplexity, KL divergence, agreement of the likeliest token.

Both models are callables from token ids to logits, so that the product's own kernels are what is measured. Nothing but
a window's logits of each is held at a time, and sums are in float64: two runs give the same digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..kernels.errors import CheckpointError, UsageError

F64Array = npt.NDArray[np.float64]
# token ids -> [len, vocab]: row i predicts token i + 1
Logits = Callable[[Sequence[int]], npt.NDArray[np.floating]]

_ROWS = 16  # rows of logits that are turned into float64 at a time: what stays in a cache is faster by a half


@dataclass(frozen=True, slots=True)
class Quality:
    """A model by itself: `perplexity` over `tokens` predicted tokens, and the standard error of its logarithm."""

    tokens: int
    perplexity: float
    log_error: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A model against the original on the same text.

    kl_mean, kl_p99   KL(original || model) per token in nats: mean and 99th percentile
    top1              how often both have the same likeliest token, 0..1
    ratio_error       standard error of log(perplexity / original's), from the differences token by token
    """

    original: Quality
    model: Quality
    kl_mean: float
    kl_p99: float
    top1: float
    ratio_error: float


def windows(tokens: Sequence[int], length: int, limit: int = 0) -> Iterator[Sequence[int]]:
    """The text cut into consecutive windows of `length` tokens, at most `limit` (0: all); a rest of one is left out.

    UsageError if there is nothing to predict.
    """
    if length < 2 or len(tokens) < 2:
        raise UsageError(
            f"a text of {len(tokens)} tokens in windows of {length} has nothing to predict", "use a longer text"
        )
    starts = range(0, len(tokens) - 1, length)
    return (tokens[start : start + length] for start in (starts[:limit] if limit else starts))


def perplexity(logits: Logits, texts: Iterable[Sequence[int]]) -> Quality:
    """The perplexity of a model on windows of text; the first token of each is context only."""
    losses = [_losses(logs, targets) for window in texts for targets, (logs,) in _parts(window, (logits,))]
    return _quality(np.concatenate(losses))


def compare(original: Logits, model: Logits, texts: Iterable[Sequence[int]]) -> Comparison:
    """Both models on the same windows of text, and how far apart they are."""
    before, after, kl, same = [], [], [], 0
    for window in texts:
        for targets, (p, q) in _parts(window, (original, model)):
            before.append(_losses(p, targets))
            after.append(_losses(q, targets))
            kl.append((p.exp() * (p - q)).sum(-1).numpy())
            same += int((p.argmax(-1) == q.argmax(-1)).sum())
    divergence = np.maximum(np.concatenate(kl), 0)
    losses = np.concatenate(before), np.concatenate(after)
    return Comparison(
        _quality(losses[0]),
        _quality(losses[1]),
        float(divergence.mean()),
        float(np.quantile(divergence, 0.99)),
        same / len(divergence),
        _standard_error(losses[1] - losses[0]),
    )


def _parts(
    window: Sequence[int], models: tuple[Logits, ...]
) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
    """Some of the window's next tokens, and each model's log probabilities where they are predicted."""
    targets = torch.tensor(window[1:])
    logits = [model(window) for model in models]
    for found in logits:
        assert found.shape[0] == len(window), (found.shape, len(window))
    for start in range(0, len(targets), _ROWS):
        stop = min(start + _ROWS, len(targets))
        yield targets[start:stop], tuple(_log_softmax(found[start:stop]) for found in logits)


def _log_softmax(logits: npt.NDArray[np.floating]) -> torch.Tensor:
    if not np.isfinite(logits).all():
        raise CheckpointError("the model's logits are NaN or infinite", "its weights are broken, or overflow")
    return torch.log_softmax(torch.from_numpy(logits).double(), -1)


def _losses(logs: torch.Tensor, targets: torch.Tensor) -> F64Array:
    found: F64Array = -logs.gather(1, targets[:, None])[:, 0].numpy()
    return found


def _quality(losses: F64Array) -> Quality:
    return Quality(len(losses), math.exp(float(losses.mean())), _standard_error(losses))


def _standard_error(values: F64Array) -> float:
    """Of the mean, with values taken as independent; NaN for a single one."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
