"""Which specialization serves what: tiles, stages and threads as pure functions of sizes and of the GPU.

Limits of shared memory and of registers are facts of an architecture; the rest are judgements that a measurement on a
GPU may change, and only here.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import NoKernel
from .attend import AttendShape, refusal
from .types import HEAD_DIMS


@dataclass(frozen=True, slots=True)
class Sm:
    """One streaming multiprocessor. Bytes of shared memory: that one block may have, that there are, and of those what
    the system takes for each block."""

    block_shared: int
    shared: int
    warps: int
    registers: int = 65536
    blocks: int = 32
    reserved: int = 1 << 10


_BIG, _SMALL = (163 << 10, 164 << 10), (99 << 10, 100 << 10)
SMS = {
    "sm_75": Sm(64 << 10, 64 << 10, warps=32, blocks=16, reserved=0),
    "sm_80": Sm(*_BIG, warps=64),
    "sm_86": Sm(*_SMALL, warps=48, blocks=16),
    "sm_89": Sm(*_SMALL, warps=48, blocks=24),
    "sm_90a": Sm(227 << 10, 228 << 10, warps=64),
    "sm_100a": Sm(227 << 10, 228 << 10, warps=64),
    "sm_120": Sm(*_SMALL, warps=48, blocks=24),
}

# (warps over rows, warps over tokens, tokens per step), in order of preference.
_DECODE = ((1, 4, 64), (1, 2, 32), (1, 1, 16))
_PREFILL = ((4, 1, 64), (4, 1, 32), (4, 1, 16), (2, 1, 16))


def missing(arch: str, kind: str) -> str | None:
    """Why an architecture does not compute in this type on tensor cores, None if it does."""
    if arch == "sm_75" and kind != "f16":
        return f"a GPU of compute capability 7.5 has no tensor cores for {kind}, only for f16"
    return None


def too_wide(arch: str, head_dim: int) -> str | None:
    """Why an architecture has no attention for heads of so many dimensions, None if it has."""
    known = head_dims(arch)
    return None if head_dim in known else f"heads have {head_dim} dimensions; known are {', '.join(map(str, known))}"


def head_dims(arch: str) -> tuple[int, ...]:
    """The sizes of heads that an architecture has attention for."""
    # More would not stay in the oldest's registers.
    return tuple(dim for dim in HEAD_DIMS if arch != "sm_75" or dim <= 128)


def choose_attend(
    arch: str,
    act: str,
    compute: str,
    kv: str,
    head_dim: int,
    *,
    soft_cap: bool,
    prefill: bool,
    fine: bool | None = None,
) -> AttendShape:
    """The specialization for these types and sizes; raises NoKernel with the reason if there is none.

    Decode is bound by reading K and V: as many steps in flight as leave room for two blocks. Prefill is bound by the
    tensor cores: two steps in flight do. So decode can afford fine weights, and has them in bf16, whose bits are the
    fewest, and where the result has as many bits as what is multiplied; prefill, where they add a third to the
    products, rounds its weights as other implementations do. `fine` decides otherwise.
    """
    reason = refusal(act, compute, kv) or missing(arch, compute)
    if reason is None and act == "bf16":
        reason = missing(arch, act)
    if reason is None:
        reason = too_wide(arch, head_dim)
    if reason is not None:
        raise NoKernel(f"no attention on a GPU: {reason}", "choose another `--kv-cache-dtype` or `--dtype`, or a CPU")
    if fine is None:
        fine = not prefill and compute in ("bf16", act)
    fine = fine and compute in ("f16", "bf16")
    sm = SMS[arch]
    if not prefill:
        for warps_m, warps_n, tile in _DECODE:
            for stages in (4, 3, 2):
                shape = AttendShape(act, compute, kv, head_dim, warps_m, warps_n, tile, stages, fine, soft_cap)
                if 2 * (shape.shared_bytes + sm.reserved) <= sm.shared:
                    return shape
    for warps_m, warps_n, tile in _PREFILL if prefill else _DECODE:
        if prefill and tile > _most_tokens(compute, kv, head_dim):
            continue
        shape = AttendShape(act, compute, kv, head_dim, warps_m, warps_n, tile, 2, fine, soft_cap)
        if shape.shared_bytes <= sm.block_shared:
            return shape
    raise NoKernel(
        f"attention with {head_dim} dimensions of {kv} does not fit into the {sm.block_shared} bytes of {arch}",
        "use `--dtype bfloat16`, or a KV cache of 8 bits",
    )


def _most_tokens(compute: str, kv: str, head_dim: int) -> int:
    """Of a step of prefill, for sums, scores and scales to stay in registers."""
    if compute == "f32":
        return max(16, 128 - head_dim)
    return 32 if head_dim > 192 and (kv == "int8" or compute == "tf32") else 64


def blocks_per_sm(arch: str, threads: int, registers: int, shared_bytes: int) -> int:
    """How many blocks run at once on one multiprocessor. Registers are given out to warps, 256 at a time."""
    sm, warps = SMS[arch], -(-threads // 32)
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = sm.registers // (per_warp * warps) if registers else sm.blocks
    by_shared = sm.shared // max(1, shared_bytes + sm.reserved)
    return min(sm.blocks, sm.warps // warps, by_registers, by_shared)
