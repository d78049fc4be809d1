"""One decoder layer as a torch module: what quantization calibrates on, and what can be differentiated.

The engine runs recorded kernels, in which nothing can be observed or replaced. A block is the same layer in plain
float32, with Linears of torch's own under their Hugging Face names, and attention as an argument. A model is walked one
block at a time, so no more than one is ever in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional as F

from ...kernels.errors import UnsupportedModel
from ...quant.sites import ScaleSite
from .arch import DecoderSpec
from .rope import inverse_frequencies

# (q [batch, heads, tokens, head_dim], k and v [batch, kv_heads, tokens, head_dim], window) -> like q
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def dense_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """Causal attention over the whole sequence; a query sees its last `window` positions, all of them if 0."""
    tokens = q.shape[-2]
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    seen = distance >= 0
    if window:
        seen &= distance < window
    mixed: torch.Tensor = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    return mixed


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension."""

    def __init__(self, size: int, spec: DecoderSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device="meta"))
        self.eps, self.offset = spec.norm_eps, spec.norm_offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (self.offset + self.weight)


class Attention(nn.Module):
    """Projections, rotation and the caller's attention. Head norms are built if the layer's tensors have them."""

    def __init__(self, spec: DecoderSpec, layer: int, names: frozenset[str]) -> None:
        super().__init__()
        if spec.latent is not None:
            raise UnsupportedModel("attention on latents cannot be quantized here", "choose a model without it")
        self.window = spec.window(layer)
        self.head_dim = spec.head_dim
        query, value = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = _linear(spec.hidden_size, query, "self_attn.q_proj", names)
        self.k_proj = _linear(spec.hidden_size, value, "self_attn.k_proj", names)
        self.v_proj = _linear(spec.hidden_size, value, "self_attn.v_proj", names)
        self.o_proj = _linear(query, spec.hidden_size, "self_attn.o_proj", names)
        self.q_norm = _head_norm(spec, "self_attn.q_norm", names)
        self.k_norm = _head_norm(spec, "self_attn.k_norm", names)
        self.frequencies = torch.from_numpy(inverse_frequencies(spec.rope_of(layer), spec.head_dim))
        # `attend` scales scores by 1 / sqrt(head_dim)
        self.query_factor = spec.query_scale * spec.head_dim**0.5 if spec.query_scale else 1.0

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        q, k, v = (self._heads(linear(x)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        angles = (positions.float()[:, None] * self.frequencies).double()
        cos, sin = angles.cos().float(), angles.sin().float()
        q, k = (_rotated(norm(heads), cos, sin) for norm, heads in ((self.q_norm, q), (self.k_norm, k)))
        mixed = attend(q * self.query_factor, k, v, self.window)
        out: torch.Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, rows: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, heads * head_dim] to [batch, heads, tokens, head_dim]."""
        return rows.reshape(*rows.shape[:2], -1, self.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """down(f(gate(x)) * up(x))."""

    def __init__(self, spec: DecoderSpec, names: frozenset[str]) -> None:
        super().__init__()
        self.gate_proj = _linear(spec.hidden_size, spec.ffn_size, "mlp.gate_proj", names)
        self.up_proj = _linear(spec.hidden_size, spec.ffn_size, "mlp.up_proj", names)
        self.down_proj = _linear(spec.ffn_size, spec.hidden_size, "mlp.down_proj", names)
        self.activation = _ACTIVATIONS[spec.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderBlock(nn.Module):
    """Layer `layer` of a decoder, in float32.

    tensors    the layer's tensors by name within the layer (`self_attn.q_proj.weight`); they become its parameters,
               and which of them there are decides about biases and head norms
    """

    def __init__(self, spec: DecoderSpec, layer: int, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        names = frozenset(tensors)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec)
        self.self_attn = Attention(spec, layer, names)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec)
        self.mlp = FeedForward(spec, names)
        self.sandwich = spec.sandwich_norms
        if self.sandwich:
            self.pre_feedforward_layernorm = RMSNorm(spec.hidden_size, spec)
            self.post_feedforward_layernorm = RMSNorm(spec.hidden_size, spec)
        self.norm_offset = spec.norm_offset
        self.shared_heads = (spec.num_heads // spec.num_kv_heads, spec.head_dim)
        self.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """x [batch, tokens, hidden] after this layer; positions int [tokens]."""
        mixed = self.self_attn(self.input_layernorm(x), positions, attend)
        if self.sandwich:
            x = x + self.post_attention_layernorm(mixed)
            fed = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        else:
            x = x + mixed
            fed = self.mlp(self.post_attention_layernorm(x))
        out: torch.Tensor = x + fed
        return out

    @property
    def sites(self) -> tuple[ScaleSite, ...]:
        """Its Linears by what produces their inputs: AutoAWQ's mapping, with value heads shared by query heads too."""
        attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        before_mlp = "pre_feedforward_layernorm" if self.sandwich else "post_attention_layernorm"
        return (
            ScaleSite("input_layernorm", attention, offset=self.norm_offset),
            ScaleSite("self_attn.v_proj", ("self_attn.o_proj",), self.shared_heads),
            ScaleSite(before_mlp, ("mlp.gate_proj", "mlp.up_proj"), offset=self.norm_offset),
            ScaleSite("mlp.up_proj", ("mlp.down_proj",)),
        )


def _linear(inputs: int, outputs: int, name: str, names: frozenset[str]) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=f"{name}.bias" in names, device="meta")


def _head_norm(spec: DecoderSpec, name: str, names: frozenset[str]) -> nn.Module:
    return RMSNorm(spec.head_dim, spec) if f"{name}.weight" in names else nn.Identity()


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin) for the two halves of each head."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
