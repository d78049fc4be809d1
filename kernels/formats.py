"""Storage formats as frozen records: what the bits of a weight or of a KV block mean.

A format says how values are stored, not how they are computed with (that is a kernel's business) nor how they are laid
out for a kernel (`kernels/cpu/pack.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import UsageError

FLOAT_BYTES = {"f32": 4, "f16": 2, "bf16": 2}
SCALE_BYTES = {**FLOAT_BYTES, "e8m0": 1}
# What the 16 codes of NF4 mean (QLoRA, arXiv 2305.14314, appendix E), as float32.
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
KV_BYTES = {**FLOAT_BYTES, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "int16": 2}

FP8_LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How a [n, k] weight is stored.

    kind    f32 | f16 | bf16 | int16 | int8 | int4, and for CUDA alone fp8_e4m3 (q * s, q the value of a float8) and nf4
            (v * s, v one of the 16 values of NF4 that the code names)
    group   inputs that share one scale (0 for the float kinds)
    zero    how a code q becomes a value, with scale s (float16) of its group:
              "none"  int16: q * s         (q in -8192..8192, s a power of two; for CPUs alone)
                      int8: q * s          (q in -128..127);  int4: (q - 8) * s  (q in 0..15)
              "min"   q * s + m            (m a float16 per group, as in GGUF Q4_1)
              "int"   int4: (q - z) * s    (z in 0..15 per group, as in AWQ and GPTQ)
    scales  f16 | f32 | e8m0 (2 ** (byte - 127), 255 for NaN), as int16 has them: what s and m are. f32, a group of 16
            and int8 with "min" describe what checkpoints store (GGUF's K-quants), which no CPU kernel reads
    """

    kind: str
    group: int = 0
    zero: str = "none"
    scales: str = "f16"

    @property
    def is_float(self) -> bool:
        return self.kind in FLOAT_BYTES

    @property
    def name(self) -> str:
        """A short stable name: f32, int16g32, int8g32, int4g32, int4g32min, int4g64int, int4g32min-f32."""
        if self.is_float:
            return self.kind
        wide = "-f32" if self.scales == "f32" else ""
        return f"{self.kind}g{self.group}" + ("" if self.zero == "none" else self.zero) + wide

    def bits_per_weight(self) -> float:
        """Bits per weight with scales and zeros counted."""
        if self.is_float:
            return 8.0 * FLOAT_BYTES[self.kind]
        scale = 8 * SCALE_BYTES[self.scales]
        extra = scale + {"none": 0, "min": scale, "int": 8}[self.zero]
        return {"int16": 16, "int8": 8, "fp8_e4m3": 8}.get(self.kind, 4) + extra / self.group


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How K and V are stored in the cache.

    f32, f16, bf16  as they are
    fp8_e4m3        float8 with 4 bits of exponent and no infinity, largest 448
    fp8_e5m2        the upper half of a float16, largest finite 57344
    int8            code * s, with a scale s per token and KV head, a bfloat16 not below absmax / 127, for K and for V
    int16           likewise, with absmax / 8191 for K and absmax / 2047 for V: about as exact as float16, and made for
                    integer dot products; codes of two dimensions of K, and of two positions of V, lie side by side

    What is too large for the 8-bit formats becomes their largest value, infinity too. A NaN in a token's K or V of one
    head is stored as a NaN in the first dimension of that K (int8, int16: in its scale) and nowhere else: it reaches
    everything that attends to the token, as it must, and never what does not.
    """

    kind: str

    @property
    def bytes_per_value(self) -> int:
        return KV_BYTES[self.kind]

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scale of one token's K, or V, of one head."""
        return 2 if self.kind in ("int8", "int16") else 0

    @property
    def pairs(self) -> bool:
        """Whether codes of two dimensions of K, and of two positions of V, lie side by side."""
        return self.kind == "int16"

    def head_bytes(self, head_dim: int) -> int:
        """Bytes of one token's K, or V, of one head with its scale."""
        return head_dim * self.bytes_per_value + self.scale_bytes


F32 = WeightFormat("f32")
F16 = WeightFormat("f16")
BF16 = WeightFormat("bf16")
INT16 = WeightFormat("int16", 32, "none", "e8m0")
INT16_TOP = 8192  # largest code: with one of 14 bits, 32 products stay below 2**31


def parse_weight_format(name: str) -> WeightFormat:
    """The format that kernels read whose `name` this is; raises UsageError for anything else."""
    if name in FLOAT_BYTES:
        return WeightFormat(name)
    if name == INT16.name:
        return INT16
    for kind in ("nf4", "fp8_e4m3"):
        group = name.removeprefix(kind + "g").removesuffix("-f32")
        if name == f"{kind}g{group}-f32" and group.isdigit():
            return WeightFormat(kind, int(group), "none", "f32")
    for kind in ("int8", "int4"):
        if name.startswith(kind + "g"):
            rest = name[len(kind) + 1 :]
            for zero in ("min", "int"):
                if rest.endswith(zero):
                    return WeightFormat(kind, int(rest[: -len(zero)]), zero)
            if rest.isdigit():
                return WeightFormat(kind, int(rest))
    raise UsageError(
        f"unknown weight format `{name}`",
        "known: f32, f16, bf16, int16g32, int8gN, int4gN, int4gNmin, int4gNint, nf4gN-f32, fp8_e4m3gN-f32",
    )
