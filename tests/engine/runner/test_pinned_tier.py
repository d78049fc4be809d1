"""Swaps on a stream of their own: events put them in order with what computes, and a missing one is found."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from llmctl.engine.kv_groups import KVGroup
from llmctl.engine.runner.cache import GroupCache
from llmctl.engine.runner.pinned_tier import PinnedTier, open_pinned_tier
from llmctl.engine.runner.shelves import Shelf, Shelves
from llmctl.engine.schedule.step import Swap
from llmctl.kernels.cuda.emulate import compiler
from llmctl.kernels.cuda.gpu import Gpu, open_gpu
from llmctl.kernels.cuda.host_driver import HostDriver, Misuse

BUILDS = Path(__file__).resolve().parents[3] / "build" / "emulated"
BLOCK = 256


@dataclass(frozen=True)
class World:
    """A GPU with an arena of four blocks, and three places for them."""

    driver: HostDriver
    gpu: Gpu
    cache: GroupCache
    tier: PinnedTier

    def compute(self, block: int, value: int) -> None:
        """What a step writes to a block."""
        at = self.gpu.address(self.cache.arena) + block * BLOCK
        self.driver.fill(at, value, BLOCK, self.gpu.stream)

    def move(self, *swaps: Swap, written: tuple[int, ...] = ()) -> None:
        """A step's swaps, of which it writes these blocks."""
        self.tier.join()
        events = (self.driver.event(timed=True) for _ in range(2))
        self.tier.move(swaps, {(0, block) for block in written}, *events)

    def content(self, block: int) -> int:
        """The first byte of a block when all is done."""
        self.tier.join()
        self.driver.synchronize(self.gpu.stream)
        return (ctypes.c_ubyte * BLOCK).from_address(self.gpu.address(self.cache.arena) + block * BLOCK)[0]


@pytest.fixture
def world() -> Iterator[World]:
    if compiler() is None:
        pytest.skip("emulation needs a C++ compiler")
    driver = HostDriver(BUILDS)
    gpu = open_gpu(driver, driver.devices()[0], driver.get, deterministic=True)
    group = KVGroup(layers=(0,), bytes_per_token=BLOCK // 16, num_blocks=4)
    cache = GroupCache(0, group, 16, BLOCK, gpu.reserve(4 * BLOCK), {}, lambda source, target, tokens: None)
    gpu.address(cache.arena)  # as ops that are bound to it do: zeros from now on
    yield World(driver, gpu, cache, open_pinned_tier(gpu, Shelves([Shelf((cache,), 3)]), 16))


OUT, BACK = Swap(0, (1,), True), Swap(0, (2,), False)


def test_what_is_moved_is_what_was_computed_before_and_not_what_came_after(world: World) -> None:
    world.compute(1, 7)
    world.move(OUT, written=(1,))
    world.compute(1, 9)
    world.move(BACK)
    assert (world.content(1), world.content(2)) == (9, 7)
    world.tier.close()
    world.gpu.close()


def test_a_step_that_writes_no_block_that_leaves_does_not_wait(world: World) -> None:
    world.compute(1, 7)
    world.move(OUT, written=(3,))
    world.compute(3, 9)
    world.driver.synchronize(world.gpu.stream)
    assert any(world.driver._waiting.values()), "the copy is still under way"
    world.compute(0, 9)
    assert world.content(0) == 9
    assert not any(world.driver._waiting.values())


def before_what_is_computed(world: World, value: int) -> None:
    world.compute(1, value)
    world.move(OUT)


def out_of_what_is_written(world: World, value: int) -> None:
    world.move(OUT, written=(1,))
    world.compute(1, value)


def into_what_the_next_step_writes(world: World, value: int) -> None:
    world.move(BACK)
    world.tier.join()
    world.compute(2, value)


@pytest.mark.parametrize(
    ("moves", "whose"),
    [(before_what_is_computed, "tier"), (out_of_what_is_written, "gpu"), (into_what_the_next_step_writes, "gpu")],
)
def test_a_missing_event_is_found(
    world: World, moves: Callable[[World, int], None], whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow, copies = HostDriver.follow, world.tier._stream

    def forget(self: HostDriver, stream: int, event: int) -> None:
        if (stream == copies) != (whose == "tier"):
            follow(self, stream, event)

    moves(world, 5)
    world.driver.synchronize(world.gpu.stream)
    world.driver.synchronize(copies)
    monkeypatch.setattr(HostDriver, "follow", forget)
    moves(world, 6)
    with pytest.raises(Misuse, match="that another stream changed meanwhile"):
        world.driver.synchronize(world.gpu.stream)
        world.driver.synchronize(copies)
