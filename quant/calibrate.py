"""The walk: one decoder block at a time is observed, solved, replaced by what will be stored, and passed through.

Memory is bounded by one block, the second moments of its inputs and one batch of activations, whatever the size of the
model; the activations of all calibration tokens between two blocks lie in a mapped file once they are large. Blocks see
the outputs of quantized blocks before them, so that a method that corrects errors can answer for earlier ones, or those
of the original blocks, which takes one pass where the other takes two.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import nn

from ..kernels.errors import CapacityError, CheckpointError
from ..kernels.formats import WeightFormat
from .observe import InputObserver, InputStats, output_error
from .scheme import Scheme, module_format
from .sites import ScaleSite, fold_scales
from .solve import awq, rtn
from .tensor import WeightTensor

log = logging.getLogger(__name__)

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
_TOKENS_AT_ONCE = 4096


class Block(Protocol):
    """A decoder block as a torch module (`engine/models/block.py`)."""

    @property
    def sites(self) -> tuple[ScaleSite, ...]: ...
    def get_submodule(self, target: str) -> nn.Module: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def __call__(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor: ...


class Progress(Protocol):
    """Called now and then; `done` of `total` steps of the work so described."""

    def __call__(self, description: str, done: int, total: int) -> None: ...


@dataclass(frozen=True, slots=True)
class LinearReport:
    """How one Linear fared: squared error of its outputs relative to their energy, NaN if its inputs are unknown."""

    module: str
    method: str
    error: float


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedBlock:
    """What is stored of one block: names are within the block (`self_attn.q_proj`, `input_layernorm.weight`).

    rest    float32 tensors that are not quantized (norms, biases), with the scales folded in
    """

    linears: Mapping[str, WeightTensor]
    rest: Mapping[str, torch.Tensor]
    reports: tuple[LinearReport, ...]


class Activations:
    """Hidden states [samples, tokens, width] in float32, replaced in place from block to block.

    Beyond `memory_limit` bytes they are a mapping of an unlinked file in `folder` (None: the system's temporary one).
    """

    def __init__(self, samples: int, tokens: int, width: int, memory_limit: int, folder: Path | None = None) -> None:
        shape = (samples, tokens, width)
        size = samples * tokens * width * 4
        self._values = torch.empty(shape) if size <= memory_limit else _mapped(shape, size, folder)
        self._batch = max(1, _TOKENS_AT_ONCE // tokens)

    @property
    def tokens(self) -> int:
        """Tokens of one sample."""
        return self._values.shape[1]

    @property
    def count(self) -> int:
        """Tokens of all samples."""
        return self._values.shape[0] * self._values.shape[1]

    def batches(self) -> Iterator[torch.Tensor]:
        """Views of a few samples each, to be read or overwritten."""
        return iter(torch.split(self._values, self._batch))


def embed(
    tokens: torch.Tensor, embedding: torch.Tensor, memory_limit: int = 1 << 30, folder: Path | None = None
) -> Activations:
    """What the first block reads: the rows of `embedding` [vocab, hidden] for token ids [samples, tokens]."""
    samples, length = tokens.shape
    activations = Activations(samples, length, embedding.shape[1], memory_limit, folder)
    start = 0
    for batch in activations.batches():
        batch.copy_(embedding[tokens[start : start + len(batch)].long()])
        start += len(batch)
    return activations


def quantize_blocks(
    make_block: Callable[[int], Block],
    num_blocks: int,
    scheme: Scheme,
    format: WeightFormat,
    activations: Activations | None,
    attend: Attend,
    *,
    ignored: Collection[tuple[int, str]] = (),
    exact_inputs: bool = False,
    progress: Progress | None = None,
) -> Iterator[QuantizedBlock]:
    """Each block quantized, in order; nothing of a block is kept once the next one is asked for.

    make_block     block 0, 1, ... in the order in which activations pass through them; they are changed in place
    format         what `scheme.format` says for the whole model
    activations    the first block's inputs, consumed by the walk; None only for methods that need none
    ignored        (block, Linear within it) that are not quantized; the scales of their inputs are folded into them
    exact_inputs   let blocks see the outputs of unquantized blocks, which saves one of two passes
    """
    assert activations is not None or scheme.method == "rtn"
    for index in range(num_blocks):
        if progress is not None:
            progress(f"quantizing block {index + 1} of {num_blocks}", index, num_blocks)
        block = make_block(index)
        _check_finite(block, index)
        stats: Mapping[str, InputStats] = {}
        if activations is not None:
            stats = _observe(block, activations, attend, keep_outputs=exact_inputs)
        kept = {name for number, name in ignored if number == index}
        yield _quantize(block, index, scheme, format, stats, kept)
        if activations is not None and not exact_inputs and index + 1 < num_blocks:
            _pass_through(block, activations, attend)
        del block  # before the next one is made
    if progress is not None:
        progress("quantizing", num_blocks, num_blocks)


def _mapped(shape: tuple[int, ...], size: int, folder: Path | None) -> torch.Tensor:
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # a mapping of a file with holes dies when the disk is full
        except OSError as error:
            raise CapacityError(
                f"no room for {size / 2**30:.1f} GiB of activations in `{folder or tempfile.gettempdir()}`: "
                f"{error.strerror}",
                "use fewer calibration samples, or set TMPDIR to a larger disk",
            ) from error
        return torch.from_numpy(np.memmap(file, np.float32, "r+", shape=shape))


def _check_finite(block: Block, index: int) -> None:
    for name, parameter in block.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise CheckpointError(f"`{name}` of layer {index} holds NaN or infinity", "fetch the model again")


@torch.no_grad()
def _observe(block: Block, activations: Activations, attend: Attend, keep_outputs: bool) -> dict[str, InputStats]:
    """The statistics of each site's inputs, by the name of its first Linear."""
    observers: dict[str, InputObserver] = {}
    handles = []
    for site in block.sites:
        linear = _linear(block, site.linears[0])
        observer = observers[site.linears[0]] = InputObserver(linear.in_features)
        handles.append(linear.register_forward_pre_hook(_hook(observer)))
    try:
        for batch in activations.batches():
            out = block(batch, torch.arange(activations.tokens), attend)
            if keep_outputs:
                batch.copy_(out)
    finally:
        for handle in handles:
            handle.remove()
    return {name: observer.stats() for name, observer in observers.items()}


def _hook(observer: InputObserver) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    def observe(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        observer.add(inputs[0])

    return observe


@torch.no_grad()
def _pass_through(block: Block, activations: Activations, attend: Attend) -> None:
    for batch in activations.batches():
        batch.copy_(block(batch, torch.arange(activations.tokens), attend))


@torch.no_grad()
def _quantize(
    block: Block,
    index: int,
    scheme: Scheme,
    format: WeightFormat,
    stats: Mapping[str, InputStats],
    kept: Collection[str],
) -> QuantizedBlock:
    """Solve all sites, scales first: a Linear can be scaled as a reader of one site and as the source of another."""
    solved = {site: _solvable(site, index, scheme, stats) for site in block.sites}
    if scheme.method == "awq":
        solved = {site: _scale(block, site, format, known, kept) for site, known in solved.items()}
    linears: dict[str, WeightTensor] = {}
    reports = []
    for site, known in solved.items():
        for name in site.linears:
            if name in kept:
                continue
            linear = _linear(block, name)
            weight = linear.weight.data
            own = module_format(format, linear.in_features)
            if known is not None and scheme.method == "awq":
                method, tensor = "awq", awq.quantize(weight, known, own, scheme.search_clip)
            else:
                method, tensor = "rtn", rtn.quantize(weight, own)
            stored = torch.from_numpy(tensor.dequantize())
            reports.append(LinearReport(name, method, _relative_error(stored - weight, weight, known)))
            linear.weight.data = stored
            linears[name] = tensor
    rest = {
        name: parameter.data
        for name, parameter in block.named_parameters()
        if name.removesuffix(".weight") not in linears
    }
    return QuantizedBlock(linears, rest, tuple(reports))


def _solvable(site: ScaleSite, index: int, scheme: Scheme, stats: Mapping[str, InputStats]) -> InputStats | None:
    """The site's statistics; None if there are none or they are not finite, which is logged."""
    known = stats.get(site.linears[0])
    if known is None or known.is_usable:
        return known
    log.warning(
        "layer %d: the inputs of %s are not finite on the calibration text; rounded to nearest instead of %s",
        index,
        ", ".join(site.linears),
        scheme.method,
    )
    return None


def _scale(
    block: Block, site: ScaleSite, format: WeightFormat, known: InputStats | None, kept: Collection[str]
) -> InputStats | None:
    """Search the site's scales and fold them; the statistics of the inputs that its Linears get from now on."""
    rounded = [_linear(block, name).weight.data for name in site.linears if name not in kept]
    if known is None or not rounded:
        return known
    linears = [_linear(block, name) for name in site.linears]
    own = module_format(format, linears[0].in_features)
    scales = awq.search_scales(rounded, known, own, site.shared)
    return awq.scaled_stats(
        known, fold_scales(block.get_submodule(site.previous), linears, scales, site.shared, site.offset)
    )


def _relative_error(error: torch.Tensor, weight: torch.Tensor, known: InputStats | None) -> float:
    if known is None:
        return float("nan")
    energy = float(output_error(weight, known).sum())
    return float(output_error(error, known).sum()) / energy if energy > 0 else 0.0


def _linear(block: Block, name: str) -> nn.Linear:
    linear = block.get_submodule(name)
    assert isinstance(linear, nn.Linear), name
    return linear
