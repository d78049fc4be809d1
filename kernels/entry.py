"""`Entry`: one implementation of one op. What registers, what binds and what tests all pass around.

It stands apart from the registry so that `cpu/register.py` and `reference/` can make entries without importing what
imports them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .ops import (
    ActMulArgs,
    AttendArgs,
    EmbedArgs,
    ExpertsArgs,
    KVCopyArgs,
    LatentArgs,
    LinearArgs,
    NormAddArgs,
    NormArgs,
    RopeStoreArgs,
    SampleArgs,
)

OPS = {
    "embed": EmbedArgs,
    "norm": NormArgs,
    "norm_add": NormAddArgs,
    "linear": LinearArgs,
    "rope_store": RopeStoreArgs,
    "attend": AttendArgs,
    "latent": LatentArgs,
    "act_mul": ActMulArgs,
    "experts": ExpertsArgs,
    "kv_copy": KVCopyArgs,
    "sample": SampleArgs,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """An implementation of `op` on `device`.

    bits      entries of one class give the same bits as each other in whatever they share
    isa       the instruction set it is written for, "any" for the reference
    priority  the highest that accepts is bound; the reference has 0
    accepts   None if it can be built for these arguments here, else why not, in a few words
    build     args -> tuple of Ops to run in order, or for `kv_copy` and `sample` the callable
    source    the file that implements it
    """

    op: str
    device: str
    bits: str
    isa: str
    priority: int
    accepts: Callable[[Any], str | None]
    build: Callable[[Any], Any]
    source: str
