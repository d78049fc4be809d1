"""The engine's part of gpu_check.py, told to a driver that only writes down what a real one would be asked."""

from __future__ import annotations

import pytest

from llmctl.kernels.cuda import devices
from llmctl.kernels.cuda.attend import compute_of
from llmctl.kernels.cuda.host_driver import HostDriver
from llmctl.kernels.cuda.table import ModelNeeds, model_kernels
from llmctl.kernels.formats import WeightFormat

from . import gpu_engine
from .gpu_engine import TINY

CACHES = {"auto": "", "fp8": "fp8_e4m3", "int8": "int8"}


@pytest.fixture
def driver():
    host = HostDriver(None, (9, 0), processors=132, memory_total=8 << 30)
    devices.use_driver(host, host.get)
    yield host
    devices.use_driver(None)


@pytest.mark.parametrize(("kind", "cache"), [("f32", "auto"), *gpu_engine.MIXED])
def test_every_kernel_that_the_engine_launches_is_registered(driver: HostDriver, kind: str, cache: str) -> None:
    for deterministic in (True, False):
        found = gpu_engine.tokens(kind, device="cuda", deterministic=deterministic, kv_cache_dtype=cache)
        assert [len(tokens) for tokens in found] == [24] * 5
    kv = CACHES[cache] or kind
    needs = ModelNeeds(
        kind, compute_of(kind, kv), kv, TINY.head_dim, TINY.hidden_size, TINY.activation, (WeightFormat(kind),)
    )  # fmt: skip
    listed = {item.kernel for item in model_kernels("sm_90a", needs)}
    assert [kernel.expression for kernel in driver.loaded if kernel not in listed] == []
