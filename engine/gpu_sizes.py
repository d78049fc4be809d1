"""What a model takes on a GPU besides its KV cache, and in what type it computes there."""

from __future__ import annotations

from collections.abc import Sequence

from ..kernels.cuda.feed import SLOT_BYTES
from ..kernels.cuda.work_list import PARTS_BYTES
from ..kernels.formats import FLOAT_BYTES
from ..kernels.ops import MAX_TOP, PANEL
from .config import EngineConfig
from .models.arch import DecoderSpec

_FLOATS = ("f32", "f16", "bf16")
_SUMS_BYTES = 64 << 20  # of linear layers whose inputs are split
GRAPH_BYTES = 64 << 20  # of captured graphs, all together


def activation_type(weight_formats: Sequence[str]) -> str:
    """f32, f16 or bf16: the type of the weights that are floats, bf16 if none is, f32 if they are of several."""
    floats = {name for name in weight_formats if name in _FLOATS}
    if len(floats) > 1:
        return "f32"
    return floats.pop() if floats else "bf16"


def gpu_weight_bytes(spec: DecoderSpec, weight_bytes: int, weight_formats: Sequence[str]) -> int:
    """Bytes of the weights: as packed, and the embedding as rows of values, which may be the head's weight too."""
    return weight_bytes + spec.vocab_size * spec.hidden_size * FLOAT_BYTES[activation_type(weight_formats)]


def gpu_workspace_bytes(spec: DecoderSpec, config: EngineConfig, length: int) -> int:
    """At most so many bytes: of a step's activations, of logits, of what is kept for each sequence, and of tables.

    Activations count as float32 whatever they are. Of a row with logits there are these, the same in float32, and what
    the sampler makes of them.
    """
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    read = 3 * spec.hidden_size + query + spec.ffn_size
    written = (2 if spec.sandwich_norms else 1) * spec.hidden_size + query + 2 * key + 2 * spec.ffn_size
    logits = -(-spec.vocab_size // PANEL) * PANEL
    sequence = 4 * (length + 1 + -(-length // config.block_size))
    rope = (1 if spec.rope_local is None else 2) * length * spec.head_dim * 4
    rows = config.max_num_batched_tokens * (read + written) * 4
    logit_rows = config.max_logit_rows * (3 * 4 * logits + 8 * MAX_TOP + 128)
    rows += config.max_num_batched_tokens * _expert_bytes(spec)
    graphs = 0 if config.enforce_eager else GRAPH_BYTES
    return (
        rows + logit_rows + config.max_num_seqs * sequence + rope
        + PARTS_BYTES + _SUMS_BYTES + graphs + 2 * SLOT_BYTES
    )  # fmt: skip


def _expert_bytes(spec: DecoderSpec) -> int:
    """Of one row in a mixture of experts: its scores, who computes it and in which tile, and what each makes of it."""
    experts = spec.experts
    if experts is None:
        return 0
    return 4 * (experts.count + experts.chosen * (4 + experts.ffn_size + spec.hidden_size) + 3 * experts.shared_size)
