"""What the modules of transformers ask of attention, found by running them once with an attention that takes notes.

Config files spell heads, windows and scales in a hundred ways; what arrives at the attention function is spelled in
one. The model is built without memory (on torch's meta device) and run on three tokens. The mask that it asks for is
tried at chosen places instead of being made: causal, or causal with a window, is what the paged cache can serve. All
else that attention is given must be known to change nothing, or the model is refused: one that runs with a part of it
ignored still writes fluent text.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ...kernels.errors import UnsupportedModel

TRACED = "llmctl_traced"

_TOKENS = 3
_FAR = 1 << 20  # a position behind every context
_NEEDED = ("input_ids", "position_ids", "logits_to_keep")
# What else modules hand to attention without a meaning for ours; `dropout` is 0 outside of training.
_HARMLESS = frozenset(
    {
        *("dropout", "position_ids", "use_cache", "cache", "past_key_values", "cache_position", "position_embeddings"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep"),
        "sliding_window",  # the mask says it too, for every implementation that reads masks
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """One layer's attention: the module that calls it, its heads, the window (0: none), what scores are scaled by."""

    module: nn.Module
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The attention of every layer in order, and how many logits a token has."""

    calls: tuple[AttentionCall, ...]
    vocab_size: int


@dataclass(frozen=True, slots=True)
class _Mask:
    """Stands for a mask on its way to attention; slices of it, as older modules make, are the same mask.

    `served` is whether it is causal, with a window if that is not 0, and nothing else. Some models also make masks that
    no layer uses, so it is judged when it arrives.
    """

    window: int
    served: bool

    def __getitem__(self, index: object) -> _Mask:
        return self


def trace(model: Any) -> Trace:
    """What the model asks for; UnsupportedModel with the reason if the paged cache cannot serve it.

    `model` is a causal language model of transformers, on the meta device or not; it is left as it was.
    """
    parameters = inspect.signature(model.forward).parameters
    missing = [name for name in _NEEDED if name not in parameters]
    if missing:
        raise _refused(model, f"its forward has no `{missing[0]}`")
    if not model._can_set_attn_implementation():
        raise _refused(model, "its attention does not go through transformers' AttentionInterface")
    calls: list[AttentionCall] = []

    def take_note(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: object, **given: object
    ) -> tuple[torch.Tensor, None]:
        calls.append(_call(model, module, query, key, value, mask, given))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(TRACED, take_note)
    AttentionMaskInterface.register(TRACED, _try_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(TRACED)
    ids = torch.zeros((1, _TOKENS), dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            out = model(
                input_ids=ids,
                position_ids=torch.arange(_TOKENS, device=model.device)[None],
                attention_mask=torch.ones_like(ids),
                use_cache=False,
                logits_to_keep=torch.tensor([_TOKENS - 1], device=model.device),
            )
    except UnsupportedModel:
        raise
    except Exception as error:  # whatever the modules of hundreds of families raise
        raise _refused(model, f"a trial run fails: {type(error).__name__}: {error}") from error
    finally:
        model.set_attn_implementation(before)  # it stands in the config, which may be the caller's
        AttentionInterface.register(TRACED, _nobody)  # the registry is the process's: it would keep the model
    _check_layers(model, calls)
    return Trace(tuple(calls), out.logits.shape[-1])


def _nobody(module: nn.Module, *_: object, **__: object) -> tuple[torch.Tensor, None]:
    raise AssertionError(f"{type(module).__name__} is traced outside of a trace")


def _try_mask(*, mask_function: Callable[..., torch.Tensor], local_size: int | None = None, **_: object) -> _Mask:
    """Called by transformers where it would make a mask: what it would be, tried at queries and keys that tell."""
    window, served = local_size or 0, True
    places = torch.cat((torch.arange(4), torch.arange(_FAR - window - 70, _FAR + 4)))
    for query in (_FAR, _FAR - 1, 2):
        seen = mask_function(torch.tensor(0), torch.tensor(0), torch.tensor(query), places)
        expected = places <= query
        if window:
            expected &= places > query - window
        served &= torch.equal(seen.expand_as(places), expected)
    return _Mask(window, served)


def _call(
    model: Any,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: object,
    given: dict[str, object],
) -> AttentionCall:
    heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[3]
    if not isinstance(mask, _Mask):
        raise _refused(model, "it makes an attention mask of its own" if mask is not None else "it asks for no mask")
    if given.pop("is_causal", None) is False or not mask.served:
        raise _refused(model, "its attention is neither causal nor causal with a window")
    scale = given.pop("scaling", None)
    unknown = [name for name, value in given.items() if value is not None and name not in _HARMLESS]
    if unknown:
        raise _refused(model, f"its attention takes `{unknown[0]}`")
    if key.shape[2] != query.shape[2]:
        raise _refused(model, "it attends to more than the tokens")
    if value.shape != key.shape or key.shape[3] != head_dim or heads % kv_heads:
        raise _refused(
            model, f"shapes of queries {list(query.shape)}, keys {list(key.shape)}, values {list(value.shape)}"
        )
    factor = head_dim**-0.5 if scale is None else scale
    if not isinstance(factor, int | float):
        raise _refused(model, f"attention is scaled by a {type(factor).__name__}")
    return AttentionCall(module, heads, kv_heads, head_dim, mask.window, float(factor))


def _check_layers(model: Any, calls: list[AttentionCall]) -> None:
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if len(calls) != layers or len({id(call.module) for call in calls}) != layers:
        raise _refused(model, f"{len(calls)} calls of attention in {layers} layers, expected one in each")
    shapes = {(call.num_heads, call.num_kv_heads, call.head_dim) for call in calls}
    if len(shapes) > 1:
        raise _refused(model, f"heads differ between layers: {sorted(shapes)}")


def _refused(model: Any, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"`{type(model).__name__}` cannot run on the paged cache: {why}", "use another model")
