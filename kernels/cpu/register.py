"""The C++ entries: each op once per instruction set, each instruction set a bits class of its own.

An extension that cannot be imported is a refusal with its reason, as is a CPU that lacks an instruction set, so that
`doctor` and NoKernel can say what is the matter.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..device import read_machine
from ..entry import OPS, Entry
from ..errors import UsageError
from ..ops import Batch, Op, Program


@dataclass(frozen=True, slots=True)
class Isa:
    """An instruction set with kernels of its own, and what it needs of the CPU."""

    name: str
    priority: int
    features: tuple[str, ...]


_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni")
_AMX = (*_AVX512, "amx_tile", "amx_int8")
ISAS = (Isa("amx", 40, _AMX), Isa("avx512", 30, _AVX512), Isa("avx2", 20, _AVX2), Isa("generic", 10, ()))
_SCREENS = ISAS[:2]

_Accepts = Callable[[Any], str | None]
_Build = Callable[[Any], Any]


def configure(kernels: str, threads: int) -> Isa | None:
    """The instruction set that `kernels` ("auto" or the name of one) binds on this CPU; sets the pool to `threads`.

    None if the extension cannot be imported. The pool is the process's own: the last engine to start sets its size.
    Raises UsageError if the one that is asked for cannot run here.
    """
    try:
        from .. import _cpu
    except ImportError:
        return None
    _cpu.set_threads(threads)
    usable = [isa for isa in ISAS if _missing(isa) is None]
    for isa in usable:
        if kernels in ("auto", isa.name):
            return isa
    reason = next((_missing(isa) for isa in ISAS if isa.name == kernels), None)
    raise UsageError(f"--kernels is `{kernels}`: {reason}", f"choose auto or {', '.join(isa.name for isa in usable)}")


def screens(kernels: str) -> bool:
    """Whether the kernels of `kernels` on this CPU keep what finds the largest logit for less than all logits."""
    return any(kernels in ("auto", isa.name) and _missing(isa) is None for isa in _SCREENS)


def build_id() -> str:
    """What the extension was compiled from and with; bits may differ between builds. Empty without an extension."""
    try:
        from .. import _cpu
    except ImportError:
        return ""
    return hashlib.sha256(Path(_cpu.__file__).read_bytes()).hexdigest()[:16]


@functools.cache
def entries() -> tuple[Entry, ...]:
    """Every C++ entry, also those that will refuse here."""
    found = []
    for isa in ISAS:
        missing = _missing(isa)
        for op, (accepts, build) in _faces().items():
            if missing is not None:
                accepts = _refuse(missing)
            bits, source = f"cpu-{isa.name}", f"kernels/cpu/{op}.hpp"
            found.append(Entry(op, "cpu", bits, isa.name, isa.priority, accepts, _on(isa.name, build), source))
    return tuple(found)


def are_native(ops: Sequence[Op]) -> bool:
    """Whether all of these are C++ ops."""
    try:
        from .. import _cpu
    except ImportError:
        return False
    return all(isinstance(op, _cpu.Op) for op in ops)


def record(ops: Sequence[Op], batch: Batch) -> Program:
    """A program of C++ ops, replayed in C++."""
    from .ops import record as record_native

    return record_native(ops, batch)


def _missing(isa: Isa) -> str | None:
    """Why kernels of this instruction set cannot run here, None if they can or nobody can say."""
    features = read_machine().features
    missing = [name for name in isa.features if name not in features]
    if missing:
        return f"this CPU has no {', '.join(missing)}"
    try:
        from .. import _cpu
    except ImportError:
        return None
    if isa.name in _cpu.isas():
        return None
    return f"the extension was built without {isa.name}, or Linux does not let this process use it"


def _faces() -> dict[str, tuple[_Accepts, _Build]]:
    """(accepts, build) of each op, refusing all when the extension cannot be imported."""
    try:
        from . import ops
    except ImportError as error:
        reason = f"the extension `llmctl.kernels._cpu` cannot be imported: {error}"
        return dict.fromkeys(OPS, (_refuse(reason), _never_built))
    return {
        "embed": (ops.accepts_embed, ops.build_embed),
        "norm": (ops.accepts_norm, ops.build_norm),
        "norm_add": (ops.accepts_norm_add, ops.build_norm_add),
        "linear": (ops.accepts_linear, ops.build_linear),
        "rope_store": (ops.accepts_rope_store, ops.build_rope_store),
        "attend": (ops.accepts_attend, ops.build_attend),
        "latent": (ops.accepts_latent, ops.build_latent),
        "act_mul": (ops.accepts_act_mul, ops.build_act_mul),
        "kv_copy": (ops.accepts_kv_copy, ops.build_kv_copy),
        "sample": (ops.accepts_sample, ops.build_sample),
    }


def _on(isa: str, build: _Build) -> _Build:
    """`build` with this instruction set chosen while it builds: an op keeps the kernels it was built with."""

    def build_on(args: Any) -> Any:
        from .. import _cpu

        before = _cpu.isa()
        _cpu.set_isa(isa)
        try:
            return build(args)
        finally:
            _cpu.set_isa(before)

    return build_on


def _refuse(reason: str) -> _Accepts:
    return lambda args: reason


def _never_built(args: Any) -> Any:
    raise AssertionError("an entry that refuses was built")
