"""Decoding by replaying captured graphs: one launch instead of hundreds.

A graph is captured for a number of rows from a short list, and for so much work of attention; a step with fewer rows
uses the next larger one, whose launches find on the GPU how much of their grid there is to do. The first step of a kind
is launched call by call, which loads every kernel and reserves what it needs, and is then captured: nothing has to be
tried out at start, and no graph is made that is not used. Graphs keep to the memory that was planned for them: those
that were not used for longest go before another is captured, by what it is taken to need, and after, by what it needed;
one for which there is no room even so is not kept, and steps of its kind are launched call by call.
"""

from __future__ import annotations

import bisect
import logging
from dataclasses import dataclass, field

from ...kernels.cuda.driver import OutOfMemory
from ...kernels.cuda.gpu import NODE_BYTES, Graph
from ...kernels.cuda.work_list import WorkList
from ...kernels.ops import LOGIT_ROWS, ROWS, SEQS
from ..sizes import format_bytes
from .cuda_program import StepProgram
from .cuda_rows import SampleLists

log = logging.getLogger(__name__)

_Key = tuple[int, tuple[tuple[int, int], ...]]  # rows, and of each list items of work and of merging


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Numbers of rows that graphs are captured for: 1, 2, 4, 8 and so on, and the most that there can be."""
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power < most]
    return (*sizes, most)


@dataclass(slots=True, eq=False)
class DecodeGraphs:
    """The graphs of one program, for steps with one row for each of at most `sizes[-1]` sequences."""

    program: StepProgram
    sizes: tuple[int, ...]
    limit: int  # bytes of all graphs together
    graphs: dict[_Key, Graph] = field(default_factory=dict)
    too_large: set[_Key] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        """Device memory that the graphs take."""
        return sum(graph.num_bytes for graph in self.graphs.values())

    def serves(self) -> bool:
        """Whether the step in the batch, whose lists are planned, is one for a graph."""
        counts = self.program.batch.counts
        rows = int(counts[ROWS])
        same = rows == int(counts[SEQS]) == int(counts[LOGIT_ROWS])
        return same and 0 < rows <= self.sizes[-1] and all(len(work.rounds) <= 1 for work in self.program.lists)

    def run(self, sampling: SampleLists) -> None:
        """Compute the step in the batch, of which all has been sent, its lists of work too."""
        program, gpu = self.program, self.program.gpu
        counts = program.batch.counts
        rows = int(counts[ROWS])
        padded = self.sizes[bisect.bisect_left(self.sizes, rows)]
        grids = tuple(_grid(work, padded) if work.rounds else (0, 0) for work in program.lists)
        key = padded, grids
        if (graph := self.graphs.pop(key, None)) is not None:
            self.graphs[key] = graph  # the last that was used
            gpu.replay(graph)
            return
        counts[[ROWS, SEQS, LOGIT_ROWS]] = padded
        for work, grid in zip(program.lists, grids, strict=True):
            work.grid = grid
        try:
            before = gpu.launches
            program.launch(sampling)
            if key not in self.too_large:
                self._make_room(NODE_BYTES * (gpu.launches - before))
                self._capture(key, sampling)
        finally:
            counts[[ROWS, SEQS, LOGIT_ROWS]] = rows
            for work in program.lists:
                work.grid = 0, 0

    def _capture(self, key: _Key, sampling: SampleLists) -> None:
        """Keep a graph of the step's launches, if there is room for it."""
        gpu = self.program.gpu
        try:
            graph = gpu.capture(lambda: self.program.launch(sampling))
        except OutOfMemory:
            log.warning("no memory for a graph for %d sequences: their steps are launched call by call", key[0])
            self.too_large.add(key)
            return
        log.info(
            "captured a graph of %d launches for %d sequences, %s", graph.nodes, key[0], format_bytes(graph.num_bytes)
        )
        self._make_room(graph.num_bytes)
        if graph.num_bytes > self.limit:
            log.warning(
                "a graph for %d sequences takes %s, more than the %s of all: their steps are launched call by call",
                key[0], format_bytes(graph.num_bytes), format_bytes(self.limit),
            )  # fmt: skip
            gpu.driver.destroy_graph(graph.handle)
            self.too_large.add(key)
            return
        self.graphs[key] = graph

    def _make_room(self, num_bytes: int) -> None:
        """Destroy the graphs that were not used for longest, until so much more is within the limit."""
        while self.graphs and self.num_bytes + num_bytes > self.limit:
            self.program.gpu.driver.destroy_graph(self.graphs.pop(next(iter(self.graphs))).handle)

    def forget(self) -> None:
        """Destroy all graphs: what they point to is about to move."""
        for graph in self.graphs.values():
            self.program.gpu.driver.destroy_graph(graph.handle)
        self.graphs.clear()


def _grid(work: WorkList, rows: int) -> tuple[int, int]:
    """Room for the list's work in a step of so many decodes, and for more, so that few graphs serve many steps."""
    found = work.rounds[0]
    tiles = rows * -(-work.tiles.group // work.tiles.rows)
    items = max(2 * tiles, 1 << (len(found.work) - 1).bit_length())
    return min(items, len(work.work)), min(tiles, len(work.merge)) if len(found.merge) else 0
