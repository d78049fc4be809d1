"""The reference agrees with torch's own functions, which know nothing of packing, paging or groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from llmctl.kernels.cpu.pack import unpack
from llmctl.kernels.formats import WeightFormat
from llmctl.kernels.reference import act, act_mul, attend, embed, linear, norm, rope_store
from llmctl.kernels.reference.weight import dequantize
from llmctl.quant.tensor import WeightTensor

from .cases import act_mul_case, attend_case, embed_case, linear_case, norm_case, rope_store_case

FORMATS = (
    WeightFormat("bf16"),
    WeightFormat("int8", 32),
    WeightFormat("int4", 64, "min"),
    WeightFormat("int4", 32, "int"),
)


def close(ours, expected, tolerance=1e-5):
    ours, expected = torch.as_tensor(ours).double(), torch.as_tensor(expected).double()
    return (ours - expected).abs().max() <= tolerance * expected.abs().max()


def test_a_packed_weight_means_what_its_tensor_means():
    for format in FORMATS:
        weight = embed_case(format, 3, 37, 128).make().weight
        assert np.array_equal(dequantize(weight).numpy(), WeightTensor(format, *unpack(weight)).dequantize()) or (
            format.zero == "min" and close(dequantize(weight), WeightTensor(format, *unpack(weight)).dequantize(), 1e-6)
        )


def test_embedding_looks_rows_up():
    for format in FORMATS:
        args = embed_case(format, 3, 37, 128).make()
        embed.build(args).run()
        expected = F.embedding(torch.from_numpy(args.batch.token[:3]).long(), dequantize(args.weight))
        assert torch.equal(torch.from_numpy(args.out)[:3], expected)


def test_float_linear_is_torch_linear():
    args = linear_case(WeightFormat("bf16"), 7, 33, 64, bias=True, add=True).make()
    before = torch.from_numpy(args.out[:7, :33].copy())
    linear.build(args).run()
    x, bias = torch.from_numpy(args.act.values[:7]), torch.from_numpy(args.bias[:33])
    assert close(args.out[:7, :33], F.linear(x, dequantize(args.weight), bias) + before)


def test_integer_linear_is_torch_linear_of_what_the_codes_stand_for():
    for format in FORMATS[1:]:
        args = linear_case(format, 7, 33, 128).make()
        linear.build(args).run()
        form = args.act.forms[0]
        x = torch.from_numpy(form.codes[:7]).float().unflatten(1, (-1, form.group))
        x = (x * torch.from_numpy(form.scales[:7])[:, :, None]).flatten(1)
        assert close(args.out[:7, :33], F.linear(x, dequantize(args.weight)))
        assert close(x, args.act.values[:7], 0.01)


def test_codes_round_half_to_even_and_zeros_have_scale_zero():
    x = torch.zeros(1, 64)
    x[0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    codes, scales, sums = act.quantize(x, "i8", 32)
    assert codes[0, :4].tolist() == [127, 0, 2, -2]
    assert scales.tolist() == [[1, 0]] and sums.tolist() == [[127, 0]] and not codes[0, 32:].any()
    assert act.quantize(x, "i12", 32)[0][0, 0] == 2047


def test_a_wide_quad_keeps_its_outlier_and_its_neighbours_precision():
    x = torch.full((1, 32), 1.27)
    x[0, 5] = -20.004
    codes, scales, sums = act.quantize(x, "i8", 32, np.array([1], np.uint8))
    assert scales.tolist() == [[pytest.approx(0.01)]] and codes[0, 0] == 127 and codes[0, 5] == -2000
    assert sums.item() == 31 * 127 - 2000
    x[0, 5] = 1e4  # further away than 12 bits can tell apart from the rest
    codes, scales, _ = act.quantize(x, "i8", 32, np.array([1], np.uint8))
    assert codes[0, 5] == 2032 and scales.item() == pytest.approx(1e4 / 2032)


def test_norm_is_torch_rms_norm():
    args = norm_case(7, 96, True).make()
    norm.build(args).run()
    rows = args.batch.logit_rows[: args.batch.counts[2]]
    expected = F.rms_norm(
        torch.from_numpy(args.x)[torch.from_numpy(rows).long(), :96], (96,), torch.from_numpy(args.weight), 1e-5
    )
    assert close(args.act.values[: len(rows)], expected)


def test_activations_are_those_of_torch():
    for name, f in (("silu", F.silu), ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))):
        args = act_mul_case(5, 33, name).make()
        act_mul.build(args).run()
        expected = f(torch.from_numpy(args.gate[:5, :33])) * torch.from_numpy(args.up[:5, :33])
        assert close(args.act.values[:5], expected)


def test_what_is_stored_is_what_attention_reads():
    heads, kv_heads, head_dim = 6, 2, 16
    args = rope_store_case(1, heads, kv_heads, head_dim, 8, "f32", norm=True).make()
    batch, rng = args.batch, np.random.default_rng(0)
    batch.counts[:2] = 12, 1
    batch.seq_first[0], batch.seq_rows[0] = 0, 12
    batch.position[:12], batch.slot[:12] = np.arange(12), 3
    batch.tables[1][3, :2] = 2, 0
    args.v[:12] = rng.standard_normal(args.v[:12].shape)
    q, k = (
        torch.from_numpy(x[:12, : h * head_dim].copy()).unflatten(1, (h, -1))
        for x, h in ((args.q, heads), (args.k, kv_heads))
    )
    rope_store.build(args).run()

    def turned(x, weight):
        x = F.rms_norm(x, (head_dim,), torch.from_numpy(weight), 1e-6)
        cos = torch.from_numpy(args.cos[:12]).repeat(1, 2)[:, None]
        sin = torch.from_numpy(args.sin[:12]).repeat(1, 2)[:, None]
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-b, a), dim=-1) * sin

    query = (turned(q, args.q_norm) * args.q_scale).transpose(0, 1)
    key = turned(k, args.k_norm).transpose(0, 1)
    value = torch.from_numpy(args.v[:12, : kv_heads * head_dim]).unflatten(1, (kv_heads, -1)).transpose(0, 1)
    assert close(args.q[:12, : heads * head_dim], query.transpose(0, 1).flatten(1))

    for window in (0, 4):
        attention = attend_case(1, heads, kv_heads, head_dim, 8, "f32", window=window).make()
        attention = type(attention)(batch, args.q, heads, args.kv, window, 40, attention.act)
        attend.build(attention).run()
        ages = torch.arange(12)[:, None] - torch.arange(12)[None, :]
        seen = (ages >= 0) & ((ages < window) if window else True)
        expected = F.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=seen, scale=1.0, enable_gqa=True
        )[0]
        assert close(attention.act.values[:12], expected.transpose(0, 1).flatten(1))
