"""Rows, heads, KV blocks and samples: kernels in the checked emulation against torch, numpy and the reference."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from llmctl.kernels.cuda import rows
from llmctl.kernels.cuda.arguments import Argument
from llmctl.kernels.cuda.emulate import Emulation, build, compiler
from llmctl.kernels.cuda.source import FOLDER, Kernel
from llmctl.kernels.cuda.types import block_bits
from llmctl.kernels.device import read_machine
from llmctl.kernels.formats import KVFormat
from llmctl.kernels.ops import SAMPLE_ROW, SampleArgs
from llmctl.kernels.reference.kv import view_of
from llmctl.kernels.reference.philox import gumbel, token_words
from llmctl.kernels.reference.sample import build as build_reference

from .attend_cases import BOUNDS, TORCH

SAMPLE_THREADS = 64
ROPE_STORES = (("f16", "int8", 64, "halves", True), ("bf16", "fp8_e4m3", 96, "interleaved", False),
               ("f32", "f32", 64, "none", False), ("f16", "fp8_e5m2", 64, "halves", False))  # fmt: skip
ACTS = ("f16", "f32")
QUANTIZED = (("f16", "fp8_e4m3", True), ("f32", "int8", False), ("f32", "fp8_e4m3", False))
KERNELS = (
    *(rows.rope_store(act, kv, dim) for act, kv, dim, _, _ in ROPE_STORES),
    *(kernel for act in ACTS for kernel in (
        rows.embed(act), rows.rms_norm(act, 1088, residual=True)[0], rows.rms_norm(act, 1088, residual=False)[0],
        rows.rms_norm(act, 1088, residual=False, add=True)[0],
        rows.act_mul(act, "silu"), rows.act_mul(act, "gelu_tanh"),
    )),
    *(rows.rms_norm_quantize(act, code, 2304, residual=residual)[0] for act, code, residual in QUANTIZED),
    rows.COPY_TOKENS, rows.MOVE_BLOCKS, rows.NOISE, rows.sample(SAMPLE_THREADS),
)  # fmt: skip


@dataclasses.dataclass
class Bench:
    """Runs one kernel on tensors: each is registered by its name, outputs as unwritten."""

    emulation: Emulation

    def run(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        threads: int,
        arguments: dict[str, torch.Tensor | Argument | None],
        shared_bytes: int = 0,
        outputs: tuple[str, ...] = ("out",),
        updated: tuple[str, ...] = (),
    ) -> None:
        plain: list[Argument] = []
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                writable = name in outputs or name in updated
                self.emulation.register(
                    value.data_ptr(), value.nbytes, name, written=name not in outputs, read_only=not writable
                )
                plain.append(ctypes.c_void_p(value.data_ptr()))
            else:
                plain.append(ctypes.c_void_p(0) if value is None else value)
        full = (*grid, 1, 1)[:3]
        finished = self.emulation.launch(kernel, full, threads, shared_bytes, plain)
        reports = self.emulation.reports()
        self.emulation.forget()
        assert finished and reports == ()


@pytest.fixture(scope="module")
def bench(builds: Path) -> Bench:
    return Bench(build(KERNELS, "checked", builds))


def i32(value: int) -> ctypes.c_int32:
    return ctypes.c_int32(value)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def off_by(out: torch.Tensor, expected: torch.Tensor, size: torch.Tensor) -> float:
    return float(((out.double() - expected).abs().amax(-1) / size.amax(-1)).max())


@pytest.mark.parametrize("act", ACTS)
def test_embedding_copies_scaled_rows_and_leaves_rows_behind_the_count(bench: Bench, act: str) -> None:
    table = torch.randn(7, 64).to(TORCH[act])
    out = torch.full((4, 64), math.nan, dtype=table.dtype)
    arguments = {"out": out, "table": table, "token": ints(6, 0, 9, 3), "rows": ints(3)}
    bench.run(rows.embed(act), (4,), 128, {**arguments, "w": i32(64), "v": i32(7), "scale": ctypes.c_float(2.0)})
    assert torch.equal(out[:3], torch.stack([table[6] * 2, table[0] * 2, torch.zeros_like(table[0])]))
    assert out[3].isnan().all()


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("act", ACTS)
def test_norm_is_that_of_the_sum_which_is_kept(bench: Bench, act: str, residual: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    x, kept, weight = (torch.randn(size, generator=draw).to(TORCH[act]) for size in ((3, 1088), (3, 1088), (1088,)))
    kernel, threads = rows.rms_norm(act, 1088, residual=residual)
    out, before = torch.full((2, 1088), math.nan, dtype=x.dtype), kept.clone()
    bench.run(
        kernel, (3,), threads,
        {"out": out, "in": x, "residual": kept if residual else None, "weight": weight, "rows": ints(2, 0),
         "count": ints(2), "width": i32(1088), "eps": ctypes.c_float(1e-5)},
        shared_bytes=threads // 32 * 4, updated=("residual",),
    )  # fmt: skip
    summed = (x.float() + before.float()).to(x.dtype) if residual else x
    if residual:
        assert torch.equal(kept[[2, 0]], summed[[2, 0]]) and torch.equal(kept[1], before[1])
    y = summed[[2, 0]].double()
    expected = y / torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-5) * weight.double()
    assert off_by(out, expected, expected.abs()) <= BOUNDS[act]


@pytest.mark.parametrize("act", ACTS)
def test_a_norm_is_added_to_what_is_there(bench: Bench, act: str) -> None:
    draw = torch.Generator().manual_seed(2)
    x, out, weight = (torch.randn(size, generator=draw).to(TORCH[act]) for size in ((3, 1088), (3, 1088), (1088,)))
    kernel, threads = rows.rms_norm(act, 1088, residual=False, add=True)
    before = out.clone()
    bench.run(
        kernel, (3,), threads,
        {"out": out, "in": x, "residual": None, "weight": weight, "rows": None, "count": ints(2), "width": i32(1088),
         "eps": ctypes.c_float(1e-5)},
        shared_bytes=threads // 32 * 4, outputs=(), updated=("out",),
    )  # fmt: skip
    y = x[:2].double()
    added = y / torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-5) * weight.double()
    expected = before[:2].double() + added
    assert off_by(out[:2], expected, expected.abs()) <= BOUNDS[act]
    assert torch.equal(out[2], before[2])


@pytest.mark.parametrize(("act", "code", "residual"), QUANTIZED)
def test_a_norm_in_8_bits_has_a_scale_for_each_row(bench: Bench, act: str, code: str, residual: bool) -> None:
    draw, width = torch.Generator().manual_seed(3), 2304
    x, kept, weight = (torch.randn(size, generator=draw).to(TORCH[act]) for size in ((5, width), (5, width), (width,)))
    x[1], x[2, 5], x[3, 7] = 0.0, math.nan, math.inf
    kernel, threads = rows.rms_norm_quantize(act, code, width, residual=residual)
    codes, scales, before = torch.zeros(5, width, dtype=TORCH[code]), torch.full((5,), -1.0), kept.clone()
    bench.run(
        kernel, (5,), threads,
        {"codes": codes, "scales": scales, "in": x, "residual": kept if residual else None, "weight": weight,
         "count": ints(4), "width": i32(width), "eps": ctypes.c_float(1e-5)},
        shared_bytes=threads // 16 * 4, outputs=("codes", "scales"), updated=("residual",),
    )  # fmt: skip
    y = ((x.float() + before.float()).to(x.dtype) if residual else x).double()
    expected = (y / torch.sqrt((y * y).mean(-1, keepdim=True) + 1e-5) * weight.double())[:2]
    assert scales[2].isnan() and scales[3].isnan() and scales[4] == -1  # infinity over infinity
    top = {"fp8_e4m3": 448.0, "int8": 127.0}[code]
    assert torch.allclose(scales[:2].double(), expected.abs().amax(-1).clamp(min=1e-30) / top, rtol=1e-5)
    got = codes[:2].double() * scales[:2, None].double()
    step = expected.abs() / 16 + scales[:2, None] / 512 if code == "fp8_e4m3" else scales[:2, None].double() / 2
    assert ((got - expected).abs() <= step * 1.001 + expected.abs() * 1e-5).all()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("act", ACTS)
def test_the_gated_activation_is_torchs(bench: Bench, act: str, activation: str) -> None:
    x = (torch.randn(2, 2 * 40, generator=torch.Generator().manual_seed(2)) * 4).to(TORCH[act])
    out = torch.full((2, 40), math.nan, dtype=x.dtype)
    arguments = {"out": out, "in": x, "rows": ints(2), "width": i32(40)}
    bench.run(rows.act_mul(act, activation), (3, 1), 128, arguments)
    gate, up = x.double().chunk(2, -1)
    active = (
        torch.nn.functional.silu(gate) if activation == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
    )
    assert off_by(out, active * up, (active * up).abs()) <= BOUNDS[act]


@pytest.mark.parametrize(("act", "kv", "dim", "rope", "norm"), ROPE_STORES)
def test_heads_are_normed_rotated_and_stored_as_the_format_says(
    bench: Bench, act: str, kv: str, dim: int, rope: str, norm: bool
) -> None:
    draw = torch.Generator().manual_seed(dim)
    heads, kv_heads, block, positions = 3, 2, 16, (5, 0, 33)
    q, k, v = (torch.randn(4, n * dim, generator=draw).to(TORCH[act]) for n in (heads, kv_heads, kv_heads))
    k[1, 2], v[2, 3], v[0, 1] = 1e4, math.nan, 6e4
    before = q.clone()
    q_norm, k_norm = (torch.rand(dim, generator=draw).to(TORCH[act]) + 1 for _ in range(2))
    angles = torch.rand(64, dim // 2, generator=draw) * 6
    cos, sin = angles.cos(), angles.sin()
    half = block * KVFormat(kv).head_bytes(dim)
    offset, stride = 2 * kv_heads * half, 4 * kv_heads * half
    arena = torch.full((5, stride), 0xAA, dtype=torch.uint8)
    bench.run(
        rows.rope_store(act, kv, dim), (4, 2), 128,
        {"q": q, "k": k, "v": v, "arena": arena, "tables": torch.tensor([[3, 1, 4], [2, 0, 0]], dtype=torch.int32),
         "slot": ints(0, 1, 0), "position": ints(*positions), "rows": ints(3),
         "q_norm": q_norm if norm else None, "k_norm": k_norm if norm else None,
         "cos": cos, "sin": sin, "scales": None, "order": None, "follow": None, "level": None, "centre": None,
         "stride": ctypes.c_int64(stride), "offset": ctypes.c_int64(offset),
         "max_blocks": i32(3), "heads": i32(heads), "kv_heads": i32(kv_heads), "q_stride": i32(heads * dim),
         "kv_stride": i32(kv_heads * dim), "rotary": i32(0 if rope == "none" else dim),
         "interleaved": i32(rope == "interleaved"), "eps": ctypes.c_float(1e-6),
         "q_scale": ctypes.c_float(1), "block_bits": i32(block_bits(block))},
        outputs=(), updated=("q", "arena"),
    )  # fmt: skip

    def rotated(x: torch.Tensor, count: int, weight: torch.Tensor) -> torch.Tensor:
        x = x[:3].view(3, count, dim).double()
        if norm:
            x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight.double()
        if rope == "none":
            return x
        c, s = (y[list(positions)].double()[:, None] for y in (cos, sin))
        a, b = x.chunk(2, -1) if rope == "halves" else (x[..., 0::2], x[..., 1::2])
        a, b = a * c - b * s, b * c + a * s
        return torch.cat((a, b), -1) if rope == "halves" else torch.stack((a, b), -1).flatten(2)

    expected = rotated(before, heads, q_norm)
    assert off_by(q[:3].view(3, heads, dim), expected, expected.abs()) <= BOUNDS[act]
    assert torch.equal(q[3], before[3])
    keys = rotated(k, kv_heads, k_norm).float()
    for row, (place, inside) in enumerate(((3, 5), (2, 0), (4, 1))):
        for head in range(kv_heads):
            # The reference's view of a head has K transposed: so has a block of one token.
            want = torch.zeros(1, 2 * KVFormat(kv).head_bytes(dim), dtype=torch.uint8).numpy().reshape(-1)
            view = view_of(want, want.size, 0, 0, 1, dim, KVFormat(kv))
            value = v[row].view(kv_heads, dim)[head].float()
            broken = not bool(value.isfinite().all())
            view.write(0, 0, keys[row, head], value, keys[row, head])
            codes = dim * KVFormat(kv).bytes_per_value
            base = offset + head * 2 * half
            for which, start in ((0, base), (1, base + half)):
                got = arena[place, start + inside * codes : start + (inside + 1) * codes].numpy().view(_numpy(kv))
                expected_codes = want[which * (want.size // 2) :][:codes].view(_numpy(kv))
                if kv == "f32":
                    _same_floats(got, expected_codes, broken, which)
                else:
                    # float32 against float64 arithmetic before rounding: a code may differ by its last step.
                    assert np.abs(got.astype(int) - expected_codes.astype(int)).max() <= 1
    untouched = arena[[0, 1]]
    assert (untouched == 0xAA).all()


def _numpy(kv: str) -> type[np.generic]:
    return {"f32": np.float32, "int8": np.int8}.get(kv, np.uint8)


def _same_floats(got: np.ndarray, expected: np.ndarray, broken: bool, which: int) -> None:
    """Equal, but that a token with a V that is not finite has its mark in K and a finite V."""
    if broken and which == 0:
        assert math.isnan(got[0])
        got, expected = got[1:], expected[1:]
    if broken and which == 1:
        expected = np.where(np.isfinite(expected), expected, 0)
    assert np.allclose(got, expected, rtol=1e-6, atol=0)


def test_copies_move_tokens_with_their_scales_and_nothing_else(bench: Bench) -> None:
    block, row, halves = 16, 32, 4
    half = block * (row + 2)
    arena = torch.randint(0, 256, (3, halves * half), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    before = arena.clone()
    bench.run(
        rows.COPY_TOKENS, (1, halves), 128,
        {"arena": arena, "copies": ints(2, 0, 5), "stride": ctypes.c_int64(halves * half), "block": i32(block),
         "row": i32(row), "scale": i32(2)},
        outputs=(), updated=("arena",),
    )  # fmt: skip
    expected = before.clone()
    for h in range(halves):
        for start, bytes_per_token in ((h * half, row), (h * half + block * row, 2)):
            expected[0, start : start + 5 * bytes_per_token] = before[2, start : start + 5 * bytes_per_token]
    assert torch.equal(arena, expected)


def test_blocks_are_gathered_into_a_buffer(bench: Bench) -> None:
    arena = torch.randint(0, 256, (6, 4112), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    out = torch.zeros(2, 4112, dtype=torch.uint8)
    bench.run(
        rows.MOVE_BLOCKS, (2, 3), 128,
        {"out": out, "from": arena, "to_ids": None, "from_ids": ints(4, 1), "stride": ctypes.c_int64(4112)},
    )  # fmt: skip
    assert torch.equal(out, arena[[4, 1]])


def noise(bench: Bench, seed: int, position: int, count: int) -> torch.Tensor:
    out = torch.full((count,), math.nan)
    bench.run(
        rows.NOISE, (-(-count // 512),), 128,
        {"out": out, "seed": ctypes.c_int64(seed), "position": i32(position), "count": i32(count)},
    )  # fmt: skip
    return out


def test_noise_is_the_references_up_to_its_rounding(bench: Bench) -> None:
    seed, position = 0x1234567890ABCDEF, 77
    exact = gumbel(token_words(seed, position, 1003))
    assert np.abs(noise(bench, seed, position, 1003).numpy() - exact).max() < 1e-6 * np.abs(exact).max()


CPU_NOISE = """
#include "noise.hpp"
extern "C" void noise(float* out, uint64_t seed, int position, int count) {
  using namespace llmctl::cpu;
  for (int first = 0; first < count / 4; first += kLanes) {
    Avx2::I words[4];
    philox<Avx2>(first, position, seed, words);
    for (int w = 0; w < 4; ++w) {
      float lanes[kLanes];
      Avx2::store(lanes, gumbel<Avx2>(words[w]));
      for (int lane = 0; lane < kLanes; ++lane) out[4 * (first + lane) + w] = lanes[lane];
    }
  }
}
"""


@pytest.mark.skipif("fma" not in read_machine().features, reason="the CPU's noise is compared in its AVX2 build")
def test_noise_has_the_bits_of_the_cpus(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "noise.cpp").write_text(CPU_NOISE)
    flags = (
        "-std=c++20",
        "-O1",
        "-mavx2",
        "-mfma",
        "-mf16c",
        "-ffp-contract=off",
        "-DLLMCTL_ISA_AVX2",
        "-shared",
        "-fPIC",
    )
    command = [compiler(), *flags, f"-I{FOLDER.parent / 'cpu'}", "-o", tmp_path / "noise.so", tmp_path / "noise.cpp"]
    subprocess.run(command, check=True)
    expected = torch.zeros(4096)
    ctypes.CDLL(str(tmp_path / "noise.so")).noise(
        ctypes.c_void_p(expected.data_ptr()), ctypes.c_uint64(987654321987), 4321, 4096
    )
    assert torch.equal(noise(bench, 987654321987, 4321, 4096), expected)


def sampled(bench: Bench, logits: np.ndarray, requests: list[dict[str, float]], tokens: list[list[int]]) -> dict:
    """What the kernel and the reference make of the same rows."""
    count, vocabulary = logits.shape
    asked = np.zeros(count, SAMPLE_ROW)
    kept = [np.array(row, np.int32) for row in tokens]
    for row, (request, history) in enumerate(zip(requests, kept)):
        defaults = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "logprobs": 3, "seed": 11 + row}
        for name, value in {**defaults, **request}.items():
            asked[row][name] = value
        asked[row]["tokens"], asked[row]["length"], asked[row]["prompt_len"] = history.ctypes.data, len(history), 2
    names = {"token": np.int32, "logprob": np.float32, "finite": np.uint8}
    want = {name: np.zeros(count, kind) for name, kind in names.items()}
    want |= {"top_ids": np.zeros((count, 20), np.int32), "top_logprobs": np.zeros((count, 20), np.float32)}
    build_reference(SampleArgs(logits=logits, vocab_size=vocabulary, rows=asked, **want))(count)

    seen = [np.unique(history) for history in kept]
    outputs = [np.array([int((history[2:] == t).sum()) for t in ids], np.int32) for history, ids in zip(kept, seen)]
    packed = np.zeros(count, np.dtype([
        ("seed", np.uint64), ("position", np.int32), ("seen_first", np.int32), ("seen_count", np.int32),
        ("bias_first", np.int32), ("bias_count", np.int32), ("top_k", np.int32), ("logprobs", np.int32),
        ("temperature", np.float32), ("top_p", np.float32), ("min_p", np.float32), ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32), ("frequency_penalty", np.float32),
        ("reserved", np.int32),
    ]))  # fmt: skip
    for name in set(packed.dtype.names or ()) & set(SAMPLE_ROW.names or ()) - {"reserved"}:
        packed[name] = asked[name]
    packed["position"] = asked["length"]
    packed["seen_count"] = [len(ids) for ids in seen]
    packed["seen_first"] = np.cumsum([0, *packed["seen_count"]])[:-1]
    assert packed.dtype.itemsize == 64
    got = {name: torch.from_numpy(np.zeros_like(array)) for name, array in want.items()}
    order = ("token", "logprob", "finite", "top_ids", "top_logprobs")
    bench.run(
        rows.sample(SAMPLE_THREADS), (count + 1,), SAMPLE_THREADS,
        {**{name: got[name] for name in order}, "scores": torch.full((count, vocabulary), math.nan),
         "logits": torch.from_numpy(logits), "rows": torch.from_numpy(packed.view(np.uint8)), "count": ints(count),
         "seen": torch.from_numpy(np.concatenate(seen)), "outputs": torch.from_numpy(np.concatenate(outputs)),
         "bias_ids": ints(0), "bias_values": torch.zeros(1), "vocabulary": i32(vocabulary),
         "stride": ctypes.c_int64(vocabulary)},
        shared_bytes=rows.sample_shared_bytes(SAMPLE_THREADS), outputs=(*order, "scores"),
    )  # fmt: skip
    return {name: (got[name].numpy(), want[name]) for name in order}


def test_samples_are_the_references(bench: Bench) -> None:
    rng = np.random.default_rng(5)
    requests = [
        {"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.2},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.05, "temperature": 1.3},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.3, "temperature": 0.0},
        {"top_k": 1}, {"top_p": 1e-6},
    ]  # fmt: skip
    logits = (rng.standard_normal((len(requests), 301)) * 2).astype(np.float32)
    histories = [list(rng.integers(0, 301, 12)) for _ in requests]
    result = sampled(bench, logits, requests, histories)
    assert list(result["token"][0]) == list(result["token"][1])
    assert np.array_equal(*result["top_ids"])
    for name in ("logprob", "top_logprobs"):
        got, want = (np.where(np.isfinite(x), x, -1e9) for x in result[name])
        assert np.allclose(got, want, rtol=1e-5, atol=1e-5)


def test_ties_go_to_the_lower_token_also_where_they_are_cut(bench: Bench) -> None:
    logits = np.zeros((3, 301), np.float32)
    logits[1, 7::10] = 4.0
    logits[2, 5] = math.inf
    requests = [{"temperature": 0.0}, {"top_k": 3, "seed": 1}, {}]
    result = sampled(bench, logits, requests, [[1, 2, 3]] * 3)
    token, finite = result["token"][0], result["finite"][0]
    assert list(token) == list(result["token"][1])
    assert token[0] == 0 and token[1] in (7, 17, 27) and token[2] == -1
    assert list(finite) == [1, 1, 0]
