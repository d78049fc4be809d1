"""What a model takes on a GPU besides its KV cache, and in what type it computes there.

Every part has a bound that something holds it to:

- buffers of steps, tables, logits and weights are counted as they are allocated, in the type of the activations;
- the workspace that ops share is as large as the largest op's, whose size follows from the most rows of a step: parts
  of contexts are cut into rounds (`work_list.py`), and splits of linear layers are chosen so that their sums are few;
- cuBLAS has a workspace of its own, given to it once (`cublasSetWorkspace`), and takes no other;
- captured graphs: see `graph_bytes`.

The driver's context is taken off what is free before any of this is sized. Machine code, NVIDIA's own included, is in
none of these figures: it comes out of the reserve.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..kernels.cuda.cublas import WORKSPACE_BYTES
from ..kernels.cuda.feed import SLOT_BYTES
from ..kernels.cuda.gpu import NODE_BYTES, SENT_BYTES
from ..kernels.cuda.linear import Linear, linear_workspace
from ..kernels.cuda.work_list import ITEM_BYTES, MOST_ITEMS, PARTS_BYTES
from ..kernels.formats import FLOAT_BYTES, parse_weight_format
from ..kernels.ops import ATTEND_SPLIT, MAX_TOP, PANEL, PRIVATE_ROWS
from .config import EngineConfig
from .gpu_types import FLOATS, activation_type
from .models.arch import DecoderSpec

_SUMS_BYTES = 64 << 20  # of linear layers whose inputs are split as suits the GPU: four blocks for each of its SMs
_SAMPLED_BYTES = 1 << 20  # what rows that are sampled with lists of ids need, and what grows with it seldom
_GRANULE = 256  # allocations are rounded up to it
_LARGEST_TILE = 64  # rows of a tile of attention
_SHORTEST_PART = 32  # tokens of a part of a context, where cuts suit the step

_KEPT_GRAPHS = 32  # a dozen numbers of rows, each with a few sizes of attention
_LAYER_NODES, _OTHER_NODES = 20, 16


def graph_bytes(spec: DecoderSpec) -> int:
    """The most that captured graphs may take, all together.

    Each is taken to need NODE_BYTES for a launch until it is captured, and then what the driver's free memory fell by,
    if that is more. The oldest go before the sum would exceed this (`cuda_graphs.py`).
    """
    return _KEPT_GRAPHS * (_LAYER_NODES * spec.num_layers + _OTHER_NODES) * NODE_BYTES


def gpu_workspace_bytes(
    spec: DecoderSpec, config: EngineConfig, length: int, weight_formats: Sequence[str], threads: int
) -> int:
    """At most so many bytes: of a step's activations, of logits, of what is kept for each sequence, and of the rest."""
    act = activation_type(weight_formats)
    value, rows = FLOAT_BYTES[act], config.max_num_batched_tokens
    read, written = _row_widths(spec)
    logits = -(-spec.vocab_size // PANEL) * PANEL
    # Rows with logits have these, for the sampler in float32 too, what it makes of them, and the normed rows before.
    logit_row = value * (logits + spec.hidden_size) + (4 if value == 4 else 8) * spec.vocab_size + 8 * MAX_TOP + 128
    blocks = -(-length // config.block_size)
    ropes = (1 if spec.rope_local is None else 2) * length * spec.rope_dim * 4
    lists = 2 * ITEM_BYTES * MOST_ITEMS * len(dict.fromkeys(map(spec.window, range(spec.num_layers))))
    groups = 1 + len({spec.window(layer) for layer in range(spec.num_layers)} - {0})
    buffers = (
        value * (rows * (read + written) + PRIVATE_ROWS * threads * (read + 2 * spec.hidden_size))
        + config.max_logit_rows * logit_row
        + 4 * config.max_num_seqs * (length + 1 + groups * blocks)
        + 16 * rows + ropes + lists
    )  # fmt: skip
    tensors = _GRANULE * (spec.num_layers * (16 + spec.num_layers) + 64)
    library = WORKSPACE_BYTES if value == 2 and not config.deterministic else 0
    graphs = 0 if config.enforce_eager else graph_bytes(spec)
    return (
        buffers + tensors + _shared_bytes(spec, config, length, weight_formats, act)
        + library + graphs + SLOT_BYTES + SENT_BYTES + _SAMPLED_BYTES
    )  # fmt: skip


def _row_widths(spec: DecoderSpec) -> tuple[int, int]:
    """Values of a row in what linear layers read, and in what they write."""
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shared = 0 if spec.experts is None else spec.experts.shared_size
    read = 2 * spec.hidden_size + spec.ffn_size + shared
    written = (2 if spec.sandwich_norms else 1) * spec.hidden_size + query + 2 * (spec.ffn_size + shared)
    if spec.latent is None:
        return read + query, written + 2 * key
    of = spec.latent
    return read + spec.num_heads * of.value_dim + of.q_rank, written + of.q_rank + of.kv_rank + of.rope_dim + PANEL


def _shared_bytes(spec: DecoderSpec, config: EngineConfig, length: int, weight_formats: Sequence[str], act: str) -> int:
    """Bytes of the workspace that ops share: what the largest of them needs."""
    value, rows = FLOAT_BYTES[act], config.max_num_batched_tokens
    parts = _parts_bytes(spec, config, length)
    if spec.latent is not None:
        pair = value * (2 * spec.latent.kv_rank + spec.latent.rope_dim)
        parts += rows * spec.num_heads * pair + 2 * _GRANULE
    sums = 0 if act == "f32" else _SUMS_BYTES
    if config.deterministic:
        sums = max(_fixed_sums(act, name, rows, *sizes) for name in weight_formats for sizes in _linears(spec))
    # Weights in codes may have an order of their own, in which their inputs are gathered.
    coded = any(name not in FLOATS for name in weight_formats)
    ordered = 4 * rows * max(inputs for _, inputs in _linears(spec)) if coded else 0
    return max(parts, sums + ordered, _expert_bytes(spec, rows, value))


def _parts_bytes(spec: DecoderSpec, config: EngineConfig, length: int) -> int:
    """Of parts of contexts: for all that a step can have, or as many as one launch may."""
    latent = spec.latent
    heads, width = (1, latent.kv_rank) if latent is not None else (spec.num_kv_heads, spec.head_dim)
    row = 4 * heads * (width + 2)
    parts = length // (ATTEND_SPLIT if config.deterministic else _SHORTEST_PART) + 2  # of one context
    packed = config.max_num_batched_tokens * (spec.num_heads // heads)
    every = parts * row * ((config.max_num_seqs + 1) * _LARGEST_TILE + packed)
    return min(every, max(PARTS_BYTES, parts * row * _LARGEST_TILE))


def _linears(spec: DecoderSpec) -> Iterator[tuple[int, int]]:
    """(outputs, inputs) of the kinds of linear layers that may split their inputs."""
    query = spec.num_heads * spec.head_dim
    yield query, spec.hidden_size
    yield spec.hidden_size, query
    yield spec.ffn_size, spec.hidden_size
    yield spec.hidden_size, spec.ffn_size
    if spec.latent is not None and spec.latent.q_rank:
        yield query, spec.latent.q_rank


def _fixed_sums(act: str, format_name: str, rows: int, outputs: int, inputs: int) -> int:
    """Of a layer's partial sums where splits follow from its inputs alone."""
    weight = parse_weight_format(format_name)
    if weight.is_float and act not in (weight.kind, "f32"):
        return 0
    return linear_workspace(Linear(act, weight, outputs, inputs), rows, 1, deterministic=True)


def _expert_bytes(spec: DecoderSpec, rows: int, value: int) -> int:
    """Of a mixture of experts: scores, who computes a row and in which tile, and what each makes of it."""
    experts = spec.experts
    if experts is None:
        return 0
    pairs = rows * experts.chosen
    tiles = 4 * (pairs + 128 * min(experts.count, pairs)) + 4 * (pairs // 16 + min(experts.count, pairs))
    each = value * (experts.ffn_size + spec.hidden_size) + 8
    return rows * experts.count * value + pairs * each + tiles + _SUMS_BYTES // 4 + 8 * _GRANULE
