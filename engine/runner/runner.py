"""Runs Steps on one device: per-slot state, the batch, the recorded program, the sampler.

The runner is driven by Steps alone. The same sequence of encoded Steps gives the same results here, in another process
or from a recording.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from ...kernels.ops import F32Array, make_batch
from ..engine import Pending, StepRunner
from ..load.model import Model
from ..models.decoder import Limits
from ..plan import Plan
from ..sample.sampler import Sampler
from ..sample.slots import make_slots
from ..schedule.step import Step, StepResult
from .cache import allocate, block_shape
from .inputs import apply_deltas, fill_batch
from .kv_fit import fit_cache
from .outliers import widen_outliers
from .shelves import shelves_of
from .tier_store import TierStore, open_tier


class Runner:
    """A model, its KV arenas and the state of every slot."""

    def __init__(self, model: Model, plan: Plan) -> None:
        spec, model = model.spec, widen_outliers(model, plan)
        self.groups = tuple(
            allocate(index, group, block_shape(spec, group, plan.block_size, plan.kv_formats), plan.kernels)
            for index, group in enumerate(plan.groups)
        )
        max_blocks = -(-plan.max_model_len // plan.block_size)
        self._slots = make_slots(plan.max_num_seqs, plan.max_model_len, (max_blocks,) * len(self.groups))
        self._batch = make_batch(
            plan.max_num_batched_tokens, plan.max_num_seqs, plan.max_logit_rows, self._slots.tables
        )
        layers = {layer: kv for cache in self.groups for layer, kv in cache.layers.items()}
        self.decoder = model.build(
            self._batch,
            fit_cache(layers, model, plan),
            Limits(
                plan.max_num_batched_tokens,
                plan.max_logit_rows,
                plan.max_model_len,
                plan.threads,
                plan.attention_compute,
            ),
            plan.kernels,
        )
        self._sampler = Sampler(self._batch, self.decoder.logits, spec.vocab_size, self._slots, plan.kernels)
        self._tier = (
            open_tier(Path(plan.tier_folder), shelves_of(self.groups, plan.tier_blocks), plan.block_size)
            if plan.tier_blocks
            else None
        )
        self._worker = ThreadPoolExecutor(1, "llmctl-runner") if plan.async_depth > 1 else None

    def submit(self, step: Step) -> Pending:
        """Start the step; steps run one after the other in the order of submission."""
        if self._worker is not None:
            return self._worker.submit(self.execute, step)
        done: Future[StepResult] = Future()
        done.set_result(self.execute(step))
        return done

    def execute(self, step: Step) -> StepResult:
        """Apply the step's deltas, compute its chunks, sample."""
        if self._tier is not None:
            return self._execute_with_tier(step, self._tier)
        self._compute(step, sampled=True)
        return StepResult(step.index, self._sampler.sample(step.chunks))

    def forward(self, step: Step) -> F32Array:
        """Apply the step's deltas and compute its chunks, without sampling.

        The logits [rows, vocabulary padded to panels] of the positions that get some, valid until the next step.
        """
        self._compute(step, sampled=False)
        return self.decoder.logits[: sum(chunk.count - chunk.logits_from for chunk in step.chunks)]

    def _compute(self, step: Step, *, sampled: bool) -> None:
        apply_deltas(self._slots, step)
        for copy in step.copies:
            self.groups[copy.group].copy(copy.source, copy.target, copy.tokens)
        if step.chunks:
            fill_batch(self._batch, self._slots, step.chunks, sampled=sampled)
            self.decoder.program.replay()

    def close(self) -> None:
        """Wait for what was submitted, stop the worker thread and give tier 2's file back."""
        if self._worker is not None:
            self._worker.shutdown()
        if self._tier is not None:
            self._tier.close()

    def _execute_with_tier(self, step: Step, tier: TierStore) -> StepResult:
        """As `execute`, with the step's swaps before it and the time that both took.

        A block is swapped before the deltas are applied, which touch no block.
        """
        started = time.perf_counter_ns()
        failed = tier.move(step.swaps) if step.swaps else ()
        moved = time.perf_counter_ns()
        self._compute(step, sampled=True)
        chunks = self._sampler.sample(step.chunks) if step.chunks else ()
        ended = time.perf_counter_ns()
        return StepResult(step.index, chunks, failed, (moved - started) // 1000, (ended - moved) // 1000)


class RecordingRunner:
    """A runner that also hands every Step, encoded, to `sink` before it runs."""

    def __init__(self, runner: StepRunner, sink: Callable[[bytes], None]) -> None:
        self._runner, self._sink = runner, sink
        self._encoder = msgspec.msgpack.Encoder()

    def submit(self, step: Step) -> Pending:
        """Record and start the step."""
        self._sink(self._encoder.encode(step))
        return self._runner.submit(step)

    def close(self) -> None:
        """Close the runner that does the work."""
        self._runner.close()


def replay(runner: Runner, recording: list[bytes]) -> list[StepResult]:
    """The results of recorded Steps on this runner."""
    decoder = msgspec.msgpack.Decoder(Step)
    return [runner.execute(decoder.decode(step)) for step in recording]
