"""Golden logits, made once when a checkpoint is measured and compared whenever it is loaded.

Under the same plan they are the same bits, and a warning tells if they are not. Other kernels, another format of the KV
cache or of the weights round differently, which is told where it is more than rounding should do. Logits that are
another model's are an error.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.errors import CheckpointError
from ...kernels.ops import F32Array
from ..load.golden import Golden
from ..load.model import Model
from ..plan import Plan
from ..schedule.step import Admit, Chunk, SlotSampling, Step, TableDelta
from .runner import Runner

if TYPE_CHECKING:
    from .cuda_runner import CudaRunner

log = logging.getLogger(__name__)

TOP = 8
ROUNDING = 0.05  # of the largest golden logit
WRONG = 0.25  # of it: no rounding does that

_UNSAMPLED = SlotSampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, -1)


def make_golden(runner: Runner | CudaRunner, plan: Plan, tokens: tuple[int, ...], vocab_size: int) -> Golden:
    """The golden logits of these tokens. The runner must not have run anything."""
    logits = _logits(runner, plan, tokens, vocab_size)
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :TOP]
    return Golden(
        tokens=tokens,
        ids=tuple(map(tuple, ids.tolist())),
        logits=tuple(map(tuple, np.take_along_axis(logits, ids, 1).tolist())),
        fingerprint=plan.fingerprint,
    )


def check_golden(runner: Runner | CudaRunner, plan: Plan, model: Model, golden: Golden) -> None:
    """CheckpointError if the model gives other logits than `golden`; what may be rounding is logged.

    The runner must not have run anything.
    """
    vocab_size = model.spec.vocab_size
    if not all(0 <= token < vocab_size for token in (*golden.tokens, *sum(golden.ids, ()))):
        raise CheckpointError(
            f"the golden logits of `{model.name}` are of tokens beyond its vocabulary of {vocab_size}",
            "its quality card is another model's: remove it",
        )
    tokens = golden.tokens[: min(plan.max_model_len, plan.num_blocks * plan.block_size)]
    logits = _logits(runner, plan, tokens, vocab_size)
    expected = np.concatenate(golden.logits[: len(tokens)]).astype(np.float32)
    found = np.concatenate([row[list(ids)] for row, ids in zip(logits, golden.ids)])
    difference, largest = float(np.abs(found - expected).max()), float(np.abs(expected).max())
    said = f"differ by up to {difference:.3g} of {largest:.3g} from those in its quality card"
    if not difference <= WRONG * largest:
        raise CheckpointError(
            f"the logits of `{model.name}` {said}",
            "these are not the weights that were measured: check them with `llmctl models verify`, or quantize again",
        )
    if difference > ROUNDING * largest:
        log.warning("%s: the logits %s, more than other kernels should make", model.name, said)
    elif difference > 0 and golden.fingerprint == plan.fingerprint:
        log.warning("%s: the logits %s, though kernels, formats and weights are the same", model.name, said)
    else:
        log.info("%s: the logits %s", model.name, said)


def _logits(runner: Runner | CudaRunner, plan: Plan, tokens: tuple[int, ...], vocab_size: int) -> F32Array:
    """[tokens, vocabulary]: row i is about what follows tokens[: i + 1]. Slot 0 is used and freed again."""
    count, blocks = len(tokens), tuple(range(-(-len(tokens) // plan.block_size)))
    packed = np.array(tokens, "<i4").tobytes()
    tables = tuple(TableDelta(0, group, blocks) for group in range(len(runner.groups)))
    runner.forward(Step(0, admit=(Admit(0, packed, count, _UNSAMPLED),), tables=tables))
    rows = min(plan.max_num_batched_tokens, plan.max_logit_rows)
    parts = []
    for first in range(0, count, rows):
        chunk = Chunk(0, first, min(rows, count - first), 0)
        parts.append(runner.forward(Step(0, chunks=(chunk,)))[:, :vocab_size].copy())
    runner.forward(Step(0, drop=(0,)))
    return np.concatenate(parts)
