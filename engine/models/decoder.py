"""One decoder for every family in the table: a `DecoderSpec` and packed weights become a recorded Program.

A layer is norm, q/k/v, rope + KV store, attend, o; norm, gate/up, activation, down; and with sandwich norms, one more
norm after o and after down. What differs between families is in the spec, or shows in the tensors that are there
(biases, query and key norms, a separate head).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...kernels import registry
from ...kernels.formats import BF16, F16, WeightFormat
from ...kernels.ops import (
    Act,
    ActMulArgs,
    AttendArgs,
    Batch,
    EmbedArgs,
    ExpertsArgs,
    F32Array,
    KVLayer,
    LatentArgs,
    LinearArgs,
    NormAddArgs,
    NormArgs,
    Op,
    PackedWeight,
    Program,
    RopeStoreArgs,
    U8Array,
    act_forms,
    make_act,
    make_rows,
    with_orders,
    with_wide,
)
from .arch import DecoderSpec, ExpertSpec, LatentSpec, RopeSpec
from .rope import rope_tables

_LATENT_EPS = 1e-6  # of the norms inside attention on latents, whatever the others have


@dataclass(frozen=True, slots=True)
class Limits:
    """The most rows, rows with logits and positions that the buffers are made for, and the threads that use them.

    attention_compute  `compute` of AttendArgs
    activations  what buffers hold: f32, and on a GPU also f16 or bf16
    """

    max_rows: int
    max_logit_rows: int
    max_positions: int
    threads: int
    attention_compute: str = ""
    activations: str = "f32"


Wide = Mapping[str, tuple[U8Array | None, ...]]  # the wide quads of an act's forms, by the first linear that reads it


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """A linear of the layers: the `op`th op of a decoder, what it reads and its weight. Those that share an input have
    the same Act.
    """

    op: int
    name: str
    act: Act
    weight: PackedWeight


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """`program.replay()` computes `logits` [max_logit_rows, vocabulary padded to panels] for the rows in the batch.

    `ops` are in the order in which they run; `kinds` says what each is, alike in every layer ("norm", "linear q_proj").
    `readers` are the layers' linears. `queries` are those of the layer that ran last, as it attends with them; None if
    they are not to be had.
    """

    program: Program
    ops: tuple[Op, ...]
    kinds: tuple[str, ...]
    logits: F32Array
    hidden: F32Array
    queries: F32Array | None = None
    readers: tuple[Reader, ...] = ()


def build_decoder(
    spec: DecoderSpec,
    weights: Mapping[str, PackedWeight],
    vectors: Mapping[str, F32Array],
    wide: Wide,
    batch: Batch,
    kv: Mapping[int, KVLayer],
    limits: Limits,
    kernels: str,
) -> Decoder:
    """Bind every op of the decoder to its weights and buffers, in the order in which they run.

    weights, vectors   by Hugging Face tensor name; vectors are norms and biases
    wide               wide quads of what the layers' linears read; none where it says nothing
    kv                 each layer's view of its KV group's arena

    Raises NoKernel when an op has no kernel for its formats.
    """
    return _Builder(spec, weights, vectors, wide, batch, kv, limits, kernels).build()


class _Builder:
    def __init__(
        self,
        spec: DecoderSpec,
        weights: Mapping[str, PackedWeight],
        vectors: Mapping[str, F32Array],
        wide: Wide,
        batch: Batch,
        kv: Mapping[int, KVLayer],
        limits: Limits,
        kernels: str,
    ) -> None:
        self.spec, self.weights, self.vectors, self.wide = spec, weights, vectors, wide
        self.batch, self.kv, self.limits, self.kernels = batch, kv, limits, kernels
        self.ops: list[Op] = []
        self.kinds: list[str] = []
        self.readers: list[Reader] = []
        self.acts: dict[tuple[str, tuple[tuple[str, int], ...]], Act] = {}
        self.buffers: dict[str, F32Array] = {}
        self.ropes: dict[RopeSpec, tuple[F32Array, F32Array]] = {}

    def build(self) -> Decoder:
        spec, rows = self.spec, self.limits.max_rows
        embedding = self.weights["model.embed_tokens.weight"]
        head = self.weights.get("lm_head.weight", embedding)
        hidden = make_rows(spec.hidden_size, rows, self.limits.activations)
        scale = scale_as_stored(spec.embedding_scale, embedding.format)
        self.add("embed", EmbedArgs(self.batch, embedding, hidden, scale))
        for layer in range(spec.num_layers):
            self.attention(layer, hidden)
            self.feed_forward(layer, hidden)
        logits = make_rows(spec.vocab_size, self.limits.max_logit_rows, self.limits.activations)
        act = make_act(
            spec.hidden_size, self.limits.max_logit_rows, self.limits.threads, (head.format,), (head.order,),
            self.limits.activations,
        )  # fmt: skip
        self.norm("model.norm", hidden, act, logit_rows_only=True)
        self.add("linear", LinearArgs(self.batch, act, head, None, logits, False, True, may_screen=True), "lm_head")
        program = registry.record(self.ops, self.batch, kernels=self.kernels)
        return Decoder(
            program, tuple(self.ops), tuple(self.kinds), logits, hidden, self.buffers["q"], tuple(self.readers)
        )

    def attention(self, layer: int, hidden: F32Array) -> None:
        if self.spec.latent is not None:
            self.latent_attention(layer, hidden, self.spec.latent)
            return
        spec, kv = self.spec, self.kv[layer]
        prefix = f"model.layers.{layer}"
        name = f"{prefix}.self_attn"
        q, k, v = (self.rows(part, n) for part, n in zip("qkv", self.qkv_widths(), strict=True))
        inputs = self.act("attention input", spec.hidden_size, [f"{name}.{part}_proj" for part in "qkv"])
        self.norm(f"{prefix}.input_layernorm", hidden, inputs)
        for part, out in zip("qkv", (q, k, v), strict=True):
            self.linear(f"{name}.{part}_proj", inputs, out)
        self.add(
            "rope_store",
            RopeStoreArgs(
                self.batch, q, k, v,
                self.vectors.get(f"{name}.q_norm.weight"), self.vectors.get(f"{name}.k_norm.weight"), spec.norm_eps,
                *self.rope(layer), spec.num_heads, spec.query_scale or spec.head_dim**-0.5, kv,
            ),
        )  # fmt: skip
        mixed = self.act("attention output", spec.num_heads * spec.head_dim, [f"{name}.o_proj"])
        self.add(
            "attend",
            AttendArgs(
                self.batch, q, spec.num_heads, kv, spec.window(layer), self.limits.max_positions, mixed,
                compute=self.limits.attention_compute,
            ),
        )  # fmt: skip
        self.join(f"{name}.o_proj", mixed, f"{prefix}.post_attention_layernorm", hidden)

    def latent_attention(self, layer: int, hidden: F32Array, latent: LatentSpec) -> None:
        spec, prefix = self.spec, f"model.layers.{layer}"
        name = f"{prefix}.self_attn"
        first = "q_a_proj" if latent.q_rank else "q_proj"
        inputs = self.act("attention input", spec.hidden_size, [f"{name}.{first}", f"{name}.kv_a_proj_with_mqa"])
        self.norm(f"{prefix}.input_layernorm", hidden, inputs)
        q = self.rows("q", spec.num_heads * spec.head_dim)
        if latent.q_rank:
            small = self.rows("q small", latent.q_rank)
            self.linear(f"{name}.q_a_proj", inputs, small)
            normed = self.act("q small", latent.q_rank, [f"{name}.q_b_proj"])
            weight = self.vectors[f"{name}.q_a_layernorm.weight"]
            self.add("norm", NormArgs(self.batch, small, weight, _LATENT_EPS, normed, False))
            self.linear(f"{name}.q_b_proj", normed, q)
        else:
            self.linear(f"{name}.q_proj", inputs, q)
        stored = self.rows("latent", latent.kv_rank + latent.rope_dim)
        self.linear(f"{name}.kv_a_proj_with_mqa", inputs, stored)
        mixed = self.act("attention output", spec.num_heads * latent.value_dim, [f"{name}.o_proj"])
        self.add(
            "latent",
            LatentArgs(
                self.batch, q, stored, self.vectors[f"{name}.kv_a_layernorm.weight"], _LATENT_EPS,
                self.weights[f"{name}.kv_b_proj.weight"], *self.rope(layer), latent.interleaved, spec.num_heads,
                latent.nope_dim, latent.value_dim, spec.query_scale, self.kv[layer], mixed,
            ),
        )  # fmt: skip
        self.join(f"{name}.o_proj", mixed, f"{prefix}.post_attention_layernorm", hidden)

    def feed_forward(self, layer: int, hidden: F32Array) -> None:
        if (experts := self.spec.experts_of(layer)) is not None:
            self.mixture(f"model.layers.{layer}", hidden, experts)
            return
        spec, prefix = self.spec, f"model.layers.{layer}"
        name = f"{prefix}.mlp"
        inputs = self.act("ffn input", spec.hidden_size, [f"{name}.gate_proj", f"{name}.up_proj"])
        gate, up = self.rows("gate", spec.ffn_size), self.rows("up", spec.ffn_size)
        first = "pre_feedforward_layernorm" if spec.sandwich_norms else "post_attention_layernorm"
        self.norm(f"{prefix}.{first}", hidden, inputs)
        self.linear(f"{name}.gate_proj", inputs, gate)
        self.linear(f"{name}.up_proj", inputs, up)
        product = self.act("ffn product", spec.ffn_size, [f"{name}.down_proj"])
        self.add("act_mul", ActMulArgs(self.batch, gate, up, spec.activation, product))
        self.join(f"{name}.down_proj", product, f"{prefix}.post_feedforward_layernorm", hidden)

    def mixture(self, prefix: str, hidden: F32Array, spec: ExpertSpec) -> None:
        place, shared = f"{prefix}.{spec.place}", f"{prefix}.{spec.place}.shared_experts"
        readers = [f"{shared}.{part}_proj" for part in ("gate", "up")] if spec.shared_size else []
        inputs = self.act("ffn input", self.spec.hidden_size, [f"{place}.gate", *readers])
        self.norm(f"{prefix}.post_attention_layernorm", hidden, inputs)
        gate, up, down = (
            tuple(self.weights[f"{place}.experts.{expert}.{name}.weight"] for expert in range(spec.count))
            for name in spec.names
        )
        bias = self.vectors[f"{place}.gate.e_score_correction_bias"] if spec.biased else None
        self.add(
            "experts",
            ExpertsArgs(
                self.batch, inputs, self.weights[f"{place}.gate.weight"], bias, gate, up, down, spec.chosen, spec.score,
                spec.normalize, spec.scale, self.spec.activation, hidden,
            ),
        )  # fmt: skip
        if spec.shared_size:
            parts = self.rows("shared gate", spec.shared_size), self.rows("shared up", spec.shared_size)
            for reader, out in zip(readers, parts, strict=True):
                self.linear(reader, inputs, out)
            product = self.act("shared product", spec.shared_size, [f"{shared}.down_proj"])
            self.add("act_mul", ActMulArgs(self.batch, *parts, self.spec.activation, product))
            self.linear(f"{shared}.down_proj", product, hidden, add=True)

    def join(self, name: str, act: Act, norm: str, hidden: F32Array) -> None:
        """Add a half's result to the residual stream, through `norm` if halves end in one."""
        if not self.spec.sandwich_norms:
            self.linear(name, act, hidden, add=True)
            return
        half = self.rows("half", self.spec.hidden_size)
        self.linear(name, act, half)
        self.add("norm_add", NormAddArgs(self.batch, half, self.vectors[f"{norm}.weight"], self.spec.norm_eps, hidden))

    def rope(self, layer: int) -> tuple[F32Array, F32Array]:
        """The layer's tables, shared by all layers of one rope."""
        rope = self.spec.rope_of(layer)
        if rope not in self.ropes:
            self.ropes[rope] = rope_tables(rope, self.spec.rope_dim, self.limits.max_positions)
        return self.ropes[rope]

    def qkv_widths(self) -> tuple[int, int, int]:
        spec = self.spec
        return spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

    def act(self, role: str, width: int, consumers: Sequence[str]) -> Act:
        """The role's buffers, shared by all layers whose consumers need forms of the same kinds."""
        weights = [self.weights[f"{name}.weight"] for name in consumers]
        formats, orders = [weight.format for weight in weights], [weight.order for weight in weights]
        forms = act_forms(formats, orders)
        key = role, tuple((kind, group) for kind, group, _ in forms)
        if key not in self.acts:
            self.acts[key] = make_act(
                width, self.limits.max_rows, self.limits.threads, formats, orders, self.limits.activations
            )
        act = with_orders(self.acts[key], [order for _, _, order in forms])
        return with_wide(act, self.wide.get(consumers[0], (None,) * len(forms)))

    def rows(self, role: str, width: int) -> F32Array:
        """The role's plain rows, shared by all layers."""
        if role not in self.buffers:
            self.buffers[role] = make_rows(width, self.limits.max_rows, self.limits.activations)
        return self.buffers[role]

    def norm(self, name: str, x: F32Array, act: Act, *, logit_rows_only: bool = False) -> None:
        weight = self.vectors[f"{name}.weight"]
        self.add("norm", NormArgs(self.batch, x, weight, self.spec.norm_eps, act, logit_rows_only))

    def linear(self, name: str, act: Act, out: F32Array, *, add: bool = False) -> None:
        bias = self.vectors.get(f"{name}.bias")
        if bias is not None:
            bias = np.pad(bias, (0, -len(bias) % 16))
        weight = self.weights[f"{name}.weight"]
        self.readers.append(Reader(len(self.ops), name, act, weight))
        args = LinearArgs(self.batch, act, weight, bias, out, add, False)
        self.add("linear", args, name.rpartition(".")[2])

    def add(self, op: str, args: registry.StepArgs, part: str = "") -> None:
        bound = registry.bind(op, args, kernels=self.kernels)
        self.ops.extend(bound)
        self.kinds.extend([f"{op} {part}".rstrip()] * len(bound))


def scale_as_stored(scale: float, format: WeightFormat) -> float:
    """The scale rounded to the float type of the weight that it is for, as transformers does; else to float32."""
    if format == F16:
        return float(np.float16(scale))
    if format == BF16:
        bits = int(np.float32(scale).view(np.uint32))
        return float(np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32))
    return float(np.float32(scale))
