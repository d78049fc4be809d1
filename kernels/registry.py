"""`bind` finds the kernel for an op and its arguments; `record` makes a program of bound ops.

A device's entries are loaded when first asked for, and the reference only when it is asked for or nothing else
accepts, because it imports torch. Falling back to it is never silent: a warning names each refusal, once per op.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

from .cpu import register as cpu
from .entry import OPS, Entry
from .errors import NoKernel, UsageError
from .ops import (
    ActMulArgs,
    AttendArgs,
    Batch,
    EmbedArgs,
    ExpertsArgs,
    KVCopy,
    KVCopyArgs,
    LatentArgs,
    LinearArgs,
    NormAddArgs,
    NormArgs,
    Op,
    Program,
    RopeStoreArgs,
    Sample,
    SampleArgs,
    U8Array,
)

__all__ = ["KERNELS", "Entry", "StepArgs", "bind", "build_id", "configure", "entries", "record", "register", "reserve"]

CUDA = "cuda"
KERNELS = ("auto", *(isa.name for isa in cpu.ISAS), "reference")

_log = logging.getLogger(__name__)
_registered: list[Entry] = []
_warned: set[str] = set()

StepArgs = (
    EmbedArgs | NormArgs | NormAddArgs | LinearArgs | RopeStoreArgs | AttendArgs | LatentArgs | ActMulArgs | ExpertsArgs
)


def register(entry: Entry) -> None:
    """Add an entry beside the built-in ones."""
    assert entry.op in OPS, entry.op
    _registered.append(entry)


def entries(device: str = "cpu", *, include_reference: bool = False) -> tuple[Entry, ...]:
    """Every entry of a device, highest priority first. The reference runs on any device and imports torch."""
    found = [entry for entry in (*_device_entries(device), *_registered) if entry.device == device]
    if include_reference:
        found += _reference_entries()
    return tuple(sorted(found, key=lambda entry: -entry.priority))


@overload
def bind(op: Literal["kv_copy"], args: KVCopyArgs, *, device: str = "cpu", kernels: str = "auto") -> KVCopy: ...
@overload
def bind(op: Literal["sample"], args: SampleArgs, *, device: str = "cpu", kernels: str = "auto") -> Sample: ...
@overload
def bind(op: str, args: StepArgs, *, device: str = "cpu", kernels: str = "auto") -> tuple[Op, ...]: ...


def bind(op: str, args: Any, *, device: str = "cpu", kernels: str = "auto") -> Any:
    """The op built from the entry of highest priority that accepts these arguments.

    kernels  "auto", one instruction set ("generic" is portable C++), "reference", or "cuda" for the machine in use,
             whose logits are sampled here. Raises NoKernel when nothing accepts.
    """
    if kernels == CUDA:
        device, kernels = ("cpu" if op == "sample" else "cuda"), "auto"
    if kernels not in KERNELS:
        raise UsageError(f"--kernels is `{kernels}`", f"choose one of: {', '.join(KERNELS)}")
    assert isinstance(args, OPS[op]), (op, type(args))
    refusals: list[str] = []
    if kernels != "reference":
        for entry in entries(device):
            if entry.op != op:
                continue
            if kernels not in ("auto", entry.isa):
                reason: str | None = f"only {kernels} kernels are asked for"
            else:
                reason = entry.accepts(args)
            if reason is None:
                return entry.build(args)
            refusals.append(f"{_name(entry)}: {reason}")
    # The reference knows the CPU's memory and its layout of the cache only.
    for entry in _reference_entries() if device != "cuda" else ():
        if entry.op != op:
            continue
        reason = entry.accepts(args)
        if reason is None:
            if kernels != "reference" and op not in _warned:
                _warned.add(op)
                _log.warning("%s runs on the slow reference: %s", op, "; ".join(refusals) or f"no kernel for {device}")
            return entry.build(args)
        refusals.append(f"{_name(entry)}: {reason}")
    hint = "use a weight or cache format that one of these accepts, or `--device cpu`"
    raise NoKernel(f"no kernel for {op} on {device}: {'; '.join(refusals)}", hint if device == CUDA else _hint(kernels))


def configure(kernels: str, threads: int) -> tuple[str, str]:
    """(instruction set, bits class) of the kernels that will be bound on this CPU, run by `threads` threads."""
    if kernels == CUDA:
        cpu.configure("auto", threads)
        return "sm_80", "cuda"
    isa = None if kernels == "reference" else cpu.configure(kernels, threads)
    return ("any", "reference") if isa is None else (isa.name, f"cpu-{isa.name}")


def screens(kernels: str) -> bool:
    """Whether kernels of the CPU that `kernels` names take the memory of `scratch.screen_scratch_bytes`."""
    return cpu.screens(kernels)


def reserve(num_bytes: int) -> U8Array:
    """A buffer for kernels alone on the GPU in use, see Machine."""
    from .cuda.register import machine_in_use

    return machine_in_use().reserve(num_bytes)


def build_id() -> str:
    """Names the build of the kernels: bits are promised within one build."""
    return cpu.build_id()


def record(ops: Sequence[Op], batch: Batch, *, kernels: str = "auto") -> Program:
    """A program of these ops: replayed in C++ if all are C++ ones, else run one after another from Python."""
    if kernels not in ("reference", CUDA) and cpu.are_native(ops):
        return cpu.record(ops, batch)
    return PythonProgram(tuple(ops))


@dataclass(frozen=True, slots=True)
class PythonProgram:
    """Ops of any kind, run in order."""

    ops: tuple[Op, ...]

    def replay(self) -> None:
        for op in self.ops:
            op.run()


def _device_entries(device: str) -> tuple[Entry, ...]:
    if device == "cuda":
        from .cuda.register import entries  # nothing of it is needed on a CPU

        return entries()
    return cpu.entries() if device == "cpu" else ()


@functools.cache
def _reference_entries() -> tuple[Entry, ...]:
    from .reference import ENTRIES  # imports torch

    return ENTRIES


def _name(entry: Entry) -> str:
    return f"{entry.bits} ({entry.source})"


def _hint(kernels: str) -> str:
    if kernels not in ("auto", "reference"):
        return "use `--kernels auto`, and a format that one of these accepts"
    return "use a weight or cache format that one of these accepts"
