"""One step's launches on a GPU: tokens gathered, the decoder's ops, and its logits sampled, in this order.

The host is not asked for anything in between. Tokens that earlier steps sampled are on the GPU already, so a step can
be launched while the one before it still runs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from ...kernels.cuda import rows as kernels
from ...kernels.cuda.arguments import Argument
from ...kernels.cuda.attend_op import AttendOp
from ...kernels.cuda.call import Call
from ...kernels.cuda.gpu import Gpu
from ...kernels.cuda.latent_op import LatentOp
from ...kernels.cuda.library import LibraryLinear
from ...kernels.cuda.source import Kernel
from ...kernels.cuda.work_list import WorkList
from ...kernels.ops import ELEMENT_TYPES, LOGIT_ROWS, MAX_TOP, ROWS, AnyArray, Batch
from ..models.decoder import Decoder
from ..sample.slots import Slots
from .cuda_rows import SampleLists

_THREADS = 128


@dataclass(frozen=True, slots=True)
class ResultLayout:
    """Where what a step samples lies in one stretch of memory, for so many rows. Offsets in bytes.

    Tokens and whether their rows were finite come first: often nothing else is asked for.
    """

    rows: int

    @property
    def finite(self) -> int:
        return 4 * self.rows

    @property
    def logprob(self) -> int:
        return self.finite + -(-self.rows // 16) * 16

    @property
    def top_ids(self) -> int:
        return self.logprob + 4 * self.rows

    @property
    def top_logprobs(self) -> int:
        return self.top_ids + 4 * self.rows * MAX_TOP

    @property
    def num_bytes(self) -> int:
        return self.top_logprobs + 4 * self.rows * MAX_TOP


@dataclass(frozen=True, slots=True, eq=False)
class StepProgram:
    """What is launched for the rows in the batch, of which the GPU has counts, slots, positions and logit rows.

    result   address of what is sampled, in the layout's order
    wide     address of the logits in float32 [rows, vocab_size], 0 where the decoder's are
    scores   address of as much, for the sampler
    """

    gpu: Gpu
    decoder: Decoder
    batch: Batch
    slots: Slots
    vocab_size: int
    activations: str
    layout: ResultLayout
    result: int
    wide: int
    scores: int
    lists: tuple[WorkList, ...]

    def launch(self, sampling: SampleLists | None) -> None:
        """Launch everything, for as many rows as the host's counts say; without `sampling` up to the logits."""
        rows, logit_rows = int(self.batch.counts[ROWS]), int(self.batch.counts[LOGIT_ROWS])
        self.gpu.launch([self._gather(rows)])
        for op in self.decoder.ops:
            op.run()
        if sampling is not None and logit_rows:
            self.gpu.launch(self._sample(logit_rows, sampling))

    def kernels(self, sampling: SampleLists, sizes: Sequence[int]) -> tuple[Kernel, ...]:
        """All that steps of so many rows launch, so that it can be compiled and loaded before there are any.

        A library of products has its own kernels, and what goes around them is loaded with the first step.
        """
        counts = self.batch.counts
        lanes = [lane for op in self.decoder.ops if isinstance(op, (AttendOp, LatentOp)) for lane in op.lanes]
        found = {kernel: None for lane in lanes for kernel in (lane.shape.kernel, lane.shape.merge_kernel)}
        others = [op for op in self.decoder.ops if not isinstance(op, (AttendOp, LibraryLinear))]

        def launch() -> None:
            self.gpu.launch([self._gather(int(counts[ROWS])), *self._sample(int(counts[LOGIT_ROWS]), sampling)])
            for op in others:
                op.run()

        for rows in sizes:
            counts[ROWS], counts[LOGIT_ROWS] = rows, min(rows, self.layout.rows)
            found |= dict.fromkeys(self.gpu.collect(launch))
        counts[:] = 0
        return (*found, kernels.COPY_TOKENS)

    def _gather(self, rows: int) -> Call:
        batch, gpu, tokens = self.batch, self.gpu, self.slots.tokens
        arguments = (
            self._at(batch.token), self._at(tokens), self._at(batch.slot), self._at(batch.position),
            _p(gpu.address(batch.counts) + 4 * ROWS), _l(tokens.shape[1]),
        )  # fmt: skip
        return Call(kernels.GATHER_TOKENS, (-(-rows // _THREADS), 1, 1), _THREADS, 0, arguments)

    def _sample(self, rows: int, sampling: SampleLists) -> list[Call]:
        batch, gpu, tokens, logits = self.batch, self.gpu, self.slots.tokens, self.decoder.logits
        count = _p(gpu.address(batch.counts) + 4 * LOGIT_ROWS)
        calls, read, stride = [], gpu.address(logits), logits.shape[1]
        if self.wide:
            across = -(-self.vocab_size // _THREADS)
            widening: tuple[Argument, ...] = _p(self.wide), _p(read), count, _i(self.vocab_size), _l(stride)
            calls.append(Call(kernels.widen(self.activations), (rows, across, 1), _THREADS, 0, widening))
            read, stride = self.wide, self.vocab_size
        at, layout = self.result, self.layout
        calls.append(
            Call(
                kernels.sample(), (rows, 1, 1), kernels.SAMPLE_THREADS, kernels.sample_shared_bytes(),
                (
                    _p(at), _p(at + layout.logprob), _p(at + layout.finite), _p(at + layout.top_ids),
                    _p(at + layout.top_logprobs), _p(self.scores), _p(read), self._at(sampling.rows), count,
                    self._at(sampling.seen_ids), self._at(sampling.seen_outputs), self._at(sampling.bias_ids),
                    self._at(sampling.bias_values), _i(self.vocab_size), _l(stride),
                ),
            )
        )  # fmt: skip
        keeping = (
            self._at(tokens), _p(at), self._at(batch.logit_rows), self._at(batch.slot), self._at(batch.position), count,
            _l(tokens.shape[1]),
        )  # fmt: skip
        calls.append(Call(kernels.KEEP_TOKENS, (-(-rows // _THREADS), 1, 1), _THREADS, 0, keeping))
        return calls

    def _at(self, array: AnyArray) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.gpu.address(array))


def make_program(gpu: Gpu, decoder: Decoder, batch: Batch, slots: Slots, vocab_size: int) -> StepProgram:
    """The program of a decoder whose ops are bound to this GPU."""
    rows = len(decoder.logits)
    activations = next(name for name, kind in ELEMENT_TYPES.items() if decoder.logits.dtype == kind)
    scores = 4 * rows * vocab_size
    layout = ResultLayout(rows)
    lanes = (lane for op in decoder.ops if isinstance(op, (AttendOp, LatentOp)) for lane in op.lanes)
    return StepProgram(
        gpu, decoder, batch, slots, vocab_size, activations, layout,
        result=gpu.allocate(layout.num_bytes),
        wide=0 if activations == "f32" else gpu.allocate(scores),
        scores=gpu.allocate(scores),
        lists=tuple({id(lane.work): lane.work for lane in lanes}.values()),
    )  # fmt: skip


def _p(address: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address)


def _i(value: int) -> ctypes.c_int32:
    return ctypes.c_int32(value)


def _l(value: int) -> ctypes.c_int64:
    return ctypes.c_int64(value)
