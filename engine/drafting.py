"""The draft model of an engine, from its name to a Proposer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from .config import EngineConfig
from .load.model import Model
from .plan import Plan
from .runner.draft_model import DraftModel
from .runner.runner import Runner

if TYPE_CHECKING:
    from .runner.cuda_runner import CudaRunner

log = logging.getLogger(__name__)

MOST_COST = 0.5  # what guesses are taken to cost at most, so that a model that cannot gain still does as it is told


def draft_config(config: EngineConfig) -> EngineConfig:
    """The config whose model is the draft model; its weights are loaded as they are stored, or as `dtype` says."""
    return msgspec.structs.replace(config, model=config.speculative_config.model, rope_scaling=None)


def make_proposer(draft: Model, target: Model, plan: Plan, runner: Runner | CudaRunner) -> DraftModel:
    """The draft model, ready to guess for a target of the same vocabulary, on the device of its runner.

    A step of one row takes as long as reading the weights, so their sizes say what a guess costs.
    """
    assert plan.draft is not None
    ratio = draft.weight_bytes / target.weight_bytes
    if ratio > MOST_COST:
        log.warning(
            "the draft model %s has %.0f %% of the weights of %s: guessing takes about as long as it saves",
            draft.name, 100 * ratio, target.name,
        )  # fmt: skip
    return DraftModel(
        _runner_beside(runner, draft, plan.draft),
        cost=min(ratio, MOST_COST),
        max_rows=plan.draft.max_num_batched_tokens,
        max_tokens=min(plan.max_model_len, draft.spec.context_length),
        vocab_size=target.spec.vocab_size,
    )


def _runner_beside(runner: Runner | CudaRunner, draft: Model, plan: Plan) -> Runner | CudaRunner:
    if not plan.on_gpu:
        return Runner(draft, plan)
    from .runner.cuda_runner import CudaRunner  # nothing of it is needed on a CPU

    assert isinstance(runner, CudaRunner), runner
    return CudaRunner(draft, plan, runner.gpu, owned=False)
