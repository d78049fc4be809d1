"""How each layer's 8-bit KV cache fits the model: centres, levels and steering of K, and fp8's scales, from a text.

The model reads the text once with a float32 cache, when it first runs with an 8-bit one. The text is fixed, so what is
found is a function of the weights and the kernels; it is kept beside the packed weights. For a GPU the CPU reads it: a
GPU then stores what the CPU would.

Scales that a checkpoint brings are taken. Without them fp8, whose error is relative, has scale 1, unless the probe
comes within a factor of two of the format's largest value: then powers of two, which change nothing but the range.
"""

from __future__ import annotations

import hashlib
import io
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from ...kernels import registry
from ...kernels.errors import NoKernel
from ...kernels.formats import FP8_LARGEST
from ...kernels.ops import F32Array, KeySteering, KVLayer, steering_width
from ..load.kv_scales import stored_scales
from ..load.model import Model
from ..load.packed import PackedModel
from ..models.arch import DecoderSpec
from ..models.rope import rope_tables, settled
from ..plan import Plan
from ..tokenizer import Tokenizer
from .keep import keep_bytes
from .layer_watch import LayerWatch, Seen
from .levels import MOST_POSITIONS
from .probe_text import PROBE_TEXT
from .steering import find_steering

log = logging.getLogger(__name__)

VERSION = 5
PROBE_TOKENS = 512
HEADROOM = 2.0  # the largest value of fp8 is so many times what a text was seen to reach
_ARRAYS = "order", "follow", "level", "centre"  # of KeySteering, in the file
_DTYPES = tuple(np.dtype(name) for name in ("int32", "float16", "float32", "float32", "float32"))  # and of `largest`


@dataclass(frozen=True, slots=True, eq=False)
class KVFit:
    """What one layer's 8-bit cache is stored with. `largest` [2, kv_heads] of K and of V in the probe."""

    steering: KeySteering
    largest: F32Array


def fit_cache(layers: dict[int, KVLayer], model: Model, plan: Plan) -> dict[int, KVLayer]:
    """The layers of the cache, those in 8 bits with their steering and scales.

    Only our own decoder is fitted: of transformers' modules nobody knows where they rotate.
    """
    small = [layer for layer, kv in layers.items() if kv.format.bytes_per_value == 1]
    if not small:
        return layers
    if not isinstance(model, PackedModel):
        if plan.kv_format in FP8_LARGEST:
            log.warning(
                "%s: the %s KV cache is not calibrated, its scales are 1 and what is above %g is cut off",
                model.name,
                plan.kv_format,
                FP8_LARGEST[plan.kv_format],
            )
        return layers
    fitted = dict(layers)
    try:
        fits = _fits(model, _on_cpu(plan))
    except NoKernel as error:
        log.warning("%s: the %s KV cache is rounded to the nearest: %s", model.name, plan.kv_format, error)
        for layer in small if plan.kv_format in FP8_LARGEST else ():
            fitted[layer] = replace(layers[layer], scales=stored_scales(model.vectors, layer, model.spec.num_kv_heads))
        return fitted
    for layer in small:
        kind = layers[layer].format.kind
        scales = None if kind not in FP8_LARGEST else _scales(model, layer, fits[layer], FP8_LARGEST[kind])
        steering = _of_scaled(fits[layer].steering, scales)
        fitted[layer] = replace(layers[layer], steering=steering, scales=scales)
    return fitted


def _of_scaled(steering: KeySteering, scales: F32Array | None) -> KeySteering:
    """The steering of K divided by these scales."""
    if scales is None or steering.centre is None:
        return steering
    return replace(steering, centre=np.ascontiguousarray(steering.centre / scales[0, :, None]))


def _on_cpu(plan: Plan) -> Plan:
    """The plan for a CPU, where it is for a GPU."""
    if plan.kernels != registry.CUDA:
        return plan
    isa, bits = registry.configure("auto", plan.threads)
    return msgspec.structs.replace(plan, kernels="auto", isa=isa, bits=bits)


def _scales(model: PackedModel, layer: int, fit: KVFit, limit: float) -> F32Array | None:
    """The layer's fp8 scales, None for 1."""
    stored = stored_scales(model.vectors, layer, model.spec.num_kv_heads)
    if stored is not None:
        return stored
    needed = np.maximum(fit.largest.astype(np.float64) * (HEADROOM / limit), 1.0)
    scales = np.exp2(np.ceil(np.log2(needed))).astype(np.float32)
    if (scales == 1).all():
        return None
    log.info(
        "%s: layer %d has K and V up to %g, fp8 scales up to %g", model.name, layer, fit.largest.max(), scales.max()
    )
    return scales


def _fits(model: PackedModel, plan: Plan) -> tuple[KVFit, ...]:
    """Each layer's fit, from beside the packed weights or made now."""
    made_with = VERSION, PROBE_TOKENS, PROBE_TEXT, model.spec, plan.isa, plan.bits, registry.build_id()
    key = hashlib.sha256(msgspec.json.encode(made_with)).hexdigest()[:16]
    path = model.folder / f"kv-fit-{key}.npz"
    found = _read(path, model.spec)
    if found is None:
        log.info("%s: reading a probe text, to fit the 8-bit KV cache", model.name)
        found = _measure(model, plan)
        _keep(path, found)
    return found


def _read(path: Path, spec: DecoderSpec) -> tuple[KVFit, ...] | None:
    """What `_keep` left, None if it did not or it is not whole."""
    if not path.exists():
        return None
    heads, dim, half = (spec.num_layers, spec.num_kv_heads), spec.head_dim, spec.head_dim // 2
    shapes = (*heads, half), (*heads, half, 4, steering_width(dim)), (*heads, half), (*heads, dim)
    try:
        with np.load(path) as file:
            found, largest = tuple(file[name] for name in _ARRAYS), file["largest"]
        if tuple(array.shape for array in found) != shapes or largest.shape != (spec.num_layers, 2, spec.num_kv_heads):
            raise ValueError(f"shapes {[array.shape for array in (*found, largest)]}")
        if tuple(array.dtype for array in (*found, largest)) != _DTYPES:
            raise ValueError(f"types {[str(array.dtype) for array in (*found, largest)]}")
        order, follow, level, centre = found
        if not (np.sort(order, axis=-1) == np.arange(half)).all():
            raise ValueError("an order that is no permutation of the pairs")
        if not all(np.isfinite(array).all() for array in (follow, level, centre)) or not (level > 0).all():
            raise ValueError("numbers that are not finite, or levels that are not above 0")
    except Exception as error:  # numpy and zipfile raise many kinds for a broken file, and it can be made again
        log.warning("%s is made anew: %s", path, error)
        return None
    return tuple(
        KVFit(KeySteering(order, follow.astype(np.float32), level, centre), most)
        for order, follow, level, centre, most in zip(*found, largest, strict=True)
    )


def _keep(path: Path, fits: tuple[KVFit, ...]) -> None:
    """Write them beside the weights for the next start; a folder that cannot be written to is left alone."""
    data = io.BytesIO()
    how = [(fit.steering.order, fit.steering.follow, fit.steering.level, fit.steering.centre) for fit in fits]
    order, follow, level, centre = (np.stack(of_layers) for of_layers in zip(*how, strict=True))
    largest = np.stack([fit.largest for fit in fits])
    np.savez(data, order=order, follow=follow.astype(np.float16), level=level, centre=centre, largest=largest)
    keep_bytes(path, data.getvalue(), "the KV cache is fitted")


def _measure(model: PackedModel, plan: Plan) -> tuple[KVFit, ...]:
    """Run the probe text and look at each layer's queries, K and V."""
    spec = model.spec
    tokens = Tokenizer(model.folder).encode(PROBE_TEXT)[: min(PROBE_TOKENS, spec.context_length)]
    fits: list[KVFit] = []
    for layer, seen in enumerate(LayerWatch(model, plan, len(tokens)).read(tokens)):
        rope = settled(spec.rope_of(layer), spec.head_dim, len(tokens))  # the one that the text was read with
        cos, sin = rope_tables(rope, spec.head_dim, max(len(tokens), min(spec.context_length, MOST_POSITIONS)))
        steering = find_steering(seen.q, seen.k, seen.v, cos, sin, spec.window(layer))
        fits.append(KVFit(steering, _largest(seen, steering)))
    return tuple(fits)


def _largest(seen: Seen, steering: KeySteering) -> F32Array:
    """[2, kv_heads]: the largest magnitude of K, as it is stored, and of V."""
    assert steering.centre is not None and steering.level is not None
    k = (seen.k - steering.centre[:, None]) / np.tile(steering.level, 2)[:, None]
    return np.stack([np.abs(x).max(axis=(1, 2)) for x in (k, seen.v)])
