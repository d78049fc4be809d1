"""Arrivals are reproducible, and their rate and spread are what was asked."""

import itertools
import math
import random
import statistics

import pytest

from llmctl.cli.bench.load_shape import Load
from llmctl.kernels.errors import UsageError


def gaps(burstiness, rate=10.0, count=4000):
    times = Load(0, rate, burstiness).arrivals(count, random.Random(1))
    return [after - before for before, after in itertools.pairwise(times)]


def test_without_a_rate_everything_is_due_at_once():
    assert Load(4).arrivals(3, random.Random(0)) == (0.0, 0.0, 0.0)


def test_arrivals_are_the_same_for_the_same_seed():
    load = Load(0, 5.0)
    assert load.arrivals(50, random.Random(7)) == load.arrivals(50, random.Random(7))
    assert load.arrivals(50, random.Random(7)) != load.arrivals(50, random.Random(8))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, math.inf])
def test_mean_gap_is_that_of_the_rate_and_spread_that_of_the_burstiness(burstiness):
    found = gaps(burstiness)
    assert statistics.fmean(found) == pytest.approx(0.1, rel=0.1)
    variation = statistics.pstdev(found) / statistics.fmean(found)
    assert variation == pytest.approx(1 / math.sqrt(burstiness), rel=0.1, abs=1e-9)


@pytest.mark.parametrize("load", [Load(-1), Load(0, 0.0), Load(0, -2.0), Load(0, math.nan), Load(0, 1.0, 0.0)])
def test_values_that_cannot_work_are_refused(load):
    with pytest.raises(UsageError, match=r"--(max-concurrency|request-rate|burstiness) is"):
        load.check()
