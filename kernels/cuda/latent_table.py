"""Every registered specialization of attention on latents, for table.py."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import NoKernel
from ..formats import WeightFormat
from . import latent
from .attend import MERGE_THREADS
from .linear_table import expert_kernels
from .listed import Listed

# (heads, rank, values of a rotated key): DeepSeek-V2-Lite, and V2, V3 and what is built like them.
SIZES = ((16, 512, 64), (128, 512, 64))


def latent_kernels(arch: str, act: str, heads: int, rank: int, rope: int) -> Iterator[Listed]:
    """What attention on latents of these sizes launches; NoKernel if the architecture has none."""
    shape = latent.choose_latent(arch, act, heads, rank, rope)
    yield Listed(latent.store_kernel(act), latent.STORE_THREADS)
    # The step being computed has arrived; the others are under way.
    in_flight = (shape.stages - 1) * shape.stage_bytes
    yield Listed(shape.kernel, shape.threads, shape.shared_bytes, in_flight)
    yield Listed(shape.merge_kernel, MERGE_THREADS, shape.merge_shared_bytes)


def heads_kernels(act: str, tiles: int) -> Iterator[Listed]:
    """What brings queries to latents and back: the batched form of the experts' linear layers."""
    for item in expert_kernels(act, (WeightFormat(act),), tiles):
        if "linear" in item.kernel.expression and "kStore" in item.kernel.expression:
            yield item


def all_latents(arch: str, act: str) -> Iterator[Listed]:
    """What models that are known ask for, where the architecture has memory for it."""
    for heads, rank, rope in SIZES:
        try:
            yield from latent_kernels(arch, act, heads, rank, rope)
        except NoKernel:
            continue
