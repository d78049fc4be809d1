"""The reference: every op in plain torch or numpy, slow and obvious. Importing it imports torch.

It is the oracle of the tests and, as an ordinary entry of lowest priority, always an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..cpu.pack import check_layout
from ..entry import Entry
from ..errors import UsageError
from ..formats import KV_BYTES, KVFormat, WeightFormat
from ..ops import (
    ActMulArgs,
    AttendArgs,
    EmbedArgs,
    ExpertsArgs,
    KVCopyArgs,
    LatentArgs,
    LinearArgs,
    NormAddArgs,
    NormArgs,
    Op,
    RopeStoreArgs,
    SampleArgs,
)
from . import act_mul, attend, embed, experts, kv_copy, latent, linear, norm, norm_add, rope_store, sample


def _weight_refusal(format: WeightFormat, k: int) -> str | None:
    try:
        check_layout(format, k)
    except UsageError as error:
        return error.message
    return None


def _kv_refusal(format: KVFormat) -> str | None:
    return None if format.kind in KV_BYTES else f"no cache format `{format.kind}`"


def _accepts_embed(args: EmbedArgs) -> str | None:
    if args.weight.order is not None:
        return "an embedding with its columns in another order"
    return _weight_refusal(args.weight.format, args.weight.k)


def _accepts_norm(args: NormArgs) -> str | None:
    return None


def _accepts_norm_add(args: NormAddArgs) -> str | None:
    return None


def _accepts_linear(args: LinearArgs) -> str | None:
    return _weight_refusal(args.weight.format, args.weight.k)


def _accepts_rope_store(args: RopeStoreArgs) -> str | None:
    return _kv_refusal(args.kv.format)


def _accepts_attend(args: AttendArgs) -> str | None:
    return _kv_refusal(args.kv.format)


def _accepts_latent(args: LatentArgs) -> str | None:
    if args.kv.format.bytes_per_value == 1:
        return f"no latents in format `{args.kv.format.kind}`"
    return _weight_refusal(args.up.format, args.up.k)


def _accepts_act_mul(args: ActMulArgs) -> str | None:
    return None if args.activation in act_mul.ACTIVATIONS else f"no activation `{args.activation}`"


def _accepts_experts(args: ExpertsArgs) -> str | None:
    if args.activation not in act_mul.ACTIVATIONS:
        return f"no activation `{args.activation}`"
    weights = (args.router, *args.gate, *args.up, *args.down)
    return next(filter(None, (_weight_refusal(weight.format, weight.k) for weight in weights)), None)


def _accepts_kv_copy(args: KVCopyArgs) -> str | None:
    return _kv_refusal(args.format)


def _accepts_sample(args: SampleArgs) -> str | None:
    return None


def _one_op(build: Callable[[Any], Op]) -> Callable[[Any], tuple[Op, ...]]:
    return lambda args: (build(args),)


def _entry(op: str, accepts: Callable[[Any], str | None], build: Callable[[Any], Any]) -> Entry:
    return Entry(op, "cpu", "reference", "any", 0, accepts, build, f"kernels/reference/{op}.py")


ENTRIES = (
    _entry("embed", _accepts_embed, _one_op(embed.build)),
    _entry("norm", _accepts_norm, _one_op(norm.build)),
    _entry("norm_add", _accepts_norm_add, _one_op(norm_add.build)),
    _entry("linear", _accepts_linear, _one_op(linear.build)),
    _entry("rope_store", _accepts_rope_store, _one_op(rope_store.build)),
    _entry("attend", _accepts_attend, _one_op(attend.build)),
    _entry("latent", _accepts_latent, _one_op(latent.build)),
    _entry("act_mul", _accepts_act_mul, _one_op(act_mul.build)),
    _entry("experts", _accepts_experts, _one_op(experts.build)),
    _entry("kv_copy", _accepts_kv_copy, kv_copy.build),
    _entry("sample", _accepts_sample, sample.build),
)
