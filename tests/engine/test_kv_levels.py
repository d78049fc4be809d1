"""Centres and levels of K, from K of a text."""

from __future__ import annotations

import numpy as np
import pytest

from llmctl.engine.runner.levels import as_pairs, find_centre, find_levels
from llmctl.engine.runner.steering import find_steering

TOKENS, POSITIONS = 200, 1000


def some_keys(constant: list[float], spread: list[float]) -> np.ndarray:
    rng = np.random.default_rng(1)
    shape = TOKENS, len(constant)
    return np.array(constant) + np.array(spread) * (rng.standard_normal(shape) + 1j * rng.standard_normal(shape))


def turning(*per_position: float) -> np.ndarray:
    return np.exp(1j * np.outer(np.arange(POSITIONS), per_position))


def test_a_centre_is_what_stays_of_a_large_mean_at_all_positions() -> None:
    k = some_keys([50, 50, 50, 2, 0], [1, 1, 1, 1, 1])
    centre = find_centre(k, turning(0.0, 1e-4, 0.3, 0.0, 0.0))
    assert np.allclose(centre[:2], [50, 50 * np.exp(0.05j)], atol=0.3)
    assert not centre[2:].any(), "one pair turns, one varies, one has no mean"


def test_levels_are_powers_of_two_that_bring_pairs_to_one_range() -> None:
    k = some_keys([0, 0, 0, 40, 50], [1, 4, 0.1, 1, 1])
    turns = turning(0.1, 0.1, 0.1, 0.1, 0.0)
    centre = np.array([0, 0, 0, 0, 50])
    level = find_levels(k, turns, centre)
    assert level.tolist() == [1 / 16, 1 / 4, 1 / 128, 1, 1 / 16]
    assert (find_levels(np.zeros_like(k), turns, centre * 0) == 1).all()


def test_pairs_that_are_next_to_nothing_leave_the_others_where_they_are() -> None:
    k = some_keys([0, 0, 0, 0, 0], [1, 1e-5, 1e-30, 0, 1])
    level = find_levels(k, turning(0.1, 0.1, 0.1, 0.1, 0.0), np.zeros(5))
    assert level.tolist() == [1, 2**-16, 2**-16, 2**-16, 1]


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e6, 1e18])
def test_steering_is_finite_whatever_the_size_of_some_keys(size: float) -> None:
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((40, 2, 16), (1, 40, 16), (1, 40, 16)))
    k[..., [2, 3, 10, 11]] *= np.float32(size)
    angles = np.outer(np.arange(POSITIONS), [1, 0.5, 0.3, 0.1, 0.1, 0.1, 0.1, 1e-5])
    how = find_steering(q, k, v, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), 0)
    for array in (how.follow, how.level, how.centre):
        assert array is not None and np.isfinite(array).all()


def test_scores_of_keys_that_are_stored_so_are_what_they_were_but_for_a_constant() -> None:
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in ((40, 2, 16), (1, 40, 16), (1, 40, 16)))
    k[..., [7, 15]] += 60
    k[..., 0] *= 9
    angles = np.outer(np.arange(POSITIONS), [1, 0.5, 0.3, 0.1, 0.1, 0.1, 0.1, 1e-5])
    how = find_steering(q, k, v, np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32), 0)
    assert how.level is not None and how.centre is not None
    assert how.level[0, 0] == 1 > how.level[0, 1:].max() and how.centre[0].nonzero()[0].tolist() == [7, 15]
    level = np.tile(how.level[0], 2)
    off = q[:, 0] @ k[0].T - (q[:, 0] * level) @ ((k[0] - how.centre[0]) / level).T
    assert np.ptp(off, axis=1).max() < 1e-4 * np.abs(off).max()


def test_pairs_are_the_halves_that_rotate_together() -> None:
    assert as_pairs(np.arange(6, dtype=np.float32)).tolist() == [3j, 1 + 4j, 2 + 5j]
