"""`DecoderSpec`: everything a decoder-only transformer needs to be built, and nothing that the tensors can tell.

Biases, a separate LM head and query/key norms are detected from the tensors present, not declared here.
"""

from __future__ import annotations

import msgspec

MAX_CONTEXT = 1 << 24  # as `--max-model-len` has it


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rotary position embedding, split-half order (dimension i is paired with i + head_dim / 2).

    kind              default | linear | llama3 | yarn | dynamic | longrope | factors: the last divides frequency i by
                      factors[i], head_dim / 2 of them, which is how GGUF files write llama3 down
    original_context  positions that the model was trained on, for the kinds that tell them from later ones
    attention_factor  cosines and sines are multiplied with it
    truncate          yarn: its passage from kept to stretched frequencies begins and ends at whole dimensions
    long_factors      longrope: instead of `factors` where sequences may be longer than the original context
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


class LatentSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Attention on latents (DeepSeek-V2): what heads share of a token, and how they read it.

    kv_rank     values of a latent, from which each head's key and value are made
    q_rank      values from which queries are made, 0 for the hidden state itself
    rope_dim    dimensions of the rotated key that all heads share, and of each query's part for it
    nope_dim    dimensions of keys and queries that are not rotated
    interleaved rotation pairs dimensions 2i and 2i + 1
    """

    kv_rank: int
    q_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool


class ExpertSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A mixture of experts in place of a layer's feed-forward half.

    chosen       how many of `count` compute a token
    ffn_size     inner values of an expert
    score        softmax | sigmoid
    normalize    the weights of a token's experts are divided by their sum;  scale: then multiplied with it
    biased       a vector beside the router's weight is added to scores for the choice alone
    dense        layers that have an ordinary feed-forward half
    shared_size  inner values of an ordinary half that computes every token beside the experts, 0 for none
    place, names where their tensors are in a layer, and what gate, up and down are called
    """

    count: int
    chosen: int
    ffn_size: int
    normalize: bool
    score: str = "softmax"
    scale: float = 1.0
    biased: bool = False
    dense: tuple[int, ...] = ()
    shared_size: int = 0
    place: str = "mlp"
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


class DecoderSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A decoder's shape. Sizes are counts of elements.

    windows          one entry per layer: positions that a query sees, its own included; 0 for full attention
    rope_local       the rope of layers that have a window, None if theirs is `rope` too
    query_scale      scores are query . key times this; 0 stands for 1 / sqrt(head_dim)
    embedding_scale  embedding rows are multiplied with it, rounded to the type that the weight is stored in
    norm_offset      what is added to the stored weights of every norm
    sandwich_norms   each half of a layer also ends in a norm, before it is added to the residual stream
    latent           attention on latents: then head_dim is that of queries and keys
    experts          mixtures of experts in all layers but its dense ones
    tied_head        a checkpoint may lack a head: it is the embedding then
    """

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
    rope_local: RopeSpec | None = None
    query_scale: float = 0.0
    embedding_scale: float = 1.0
    norm_offset: float = 0.0
    sandwich_norms: bool = False
    tied_head: bool = False
    latent: LatentSpec | None = None
    experts: ExpertSpec | None = None

    def window(self, layer: int) -> int:
        """The layer's window, 0 for full attention."""
        return self.windows[layer] if self.windows else 0

    def experts_of(self, layer: int) -> ExpertSpec | None:
        """The layer's experts, None if its feed-forward half is an ordinary one."""
        return None if self.experts is None or layer in self.experts.dense else self.experts

    @property
    def rope_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    def rope_of(self, layer: int) -> RopeSpec:
        """How the layer rotates its queries and keys."""
        return self.rope_local if self.rope_local is not None and self.window(layer) else self.rope
