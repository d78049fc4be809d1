"""`DecoderSpec`: everything a decoder-only transformer needs to be built, and nothing that the tensors can tell.

Biases, a separate LM head and query/key norms are detected from the tensors present, not declared here.
"""

from __future__ import annotations

import msgspec


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rotary position embedding, split-half order (dimension i is paired with i + head_dim / 2).

    kind    default | linear | llama3 | factors: the last divides frequency i by factors[i], head_dim / 2 of them, which
            is how GGUF files write llama3 down
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    factors: tuple[float, ...] = ()


class DecoderSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder's shape. Sizes are counts of elements; `windows` has one entry per layer, 0 for full attention."""

    family: str  # for display only: nothing outside families.py may test it
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope: RopeSpec
    activation: str = "silu"  # silu | gelu_tanh
    windows: tuple[int, ...] = ()
