"""The face of every op: one typed record of arguments per op, the same for every device, and what the op must compute.

An op is built once (`registry.bind`) from buffers at fixed addresses and then run many times without arguments:
whatever varies per step is read from the `Batch` arrays. A `Program` is a recorded list of such ops. Arrays are numpy
views of arenas that Python owns; kernels keep addresses only, write to the given outputs, allocate nothing.

Meaning shared by all implementations (the reference in `reference/` is the oracle):
- Rows are independent: an output row depends on its own input row only, in one fixed reduction order.
- Integer weight formats are multiplied with quantized activations, and that quantization is part of the meaning:
  per row and group of inputs, scale = absmax / Q, code = round-half-to-even(x / scale), with Q = 127 in int8 for int4
  weights, Q = 2047 in int16 for int8 weights, Q = 8191 in int16 for int16 weights, each for the group of the weight.
  Integer sums inside a group are exact; across groups one fma per group in ascending order, in float32.
- Float weight formats are multiplied with float32 activations, one fma per input in ascending order.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .formats import KVFormat, WeightFormat

F32Array = npt.NDArray[np.float32]
I32Array = npt.NDArray[np.int32]
U8Array = npt.NDArray[np.uint8]
AnyArray = npt.NDArray[np.generic]

NO_QUAD = 255  # of an ActForm's wide quads: this group has none
WIDE_TOP = 2032.0  # largest wide code: 16 * 127, so that its high part is a byte
CACHE_LINE = 64
PANEL = 16  # outputs per packed panel; every row buffer is padded to a multiple of it
PRIVATE_ROWS = 2  # with at most this many rows each thread computes an Act for itself, which saves a barrier

# What activations are stored in: float32 on a CPU; on a GPU also the others, bfloat16 as its bits.
ELEMENT_TYPES = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}

# Batch.counts
ROWS, SEQS, LOGIT_ROWS, LARGEST_ONLY = 0, 1, 2, 3


class Op(Protocol):
    """A bound op. `run` computes it for the rows now in the batch."""

    def run(self) -> None: ...


class Program(Protocol):
    """A recorded list of ops. `replay` runs them all for the rows now in the batch."""

    def replay(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What varies per step, at fixed addresses.

    counts      int32 [8]: number of rows, of sequences, of rows with logits; whether of these only each row's largest
                logit is looked at, 1 or 0
    token       int32 [max_rows]: token id of each row (a row is one position of one sequence)
    position    int32 [max_rows]
    slot        int32 [max_rows]: which block table the row reads and writes through
    seq_first   int32 [max_seqs]: first row of each sequence; its rows are consecutive with ascending positions
    seq_rows    int32 [max_seqs]: how many rows
    logit_rows  int32 [max_logit_rows]: which rows get logits, ascending
    tables      one int32 [max_slots, max_blocks] per KV group: block ids in order of position
    """

    counts: I32Array
    token: I32Array
    position: I32Array
    slot: I32Array
    seq_first: I32Array
    seq_rows: I32Array
    logit_rows: I32Array
    tables: tuple[I32Array, ...]


def make_batch(max_rows: int, max_seqs: int, max_logit_rows: int, tables: tuple[I32Array, ...]) -> Batch:
    """An empty batch for at most these sizes."""
    return Batch(
        np.zeros(8, np.int32),
        np.zeros(max_rows, np.int32),
        np.zeros(max_rows, np.int32),
        np.zeros(max_rows, np.int32),
        np.zeros(max_seqs, np.int32),
        np.zeros(max_seqs, np.int32),
        np.zeros(max_logit_rows, np.int32),
        tables,
    )


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A [n, k] weight in the kernel's layout (`cpu/pack.py`), as bytes: a view of the mapped cache file.

    order   int32 [k]: column j multiplies input order[j], for an integer weight whose groups are of inputs that are not
            side by side (GPTQ with desc_act); None: column j multiplies input j
    """

    format: WeightFormat
    n: int
    k: int
    data: U8Array
    order: I32Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ActForm:
    """Activations quantized for one weight kind, group and order of inputs.

    codes   int8 or int16 [rows, k];  scales float32 [rows, k / group];  sums int32 [rows, k / group]: sum of the codes
    order   code j is of value order[j], of value j if None
    wide    uint8 [k / group], of i8 only: four codes of the group, from 4 * wide on, have 12 bits, so that outliers
            there leave the others their precision; NO_QUAD where none has. Codes hold their low parts, in [-8, 7]
    high    int32 [rows, k / group]: four bytes, the high parts, which count 16 times; None unless i8
    """

    kind: str  # "i8" | "i12" | "i14"
    group: int
    codes: AnyArray
    scales: F32Array
    sums: I32Array
    order: I32Array | None = None
    wide: U8Array | None = None
    high: I32Array | None = None

    @property
    def can_widen(self) -> bool:
        """Whether it may have wide quads: it has 8 bits, and groups in which a byte can number the quads."""
        return self.kind == "i8" and self.group // 4 <= NO_QUAD


@dataclass(frozen=True, slots=True, eq=False)
class Act:
    """Rows of activations and every quantized form that their consumers read.

    values  float32 [max_rows + PRIVATE_ROWS * threads, k]; the rows behind max_rows are private to a thread
    """

    k: int
    max_rows: int
    values: F32Array
    forms: tuple[ActForm, ...]


def act_form_of(weight: WeightFormat) -> tuple[str, int] | None:
    """(kind, group) of the activations that this weight format is multiplied with, None for plain float32."""
    if weight.kind == "int4":
        return "i8", weight.group
    if weight.kind == "int8":
        return "i12", weight.group
    if weight.kind == "int16":
        return "i14", weight.group
    return None


def act_forms(
    consumers: Sequence[WeightFormat], orders: Sequence[I32Array | None] = ()
) -> list[tuple[str, int, I32Array | None]]:
    """(kind, group, order) of each form that linears of these formats need.

    `orders` is parallel to `consumers`: in which order each reads its inputs; () if all read them as they are.
    """
    wanted: dict[tuple[str, int, bytes], I32Array | None] = {}
    for weight, order in zip(consumers, orders or (None,) * len(consumers), strict=True):
        if (form := act_form_of(weight)) is not None:
            wanted[(*form, b"" if order is None else order.tobytes())] = order
    return sorted(((kind, group, order) for (kind, group, _), order in wanted.items()), key=lambda form: form[:2])


def make_act(
    k: int,
    max_rows: int,
    threads: int,
    consumers: Sequence[WeightFormat],
    orders: Sequence[I32Array | None] = (),
    dtype: str = "f32",
) -> Act:
    """Buffers for activations of width k that linears of these formats will read; `orders` as in `act_forms`."""
    rows = max_rows + PRIVATE_ROWS * threads
    forms = []
    for kind, group, order in act_forms(consumers, orders):
        codes = _zeros((rows, k), np.int8 if kind == "i8" else np.int16)
        scales = _zeros((rows, k // group), np.float32)
        sums = _zeros((rows, k // group), np.int32)
        high = _zeros((rows, k // group), np.int32) if kind == "i8" else None
        forms.append(ActForm(kind, group, codes, scales, sums, order, None, high))
    values = _zeros((rows, k), ELEMENT_TYPES[dtype])
    return Act(k, max_rows, values, tuple(forms))


def with_orders(act: Act, orders: Sequence[I32Array | None]) -> Act:
    """The same buffers with other orders of inputs, one per form."""
    forms = tuple(dataclasses.replace(form, order=order) for form, order in zip(act.forms, orders, strict=True))
    return dataclasses.replace(act, forms=forms)


def with_wide(act: Act, wide: Sequence[U8Array | None]) -> Act:
    """The same buffers with other wide quads, one array per form."""
    forms = tuple(dataclasses.replace(form, wide=quads) for form, quads in zip(act.forms, wide, strict=True))
    return dataclasses.replace(act, forms=forms)


def find_form(act: Act, weight: PackedWeight) -> ActForm | None:
    """The form of the activations that this weight is multiplied with, None if they have no such form."""
    for form in act.forms:
        if (form.kind, form.group) == act_form_of(weight.format) and _same_order(form.order, weight.order):
            return form
    return None


def _same_order(a: I32Array | None, b: I32Array | None) -> bool:
    return a is b or (a is not None and b is not None and np.array_equal(a, b))


def make_rows(width: int, max_rows: int, dtype: str = "f32") -> F32Array:
    """A buffer [max_rows, width rounded up to whole panels]: float32, or what a GPU computes in."""
    return _zeros((max_rows, -(-width // PANEL) * PANEL), ELEMENT_TYPES[dtype])


def _zeros(shape: tuple[int, int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Zeros that begin with a cache line: numpy's own begin 16 bytes into one, and each wide vector is then in two."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.zeros(size + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + size].view(dtype).reshape(shape)


@dataclass(frozen=True, slots=True, eq=False)
class KeySteering:
    """How K is made ready for 8 bits, and errors of rounding it steered to where queries do not look.

    The centre is taken off all keys, which softmax does not notice, and each pair of dimensions is divided by its level
    and multiplied by it in queries; levels are powers of two, which round nothing. The rest is of what K then is.

    Pairs of dimensions (d, d + head_dim / 2), as the rotation has them, are rounded one after another. The error of
    each, stored minus true and turned back by the row's rotation, is taken on by the pairs behind it: before these are
    rounded, they are lowered by `follow` times it, turned by the row's rotation. What is stored are values of the
    format as ever; readers need not know. A key with NaN, or in int8 1e18 or more, is rounded as without steering.

    order   int32 [kv_heads, head_dim / 2]: d of each pair, in the order in which they are rounded
    follow  float32 [kv_heads, head_dim / 2, 4, steering_width(head_dim)]: for the pair at place i the row
            2 * target + source (0 for d, 1 for d + head_dim / 2) has at j > i what an error in its source half lowers
            the target half of the pair at place j by; elsewhere 0
    level   float32 [kv_heads, head_dim / 2]: of pair d; None: 1
    centre  float32 [kv_heads, head_dim], of K rotated and divided by its scales; None: 0. Not where something besides K
            counts in the softmax (sinks) or scores are bent (soft caps)
    """

    order: I32Array
    follow: F32Array
    level: F32Array | None = None
    centre: F32Array | None = None


def steering_width(head_dim: int) -> int:
    """Floats of a row of `KeySteering.follow`: pairs of a head, rounded up to whole vectors."""
    return -(-(head_dim // 2) // 8) * 8


@dataclass(frozen=True, slots=True, eq=False)
class KVLayer:
    """One layer's part of a paged KV arena.

    A block is one contiguous run of `block_stride` bytes and holds, for each layer of the group and each KV head,
    K transposed [head_dim][block_size], then V [block_size][head_dim], each followed by its scales [block_size] if the
    format has any. The layer's part begins `layer_offset` bytes into the block. Kernels read K and V only from here,
    as stored, also those of the chunk being computed. `steering` is for the store of an 8-bit format.

    scales  float32 [2, kv_heads], for fp8: K and V are divided by these before they are stored, queries and what
            attention gives multiplied; None: by 1
    """

    arena: U8Array
    block_stride: int
    layer_offset: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    format: KVFormat
    group: int  # index into Batch.tables
    steering: KeySteering | None = None
    scales: F32Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EmbedArgs:
    """out[row] = dequantized weight[token[row]] * scale; the weight, [vocab, hidden], may be the head's too.

    It is packed like a linear's. `scale` is rounded to float32 first.
    """

    batch: Batch
    weight: PackedWeight
    out: F32Array
    scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class NormArgs:
    """act.values[i] = x[r] / sqrt(mean(x[r]^2) + eps) * weight, then every form of act.

    r = i for all rows, or r = batch.logit_rows[i] over the logit rows if `logit_rows_only`.
    """

    batch: Batch
    x: F32Array
    weight: F32Array
    eps: float
    act: Act
    logit_rows_only: bool


@dataclass(frozen=True, slots=True, eq=False)
class NormAddArgs:
    """out[r] += x[r] / sqrt(mean(x[r]^2) + eps) * weight, over the batch's rows; the width is that of `weight`."""

    batch: Batch
    x: F32Array
    weight: F32Array
    eps: float
    out: F32Array


@dataclass(frozen=True, slots=True, eq=False)
class LinearArgs:
    """out[i, :n] = act[i] @ weight.T (+ bias), or += if `add`. Columns from n up to whole panels are scratch.

    Over the batch's rows, or its logit rows if `logit_rows_only`. If `may_screen`, a step with LARGEST_ONLY may leave
    outputs that are not the largest of their row near their values and below it; which one is the largest, its value,
    and what is as large do not change.
    """

    batch: Batch
    act: Act
    weight: PackedWeight
    bias: F32Array | None  # padded with zeros to whole panels
    out: F32Array
    add: bool
    logit_rows_only: bool
    may_screen: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class RopeStoreArgs:
    """Optional RMS norm of each query and key head, rotation by the row's position, q *= `q_scale`; K and V are stored.

    q [rows, heads * head_dim], k and v [rows, kv_heads * head_dim] (rows padded to panels), in place.
    Rotation pairs dimension i with i + head_dim / 2: (a, b) -> (a cos - b sin, b cos + a sin).
    cos, sin: float32 [max_positions, head_dim / 2], or both None for no rotation.
    """

    batch: Batch
    q: F32Array
    k: F32Array
    v: F32Array
    q_norm: F32Array | None
    k_norm: F32Array | None
    norm_eps: float
    cos: F32Array | None
    sin: F32Array | None
    num_heads: int
    q_scale: float
    kv: KVLayer


@dataclass(frozen=True, slots=True, eq=False)
class AttendArgs:
    """act.values[row, h * head_dim :] = softmax(q . K) V over positions max(0, p + 1 - window) .. p, and act's forms.

    Head h reads KV head h // (num_heads / num_kv_heads); window 0 is full attention. The context is cut at fixed
    multiples of ATTEND_SPLIT, partial results are merged in ascending order: bits do not depend on how many queries,
    rows or threads there are, nor on the block size. Positions behind a row's own are never read.

    soft_cap  scores x become soft_cap * tanh(x / soft_cap); 0: they stay
    sinks     float32 [num_heads]: one more score of every row of the head, whose value is 0; None: there is none
    compute   what a GPU multiplies in: f32 | tf32 | bf16 | f16, "" for what loses nothing
    """

    batch: Batch
    q: F32Array
    num_heads: int
    kv: KVLayer
    window: int
    max_positions: int
    act: Act
    soft_cap: float = 0.0
    sinks: F32Array | None = None
    compute: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class LatentArgs:
    """Multi-head latent attention (DeepSeek-V2, 2024): all heads share what is stored of a token.

    That is one row of `kv`, whose head_dim is rank + rope_dim: a latent of `rank` values, then a rotated key. The rows
    of a block are [block_size][head_dim], in a float format, with one KV head and no second half for values.

    q       [rows, num_heads * (nope_dim + rope_dim)], latent [rows, rank + rope_dim], as linears gave them
    kv_norm RMS norm of the latent before it is stored
    up      [num_heads * (nope_dim + value_dim), rank]: from a latent to each head's key (without its rotated part) and
            value. It is not applied to what is stored but, by head, to the query before and to the result after
    Rotation pairs dimensions 2i and 2i + 1 if `interleaved`, else i and i + rope_dim / 2; cos and sin as in
    RopeStoreArgs.
    act.values[row, h * value_dim :] = softmax(q . K * q_scale) V over positions 0 .. p, and act's forms.
    """

    batch: Batch
    q: F32Array
    latent: F32Array
    kv_norm: F32Array
    norm_eps: float
    up: PackedWeight
    cos: F32Array
    sin: F32Array
    interleaved: bool
    num_heads: int
    nope_dim: int
    value_dim: int
    q_scale: float
    kv: KVLayer
    act: Act


ATTEND_SPLIT = 128


@dataclass(frozen=True, slots=True, eq=False)
class ActMulArgs:
    """act.values[i] = f(gate[i]) * up[i] with f = silu or gelu_tanh, then every form of act."""

    batch: Batch
    gate: F32Array
    up: F32Array
    activation: str
    act: Act


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsArgs:
    """Mixture of experts: out[row] += the weighted sum of what `choices` experts make of act[row].

    Scores are the softmax, or of each expert by itself the sigmoid, of act @ router.T. A row goes to the experts for
    which score + `bias` is highest, equal ones to lower ids; weights are their scores, divided by their sum if
    `normalize`, times `scale`. Expert e makes (f(act @ gate[e].T) * (act @ up[e].T)) @ down[e].T, f as in ActMulArgs.
    Weights of every format are multiplied as the values that they stand for.

    router  [experts, hidden];  gate, up  [ffn, hidden] and down  [hidden, ffn] of each expert
    bias    float32 [experts]
    """

    batch: Batch
    act: Act
    router: PackedWeight
    bias: F32Array | None
    gate: tuple[PackedWeight, ...]
    up: tuple[PackedWeight, ...]
    down: tuple[PackedWeight, ...]
    choices: int
    score: str  # softmax | sigmoid
    normalize: bool
    scale: float
    activation: str
    out: F32Array


@dataclass(frozen=True, slots=True, eq=False)
class KVCopyArgs:
    """`copy(source, target, tokens)`: the first `tokens` positions of one block to another, in layers side by side.

    The first of them begins `layer_offset` bytes into the block.

    latent  a block holds rows for both K and V, as LatentArgs says
    """

    arena: U8Array
    block_stride: int
    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    format: KVFormat
    layer_offset: int = 0
    latent: bool = False


# One record per logits row. Addresses point at arrays that the caller keeps alive.
SAMPLE_ROW = np.dtype(
    [
        ("seed", np.uint64),
        ("tokens", np.uint64),  # address of int32 [length]: the sequence so far
        ("bias_ids", np.uint64),  # address of int32 [num_bias]
        ("bias_values", np.uint64),  # address of float32 [num_bias]; -inf bans a token
        ("length", np.int32),  # tokens known; the sampled token gets absolute position `length`
        ("prompt_len", np.int32),
        ("num_bias", np.int32),
        ("top_k", np.int32),  # 0: off
        ("logprobs", np.int32),  # -1: none, else how many top ones
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("reserved", np.int32),
    ]
)
MAX_TOP = 20


@dataclass(frozen=True, slots=True, eq=False)
class SampleArgs:
    """`sample(rows)`: one token for each of the first `rows` logits rows, which are left unchanged.

    In this order: finite check (a row with NaN or Inf gets token -1 and finite 0); logprobs of the raw logits
    (natural log); repetition penalty over prompt and output (positive logits divided, others multiplied); frequency
    penalty x count and presence penalty over the output; bias; greedy if temperature is 0, else divide by temperature;
    top-k, then top-p on the renormalised rest (the token that crosses p stays), then min-p (relative to the most
    likely); then argmax of score + Gumbel noise, with noise = -log(-log(u)), u from Philox4x32-10 with key = seed and
    counter = (token id / 4, position, 0, 0), lane token id % 4. Ties go to the lower id everywhere.
    """

    logits: F32Array  # [max_rows, padded vocab]
    vocab_size: int
    rows: AnyArray  # SAMPLE_ROW [max_rows]
    token: I32Array  # [max_rows]
    logprob: F32Array  # [max_rows]
    top_ids: I32Array  # [max_rows, MAX_TOP]
    top_logprobs: F32Array  # [max_rows, MAX_TOP]
    finite: U8Array  # [max_rows]


class KVCopy(Protocol):
    def __call__(self, source: int, target: int, tokens: int) -> None: ...


class Sample(Protocol):
    def __call__(self, rows: int) -> None: ...
