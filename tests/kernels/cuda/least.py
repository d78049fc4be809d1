"""What each kind of kernel has to have, whatever the compiler makes of it: a row of gate.py is held against it.

These are facts that decide how fast a kernel can be, not how fast it is: warps to change between, bytes under way, and
what of the instructions is the work itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from llmctl.kernels.cuda.tiles import SMS


@dataclass(frozen=True, slots=True)
class Least:
    """What a kernel has to have.

    warps     at once on a multiprocessor: of sm_75; of those with 100 KiB of shared memory; of those with more
    streams   it is bound by reading memory: so many bytes under way as BYTES_UNDER_WAY asks for
    wide      of a hundred reads of global memory, those of 16 bytes
    products  of a hundred instructions of the main loop, products on tensor cores
    floats    of a hundred instructions, arithmetic on floats
    """

    warps: tuple[int, int, int]
    streams: bool = False
    wide: int = 0
    products: float = 0
    floats: int = 0

    def warps_of(self, arch: str) -> int:
        if arch == "sm_75":
            return self.warps[0]
        return self.warps[1 if SMS[arch].shared <= 100 << 10 else 2]


# So many bytes every multiprocessor has to have asked for, if memory that answers after 0.6 us is to give all of its
# bandwidth: GB/s and multiprocessors of the fastest GPU of each architecture, as its data sheet says.
_MEMORY = {
    "sm_75": (672, 72), "sm_80": (2039, 108), "sm_86": (1008, 84), "sm_89": (1008, 128), "sm_90a": (4800, 132),
    "sm_100a": (8000, 148), "sm_120": (1792, 170),
}  # fmt: skip
BYTES_UNDER_WAY = {arch: round(600 * bandwidth / processors) for arch, (bandwidth, processors) in _MEMORY.items()}

# The first that fits the beginning of a kernel's expression. Attention in tf32 with wide heads has one warp for each
# block, and on GPUs with 100 KiB of shared memory one block.
LEAST = (
    (r"attend<(Half|Bf16), \w+, (32|64|96|128), 1, ", Least((2, 4, 8), streams=True, wide=35, products=3)),
    (r"attend<(Half|Bf16), \w+, \d+, 1, ", Least((2, 2, 4), streams=True, wide=35, products=3)),
    (r"attend<\w+, \w+, (32|64|96|128), 1, ", Least((2, 2, 4), streams=True, wide=35, products=8)),
    (r"attend<\w+, \w+, \d+, 1, ", Least((1, 1, 2), streams=True, wide=35, products=8)),
    # Prefill, which tensor cores keep busy.
    (r"attend<(Half|Bf16), ", Least((4, 4, 4), wide=35, products=10)),
    (r"attend<", Least((4, 2, 4), wide=35, products=8)),
    (r"attend_merge<", Least((24, 24, 24), wide=10)),
    (r"latent_attend<", Least((8, 8, 8), streams=True, wide=50, products=3)),
    (r"linear_mma<.*, 4, 2, 2, 4, \d, End", Least((4, 4, 8), streams=True, wide=25, products=5)),
    (r"linear_mma<.*, 4, 1, 1, 4, \d, End", Least((4, 4, 8), streams=True, wide=25, products=3)),
    (r"linear_mma<.*, 2, 1, 1, 4, \d, End", Least((4, 4, 8), streams=True, wide=25, products=2)),
    (r"linear_mma<", Least((4, 4, 8), streams=True, wide=25, products=0.5)),
    (r"linear_vector<", Least((16, 16, 16), streams=True, wide=25)),
    (r"linear_fma<", Least((8, 12, 12), floats=40)),
    (r"(embed|bias_rows|act_mul|act_mul_apart)<", Least((32, 40, 48), wide=50)),
    (r"rms_norm(_quantize)?<", Least((32, 32, 32), wide=80)),
    (r"(copy_tokens|move_blocks)$", Least((32, 48, 64), wide=30)),
    (r"rope_store<", Least((28, 12, 28))),
    (r"latent_store<", Least((32, 32, 32))),
    (r"(lora_shrink|lora_expand)<", Least((28, 32, 32))),
    (r"moe_route<", Least((20, 20, 20))),
    (r"sample<", Least((32, 32, 32))),
    (r"(widen|gather_inputs|moe_combine|moe_group|linear_reduce)<", Least((32, 40, 48))),
    (r"(scatter_runs|gather_tokens|keep_tokens)$", Least((32, 48, 64))),
)


def least(expression: str) -> Least:
    """What a kernel has to have; KeyError if nobody said."""
    for pattern, what in LEAST:
        if re.match(pattern, expression):
            return what
    raise KeyError(expression)


def shortfalls(expression: str, arch: str, row: Mapping[str, int]) -> list[str]:
    """What of `least` a kernel has not got, and spilled registers. Rows without instructions are taken by the rest."""
    what = least(expression)
    asked = [("warps_per_sm", row["warps_per_sm"], what.warps_of(arch))]
    if what.streams:
        asked.append(("in_flight_per_sm", row["in_flight_per_sm"], BYTES_UNDER_WAY[arch]))
    if "instructions" in row:
        wide = row["load_16"] + row["copy_16"]
        asked += [
            ("reads of 16 bytes in a hundred", 100 * wide // max(1, row["reads"]), what.wide),
            ("products in a hundred of the loop", 100 * row["loop_mma"] / max(1, row["loop"]), what.products),
            ("arithmetic in a hundred", 100 * row["float"] // row["instructions"], what.floats),
        ]
    short = [f"{arch} {expression}: {fact} {has:.3g}, not {needs}" for fact, has, needs in asked if has < needs]
    spilled = row["spills"] + row.get("local", 0)
    return [*short, *([f"{arch} {expression}: {spilled} in local memory"] if spilled else [])]
