"""What an 8-bit cache is stored with: found by a probe text and kept, or brought by the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from llmctl.engine.config import EngineConfig
from llmctl.engine.load.hub import Source
from llmctl.engine.load.packed import PackedModel, open_packed
from llmctl.engine.plan import resolve
from llmctl.engine.runner import kv_fit, steering
from llmctl.engine.runner.runner import Runner
from llmctl.engine.score import Scorer
from llmctl.kernels.errors import CheckpointError
from llmctl.kernels.ops import KVLayer

from .tiny import write_checkpoint


def open_tiny(folder: Path) -> PackedModel:
    return open_packed(Source(folder, "hf", "tiny"), cache=folder / "cache")


def layers_of(model: PackedModel, kind: str, **options: object) -> dict[int, KVLayer]:
    config = EngineConfig(kv_cache_dtype=kind, max_model_len=64, max_num_seqs=2, threads=1, **options)
    plan = resolve(config, model)[0]
    runner = Runner(model, plan)
    runner.close()
    return kv_fit.fit_cache(runner.groups[0].layers, model, plan)


def add(folder: Path, **tensors: np.ndarray) -> None:
    """More tensors for the checkpoint; `__` in a name stands for a dot."""
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name.replace("__", "."): array for name, array in tensors.items()}, path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, "qwen3")


def test_a_fit_is_made_once_and_kept_beside_the_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_tiny(folder)
    made = layers_of(model, "fp8")
    monkeypatch.setattr(kv_fit, "_measure", lambda *_: pytest.fail("made again"))
    again = layers_of(open_tiny(folder), "int8")
    for layer in (0, 1):
        ours, kept = made[layer].steering, again[layer].steering
        assert ours is not None and kept is not None
        assert np.array_equal(ours.order, kept.order) and np.array_equal(ours.follow, kept.follow)
        assert ours.follow.any()


def test_a_fit_that_is_damaged_is_made_again(folder: Path) -> None:
    model = open_tiny(folder)
    made = layers_of(model, "int8")[0].steering
    (path,) = model.folder.glob("kv-fit-*.npz")
    path.write_bytes(path.read_bytes()[:100])
    again = layers_of(model, "int8")[0].steering
    assert made is not None and again is not None and np.array_equal(made.follow, again.follow)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("largest", lambda array: array[:, :1]),
        ("order", lambda array: array.astype(np.int64)),
        ("order", lambda array: array * 0),
        ("follow", lambda array: array * np.float16(np.nan)),
        ("level", lambda array: array * 0),
        ("centre", lambda array: array + np.float32(np.inf)),
    ],
)
def test_a_fit_that_is_whole_but_wrong_is_made_again(
    folder: Path, name: str, spoil: Callable[[np.ndarray], np.ndarray]
) -> None:
    model = open_tiny(folder)
    made = layers_of(model, "int8")[0].steering
    (path,) = model.folder.glob("kv-fit-*.npz")
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **arrays | {name: spoil(arrays[name])})
    again = layers_of(model, "int8")[0].steering
    assert made is not None and again is not None
    for ours, theirs in zip(astuple(made), astuple(again), strict=True):
        assert np.array_equal(ours, theirs)


def test_caches_of_16_bits_and_skipped_layers_are_not_fitted(folder: Path) -> None:
    model = open_tiny(folder)
    assert all(kv.steering is None for kv in layers_of(model, "float16").values())
    assert not list(model.folder.glob("kv-fit-*"))
    mixed = layers_of(model, "int8", kv_cache_dtype_skip_layers=("1",))
    assert mixed[0].steering is not None and mixed[1].steering is None


def test_scales_of_the_checkpoint_are_those_of_fp8(folder: Path) -> None:
    add(
        folder,
        model__layers__0__self_attn__k_scale=np.array([0.25], np.float16),
        model__layers__0__self_attn__v_scale=np.array([0.5, 2.0], np.float32),
        model__layers__1__self_attn__k_proj__k_scale=np.array(3.0, np.float32),
        model__layers__1__self_attn__v_proj__v_scale=np.array(0.0, np.float32),
    )
    fp8 = layers_of(open_tiny(folder), "fp8")
    assert fp8[0].scales is not None and fp8[0].scales.tolist() == [[0.25, 0.25], [0.5, 2.0]]
    assert fp8[1].scales is None  # one of the two is not positive
    assert layers_of(open_tiny(folder), "int8")[0].scales is None


def test_a_scale_of_another_shape_is_refused(folder: Path) -> None:
    add(folder, model__layers__0__self_attn__k_scale=np.ones(3, np.float32))
    with pytest.raises(CheckpointError, match="k_scale` of .* has shape .3.") as caught:
        open_tiny(folder)
    assert "each of 2 KV heads" in caught.value.hint


def test_a_centre_is_taken_off_k_as_its_scales_leave_it(folder: Path) -> None:
    steering = layers_of(open_tiny(folder), "int8")[0].steering
    assert steering is not None and steering.centre is not None
    how = replace(steering, centre=np.full_like(steering.centre, 6.0))
    scaled = kv_fit._of_scaled(how, np.array([[2.0, 0.5], [1.0, 1.0]], np.float32)).centre
    assert scaled is not None and (scaled[0] == 3).all() and (scaled[1] == 12).all()
    assert kv_fit._of_scaled(how, None) is how


@pytest.mark.parametrize(("largest", "scale"), [(10.0, None), (223.0, None), (300.0, 2.0), (1000.0, 8.0)])
def test_without_them_a_power_of_two_keeps_what_the_probe_saw_twice_in_range(
    folder: Path, largest: float, scale: float | None
) -> None:
    model = open_tiny(folder)
    steering = layers_of(model, "fp8")[0].steering
    assert steering is not None
    seen = np.array([[1.0, largest], [1.0, 1.0]], np.float32)
    found = kv_fit._scales(model, 0, kv_fit.KVFit(steering, seen), 448.0)
    assert (found is None) == (scale is None)
    if found is not None:
        assert found.tolist() == [[1.0, scale], [1.0, 1.0]]


def test_a_fit_that_cannot_be_written_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    model = open_tiny(folder)
    monkeypatch.setattr(os, "replace", full)
    assert layers_of(model, "int8")[0].steering is not None
    assert not [path for path in model.folder.iterdir() if "kv-fit" in path.name]


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_large_constants_in_k_cost_a_fraction_with_centres_and_levels(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pairs that turn slowly, which have centres, and in a faster one, for whose range levels are."""
    folder = write_checkpoint(tmp_path, "qwen2")
    name = "model.layers.{}.self_attn.k_proj.bias"
    tensors = load_file(folder / "model.safetensors")
    for layer in (0, 1):
        bias = tensors[name.format(layer)].reshape(2, 16)
        bias[:, [6, 7, 15]] = 50.0
        bias[:, 2] = 8.0
    save_file(tensors, folder / "model.safetensors")
    model, tokens = open_tiny(folder), np.random.default_rng(5).integers(3, 300, 120).tolist()

    def log_probs(kind: str) -> np.ndarray:
        logits = Scorer(model, len(tokens), EngineConfig(kv_cache_dtype=kind, threads=1)).logits(tokens)
        return logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))

    def divergence(kind: str) -> float:
        return float((np.exp(exact) * (exact - log_probs(kind))).sum(axis=1).mean())

    exact = log_probs("float32")
    fitted = divergence(kind)
    monkeypatch.setattr(kv_fit, "VERSION", 0)
    monkeypatch.setattr(steering, "find_centre", lambda k, _: np.zeros(k.shape[1], np.complex128))
    monkeypatch.setattr(steering, "find_levels", lambda k, *_: np.ones(k.shape[1], np.float32))
    assert 0 < fitted < 0.1 * divergence(kind)
