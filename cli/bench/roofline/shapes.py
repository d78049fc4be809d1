"""The shapes that kernels are measured on: those of the models that people run, by their size."""

from __future__ import annotations

from dataclasses import dataclass

from ....kernels.formats import KV_BYTES, WeightFormat, parse_weight_format

ROWS = (1, 4, 16, 64, 512)
CONTEXTS = (512, 2048)  # tokens before the rows that attend

WEIGHT_FORMATS = tuple(
    parse_weight_format(name)
    for name in (
        *("int4g32", "int4g32min", "int4g64", "int4g128", "int4g128int", "int8g32", "int16g32"),
        *("f16", "bf16", "f32"),
    )
)
KV_KINDS = tuple(KV_BYTES)
LATENT_KINDS = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder's sizes. `like` is a model that has them."""

    size: str
    like: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int

    def linears(self) -> tuple[tuple[str, int, int], ...]:
        """(part, outputs, inputs) of each distinct linear layer. Query and output projections are alike here."""
        return (
            ("q_proj", self.heads * self.head_dim, self.hidden),
            ("k_proj", self.kv_heads * self.head_dim, self.hidden),
            ("gate_proj", self.ffn, self.hidden),
            ("down_proj", self.hidden, self.ffn),
            ("lm_head", self.vocab, self.hidden),
        )

    def weight_formats(self) -> tuple[WeightFormat, ...]:
        """What a model of this size is kept in: of 8 billion weights only 4-bit ones."""
        return tuple(form for form in WEIGHT_FORMATS if self.size != "8B" or form.kind == "int4")


SHAPES = (
    Shape("0.1B", "SmolLM2-135M", 576, 9, 3, 64, 1536, 49152),
    Shape("0.5B", "Qwen2.5-0.5B", 896, 14, 2, 64, 4864, 151936),
    Shape("1.5B", "Qwen2.5-1.5B", 1536, 12, 2, 128, 8960, 151936),
    Shape("8B", "Llama-3.1-8B", 4096, 32, 8, 128, 14336, 128256),
)
