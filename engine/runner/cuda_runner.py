"""Runs Steps on a GPU, with the face of Runner.

`submit` launches a step and returns at once; its result is waited for when somebody asks. Each step sends all that it
needs by one copy, and what it sampled comes back by one. The GPU keeps the tokens of every slot and feeds itself, so
with two steps in flight the next one is scheduled, laid out and launched while this one runs. Only a step that samples
with penalties has to know the tokens before it, and waits for them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...kernels.cuda.gpu import Gpu
from ...kernels.cuda.register import use
from ...kernels.ops import LOGIT_ROWS, MAX_TOP, ROWS, F32Array, I32Array, U8Array, make_batch
from ...kernels.registry import CUDA
from ..gpu_sizes import graph_bytes
from ..load.model import Model
from ..models.decoder import Limits
from ..plan import Plan
from ..sample.sampler import Sampled, chunk_results
from ..sample.slots import make_slots
from ..schedule.step import Chunk, ChunkResult, Step, StepResult
from ..sizes import format_bytes
from .cache import allocate, block_shape
from .cuda_graphs import DecodeGraphs, bucket_sizes
from .cuda_program import make_program
from .cuda_rows import asked_rows, looks_back, make_lists
from .inputs import apply_deltas, fill_batch
from .kv_fit import fit_cache
from .pinned_tier import open_pinned_tier
from .shelves import shelves_of

log = logging.getLogger(__name__)


class CudaRunner:
    """A model, its KV arenas and the state of every slot on a GPU, which `close` gives back if it is `owned`."""

    def __init__(self, model: Model, plan: Plan, gpu: Gpu, *, owned: bool = True) -> None:
        spec = model.spec
        use(gpu)
        self.gpu, self._owned, self._vocab_size = gpu, owned, spec.vocab_size
        self.groups = tuple(
            allocate(index, group, block_shape(spec, group, plan.block_size, plan.kv_formats), CUDA)
            for index, group in enumerate(plan.groups)
        )
        max_blocks = -(-plan.max_model_len // plan.block_size)
        self._slots = make_slots(plan.max_num_seqs, plan.max_model_len, (max_blocks,) * len(self.groups))
        self._batch = make_batch(
            plan.max_num_batched_tokens, plan.max_num_seqs, plan.max_logit_rows, self._slots.tables
        )
        layers = {layer: kv for cache in self.groups for layer, kv in cache.layers.items()}
        limits = Limits(
            plan.max_num_batched_tokens, plan.max_logit_rows, plan.max_model_len, plan.threads,
            attention_compute=plan.attention_compute, activations=plan.activations,
        )  # fmt: skip
        self.decoder = model.build(self._batch, fit_cache(layers, model, plan), limits, CUDA)
        self._program = make_program(gpu, self.decoder, self._batch, self._slots, spec.vocab_size)
        self._lists = make_lists(plan.max_logit_rows)
        most = min(plan.max_num_seqs, plan.max_num_batched_tokens, plan.max_logit_rows)
        gpu.prepare(self._program.kernels(self._lists, bucket_sizes(plan.max_num_batched_tokens)))
        self._graphs = (
            None if plan.enforce_eager else DecodeGraphs(self._program, bucket_sizes(most), graph_bytes(spec))
        )
        self._tier = (
            open_pinned_tier(gpu, shelves_of(self.groups, plan.tier_blocks), plan.block_size)
            if plan.tier_blocks
            else None
        )
        self._free = [_Landing.make(gpu, self._program.layout.num_bytes) for _ in range(plan.async_depth + 1)]
        self._flights: deque[Flight] = deque()
        self._logits: U8Array | None = None
        gpu.settle()
        log.info("%s of device memory are taken", format_bytes(gpu.used))

    @property
    def graphs(self) -> DecodeGraphs | None:
        """The graphs that steps of decodes are replayed from."""
        return self._graphs

    def submit(self, step: Step) -> Flight:
        """Start the step; steps run one after the other in the order of submission."""
        self.gpu.enter()
        if step.chunks and ((self._flights and looks_back(self._slots, step.chunks)) or not self._free):
            self._land_all()
        landing = self._free.pop()
        swapped = self._apply(step, landing)
        flight = Flight(self, step, landing, swapped)
        count = self._lay_out(step.chunks)
        if count:
            asked = asked_rows(self._batch, self._slots, step.chunks)
            flight.num_top, flight.slot, flight.lengths = asked.rows["logprobs"], *self._places(count)
            if not asked.fits(self._lists):
                self._grow(len(asked.seen_ids), len(asked.bias_ids))
            for name in ("rows", "seen_ids", "seen_outputs", "bias_ids", "bias_values"):
                values = getattr(asked, name)
                getattr(self._lists, name)[: len(values)] = values
                if len(values):
                    self.gpu.bring(getattr(self._lists, name), len(values))
        if step.chunks:
            self._compute(sampling=count > 0)
        self._fetch(flight, count)
        self._flights.append(flight)
        return flight

    def execute(self, step: Step) -> StepResult:
        """Run the step to its end."""
        return self.submit(step).result()

    def forward(self, step: Step) -> F32Array:
        """Apply the step's deltas and compute its chunks, without sampling.

        The logits [rows, vocabulary padded to panels] of the positions that get some.
        """
        self.gpu.enter()
        self._land_all()
        landing = self._free.pop()
        self._apply(step, landing)
        count = self._lay_out(step.chunks)
        if step.chunks:
            self._compute(sampling=False)
        self._free.append(landing)
        return self._logits_of(count)

    def close(self) -> None:
        """Wait for what was submitted, and give the GPU back."""
        self.gpu.enter()
        self._land_all()
        if self._graphs is not None:
            self._graphs.forget()
        for landing in self._free:
            landing.close(self.gpu)
        self._free.clear()
        if self._tier is not None:
            self._tier.close()
        if self._owned:
            use(None)
            self.gpu.close()

    def land_next(self) -> None:
        """Wait for the oldest step in flight, and read what it brought."""
        flight = self._flights.popleft()
        gpu, landing = self.gpu, flight.landing
        gpu.enter()
        gpu.driver.wait(landing.done)
        if flight.swapped:
            gpu.driver.wait(landing.moved)
        layout, count = self._program.layout, len(flight.num_top)
        at = landing.memory
        token, finite = at[: 4 * layout.rows].view(np.int32)[:count].copy(), at[layout.finite :][:count].copy()
        logprob = at[layout.logprob : layout.top_ids].view(np.float32)
        tops = at[layout.top_ids : layout.top_logprobs].view(np.int32).reshape(-1, MAX_TOP)
        values = at[layout.top_logprobs : layout.num_bytes].view(np.float32).reshape(-1, MAX_TOP)
        # Also behind drafts that failed: it is void there, and written again before it is used.
        self._slots.tokens[flight.slot, flight.lengths] = np.maximum(token, 0)
        chunks: tuple[ChunkResult, ...] = chunk_results(
            flight.step.chunks, Sampled(token, finite, logprob, tops, values, flight.num_top)
        )
        swap_us = compute_us = 0
        if flight.swapped:
            swap_us = int(1000 * gpu.driver.elapsed_ms(landing.begun, landing.moved))
            compute_us = int(1000 * gpu.driver.elapsed_ms(landing.started, landing.ended))
        elif self._tier is not None:
            compute_us = (time.perf_counter_ns() - flight.started) // 1000
        self._free.append(landing)
        flight.landed = StepResult(flight.step.index, chunks, (), swap_us, compute_us)

    def _land_all(self) -> None:
        while self._flights:
            self.land_next()

    def _apply(self, step: Step, landing: _Landing) -> bool:
        """Start the step's swaps and copies, and send its deltas. Whether anything was swapped."""
        gpu, tier = self.gpu, self._tier
        swapped = bool(step.swaps) and tier is not None
        if tier is not None:
            tier.join()
            if swapped:
                tier.move(step.swaps, _written(step), landing.begun, landing.moved)
                gpu.driver.record(landing.started, gpu.stream)
        apply_deltas(self._slots, step)
        tokens, stride = gpu.address(self._slots.tokens), self._slots.tokens.shape[1]
        for admit in step.admit:
            if admit.tokens:
                gpu.feed.put(tokens + 4 * admit.slot * stride, np.frombuffer(admit.tokens, "<i4"))
        for chunk in step.chunks:
            if chunk.drafts:
                first = chunk.slot * stride + chunk.start + chunk.count - len(chunk.drafts)
                gpu.feed.put(tokens + 4 * first, np.array(chunk.drafts, np.int32))
        self._send_tables(step)
        for copy in step.copies:
            self.groups[copy.group].copy(copy.source, copy.target, copy.tokens)
        return swapped

    def _send_tables(self, step: Step) -> None:
        added: dict[tuple[int, int], int] = {}
        for delta in step.tables:
            added[delta.group, delta.slot] = added.get((delta.group, delta.slot), 0) + len(delta.blocks)
        for (group, slot), count in added.items():
            table, end = self._slots.tables[group], int(self._slots.table_len[group][slot])
            place = self.gpu.address(table) + 4 * (slot * table.shape[1] + end - count)
            self.gpu.feed.put(place, table[slot, end - count : end])

    def _lay_out(self, chunks: tuple[Chunk, ...]) -> int:
        """Lay out the chunks' rows and send them. How many of them have logits."""
        if not chunks:
            return 0
        batch, gpu = self._batch, self.gpu
        fill_batch(batch, self._slots, chunks)
        rows, count = int(batch.counts[ROWS]), int(batch.counts[LOGIT_ROWS])
        gpu.bring(batch.counts, len(batch.counts))
        for array in (batch.slot, batch.position):
            gpu.bring(array, rows)
        if count:
            gpu.bring(batch.logit_rows, count)
        return count

    def _places(self, count: int) -> tuple[I32Array, I32Array]:
        """The slot of each row with logits, and how long its sequence is before the token that follows."""
        where = self._batch.logit_rows[:count]
        return self._batch.slot[where], self._batch.position[where] + 1

    def _compute(self, *, sampling: bool) -> None:
        """Launch what computes the rows in the batch."""
        program = self._program
        for work in program.lists:
            work.plan()
            work.held = True
            if len(work.rounds) == 1:  # with all else that the step sends
                work.bring(self.gpu, 0)
        try:
            if sampling and self._graphs is not None and self._graphs.serves():
                self._graphs.run(self._lists)
            else:
                program.launch(self._lists if sampling else None)
        finally:
            for work in program.lists:
                work.held = False

    def _fetch(self, flight: Flight, count: int) -> None:
        """Start the copy of what was sampled."""
        gpu, landing, layout = self.gpu, flight.landing, self._program.layout
        gpu.feed.flush()
        if count:
            size = layout.num_bytes if int(flight.num_top.max()) >= 0 else layout.logprob
            gpu.driver.download(int(landing.memory.ctypes.data), self._program.result, size, gpu.stream)
        if flight.swapped:
            gpu.driver.record(landing.ended, gpu.stream)
        gpu.driver.record(landing.done, gpu.stream)

    def _grow(self, seen: int, bias: int) -> None:
        """Larger lists for the sampler. Steps in flight have read theirs by the time that they are given back."""
        if self._graphs is not None:
            self.gpu.driver.synchronize(self.gpu.stream)
            self._graphs.forget()
        old = self._lists
        self._lists = make_lists(len(old.rows), max(2 * seen, len(old.seen_ids)), max(2 * bias, len(old.bias_ids)))

    def _logits_of(self, count: int) -> F32Array:
        logits, gpu = self.decoder.logits, self.gpu
        gpu.feed.flush()
        if not count:
            gpu.driver.synchronize(gpu.stream)
            return np.zeros((0, logits.shape[1]), np.float32)
        if self._logits is None:
            self._logits = gpu.pin(logits.nbytes)
        size = count * logits.shape[1] * logits.itemsize
        gpu.driver.download(int(self._logits.ctypes.data), gpu.address(logits), size, gpu.stream)
        gpu.driver.synchronize(gpu.stream)
        found: Any = self._logits[:size].view(logits.dtype).reshape(count, -1)
        if found.dtype == np.uint16:
            found = (found.astype(np.uint32) << np.uint32(16)).view(np.float32)
        wide: F32Array = found.astype(np.float32)
        return wide


@dataclass(slots=True, eq=False)
class Flight:
    """A step on its way; `result` waits for it. `slot` and `lengths` are where its tokens go."""

    runner: CudaRunner
    step: Step
    landing: _Landing
    swapped: bool
    num_top: I32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    slot: I32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    lengths: I32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    started: int = field(default_factory=time.perf_counter_ns)
    landed: StepResult | None = None

    def result(self) -> StepResult:
        while self.landed is None:
            self.runner.land_next()
        return self.landed


@dataclass(frozen=True, slots=True, eq=False)
class _Landing:
    """Where a step's result arrives: pinned memory, and events for when its parts are done.

    `begun` and `moved` stand around its swaps, `started` and `ended` around what it computes beside them.
    """

    memory: U8Array
    done: int
    begun: int
    moved: int
    started: int
    ended: int

    @classmethod
    def make(cls, gpu: Gpu, num_bytes: int) -> _Landing:
        timed = (gpu.driver.event(timed=True) for _ in range(4))
        return cls(gpu.pin(num_bytes), gpu.driver.event(), *timed)

    def close(self, gpu: Gpu) -> None:
        for event in (self.done, self.begun, self.moved, self.started, self.ended):
            gpu.driver.destroy_event(event)


def _written(step: Step) -> set[tuple[int, int]]:
    """(group, block) that the step may write, of those that its sequences have since this step."""
    found = {(delta.group, block) for delta in step.tables for block in delta.blocks}
    return found | {(copy.group, copy.target) for copy in step.copies}
