"""Which inputs of linears with int4 weights get 12 bits: those with outliers, found once from a probe text.

Such weights are multiplied with activations of 8 bits, in groups of 32 inputs and more that share a scale. A few inputs
are outliers in nearly every token, and they are the same ones: with them a group's scale is several times what its
other inputs need. So a form may have a quad in a group, four inputs side by side, that has 12 bits and does not count
for the scale (`ActForm.wide`). It costs one product more for each eight of a group of 32, so it is spent where it saves
most.

What is found follows from the weights and the probe text, but for ties that the kernels' rounding decides. It is kept
beside the packed weights, so that every later start computes the same bits.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from ...kernels import registry
from ...kernels.ops import NO_QUAD, Act, ActForm, F32Array, U8Array, find_form
from ..load.model import Model
from ..load.packed import PackedModel
from ..models.decoder import Wide
from ..plan import Plan
from ..tokenizer import Tokenizer
from .keep import keep_bytes
from .layer_watch import LayerWatch
from .probe_text import PROBE_TEXT

log = logging.getLogger(__name__)

VERSION = 2
_DIGEST_BYTES = 32
PROBE_TOKENS = 256
_SHARE = 1 / 3  # of what it would cost to widen a quad in every group


def widen_outliers(model: Model, plan: Plan) -> Model:
    """The model with its wide quads, from beside the packed weights or found now.

    Nothing is widened where no weight is int4, on a GPU, whose kernels do not quantize activations, and in a model
    with attention on latents.
    """
    if not isinstance(model, PackedModel) or plan.kernels == registry.CUDA or model.spec.latent is not None:
        return model
    if not any(weight.format.kind == "int4" for weight in model.weights.values()):
        return model
    made_with = VERSION, PROBE_TOKENS, _SHARE, PROBE_TEXT, model.spec
    path = model.folder / f"outliers-{hashlib.sha256(msgspec.json.encode(made_with)).hexdigest()[:16]}.msgpack"
    wide = _read(path)
    if wide is None:
        log.info("%s: reading a probe text, to find inputs with outliers", model.name)
        wide = _find(model, plan)
        data = msgspec.msgpack.encode(_stored(wide))
        keep_bytes(path, hashlib.sha256(data).digest() + data, "inputs with outliers are looked for")
    return replace(model, wide=wide)


def _stored(wide: Wide) -> dict[str, list[bytes | None]]:
    return {name: [None if quads is None else quads.tobytes() for quads in forms] for name, forms in wide.items()}


def _read(path: Path) -> Wide | None:
    """What an earlier start kept, None if there is nothing or it is not whole."""
    try:
        kept = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s is made anew: %s", path, error)
        return None
    data = kept[_DIGEST_BYTES:]
    if hashlib.sha256(data).digest() != kept[:_DIGEST_BYTES]:
        log.warning("%s is made anew: it is damaged", path)
        return None
    stored = msgspec.msgpack.decode(data, type=dict[str, list[bytes | None]])
    return {
        name: tuple(None if quads is None else np.frombuffer(quads, np.uint8) for quads in forms)
        for name, forms in stored.items()
    }


def _find(model: PackedModel, plan: Plan) -> Wide:
    """Read the probe text, look at what every linear reads, and widen where it is worth most."""
    tokens = Tokenizer(model.folder).encode(PROBE_TEXT)[: min(PROBE_TOKENS, model.spec.context_length)]
    inputs: list[_Input] = []
    for reader in LayerWatch(model, plan, len(tokens)).readers(tokens):
        act, form = reader.act, find_form(reader.act, reader.weight)
        if not inputs or inputs[-1].act is not act:
            gains = tuple(
                gain(_read_by(form, act)[: len(tokens)], form.group) if form.can_widen else None for form in act.forms
            )
            inputs.append(_Input(reader.name, act, gains, [0] * len(gains)))
        if form is not None:
            inputs[-1].outputs[act.forms.index(form)] += reader.weight.n
    chosen = worth_widening(
        [
            (found, outputs)
            for input in inputs
            for found, outputs in zip(input.gains, input.outputs, strict=True)
            if found
        ]
    )
    return {input.name: tuple(next(chosen) if found else None for found in input.gains) for input in inputs}


@dataclass(frozen=True, slots=True, eq=False)
class _Input:
    """What linears read, the first being `name`; for each form what widening gains, and how many outputs it feeds."""

    name: str
    act: Act
    gains: tuple[Gain | None, ...]
    outputs: list[int]


def _read_by(form: ActForm, act: Act) -> F32Array:
    return act.values if form.order is None else act.values[:, form.order]


@dataclass(frozen=True, slots=True, eq=False)
class Gain:
    """Of each group of an input the best quad to widen [groups], and how much of the input's error that saves.

    The error that rounding adds goes with the square of a group's scale; it is counted by the input's own square.
    """

    quads: U8Array
    saved: F32Array


def gain(x: F32Array, group: int) -> Gain:
    """What widening would do for inputs [rows, k] with groups of this size."""
    rows, k = x.shape
    size = np.abs(x, dtype=np.float64)
    size[~np.isfinite(size).all(axis=1)] = 0  # a row with NaN says nothing
    quads = size.reshape(rows, k // group, group // 4, 4).max(axis=3)
    top = np.sort(quads, axis=2)
    rest = np.where(quads == top[:, :, -1:], top[:, :, -2:-1], top[:, :, -1:])  # the largest of all other quads
    before, after = (top[:, :, -1] ** 2).mean(axis=0), (rest**2).mean(axis=0)
    energy = max(float((size**2).sum(axis=1).mean()), 1e-30)
    saved = (before - after.min(axis=1)) * group / energy
    return Gain(after.argmin(axis=1).astype(np.uint8), saved.astype(np.float32))


def worth_widening(found: Sequence[tuple[Gain, int]]) -> Iterator[U8Array]:
    """The quads of each (gain, outputs that its input feeds), NO_QUAD where it is not among those worth most.

    A quad costs as much as its input has outputs, and all together may cost `_SHARE` of what all quads would.
    """
    saved = np.concatenate([one.saved for one, _ in found])
    cost = np.concatenate([np.full(len(one.saved), outputs, np.float64) for one, outputs in found])
    best = np.argsort(-saved / np.maximum(cost, 1), kind="stable")
    within = np.cumsum(cost[best]) <= _SHARE * cost.sum()
    kept = np.zeros(len(saved), bool)
    kept[best[within]] = True
    kept &= saved > 0
    at = 0
    for one, _ in found:
        yield np.where(kept[at : at + len(one.quads)], one.quads, np.uint8(NO_QUAD))
        at += len(one.quads)
