"""What of a model our kernels for GPUs do not compute, found in its sizes before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping

from ..kernels.cuda import latent, moe
from ..kernels.cuda.tiles import too_wide
from ..kernels.errors import UnsupportedModel
from ..kernels.ops import PackedWeight
from .models.arch import DecoderSpec

_BLOCK = 16  # tokens; other sizes of blocks are refused as options


def check_on_gpu(name: str, spec: DecoderSpec, arch: str) -> None:
    """Raise UnsupportedModel if a GPU of this architecture has no kernels for the model's sizes."""
    if (why := _attention(spec, arch) or _rows(spec) or _experts(spec)) is not None:
        raise UnsupportedModel(f"our kernels for GPUs do not compute `{name}`: {why}", "use `--device cpu`")


def check_weights_on_gpu(name: str, spec: DecoderSpec, weights: Mapping[str, PackedWeight]) -> None:
    """Raise UnsupportedModel if a mixture's weights are stored as no kernel for GPUs reads them."""
    for key, weight in weights.items():
        if spec.experts is not None and ".experts." in key and weight.order is not None:
            raise UnsupportedModel(
                f"our kernels for GPUs do not compute `{name}`: `{key}` has inputs in an order of its own (desc_act)",
                "use a checkpoint that was quantized without desc_act, or `--dtype bfloat16`",
            )


def _attention(spec: DecoderSpec, arch: str) -> str | None:
    if spec.latent is None:
        return too_wide(arch, spec.head_dim)
    of = spec.latent
    return latent.refusal(spec.num_heads, of.kv_rank, of.rope_dim, of.nope_dim, of.value_dim, _BLOCK)


def _rows(spec: DecoderSpec) -> str | None:
    q_rank = 0 if spec.latent is None else spec.latent.q_rank
    for width, unit in ((spec.hidden_size, 16), (q_rank, 16), (spec.ffn_size, 8)):
        if width % unit != 0:
            return f"rows of {width} values; multiples of {unit} are known"
    return None


def _experts(spec: DecoderSpec) -> str | None:
    of = spec.experts
    if of is None:
        return None
    if spec.activation != "silu":
        return f"experts with activation {spec.activation}"
    if of.count % 2 != 0:
        return f"{of.count} experts, an odd number"
    if of.ffn_size % 8 != 0 or of.shared_size % 16 != 0:
        return f"experts of {of.ffn_size} inner values, and {of.shared_size} shared ones, no multiples of 8 and 16"
    return moe.refusal(moe.Routing("f32", of.count, of.chosen, of.score))
