"""The file of tier 2: what comes back is what was written, to the bit, or nothing."""

import errno
import os
import random

import numpy as np
import pytest

from llmctl.engine.kv_groups import KVGroup
from llmctl.engine.runner.cache import BlockShape, allocate
from llmctl.engine.runner.shelves import Shelf, Shelves
from llmctl.engine.runner.tier_store import open_tier
from llmctl.engine.schedule.step import Swap
from llmctl.kernels.errors import CapacityError
from llmctl.kernels.formats import KVFormat

BLOCKS = 6


@pytest.fixture
def groups():
    half, byte = KVFormat("f16"), KVFormat("int8")
    kinds = (((0, 1), BlockShape(8, 2, 16, (half, half))), ((2,), BlockShape(8, 1, 16, (byte,))))
    made = tuple(
        allocate(place, KVGroup(layers=layers, bytes_per_token=0, num_blocks=BLOCKS), shape, "generic")
        for place, (layers, shape) in enumerate(kinds)
    )
    rng = np.random.default_rng(1)
    for cache in made:
        cache.arena[:] = rng.integers(0, 256, len(cache.arena), np.uint8)
    return made


@pytest.fixture
def store(groups, tmp_path):
    made = open_tier(tmp_path / "swap", Shelves([Shelf(groups, 4)]), 8)
    yield made
    made.close()


def content(groups, blocks):
    sizes = [cache.bytes_per_block for cache in groups]
    return [bytes(c.arena[b * size : (b + 1) * size]) for c, size, b in zip(groups, sizes, blocks)]


def test_blocks_come_back_to_the_bit_wherever_they_are_put(store, groups):
    rng = random.Random(4)
    held = {}
    for _ in range(200):
        place, blocks = rng.randrange(4), (rng.randrange(BLOCKS), rng.randrange(BLOCKS))
        if place in held and rng.random() < 0.5:
            assert store.move([Swap(place, blocks, False)]) == ()
            assert content(groups, blocks) == held[place]
        else:
            for cache, block in zip(groups, blocks):
                cache.arena[block * cache.bytes_per_block] ^= rng.randrange(256)
            held[place] = content(groups, blocks)
            assert store.move([Swap(place, blocks, True)]) == ()


def test_places_of_a_group_of_its_own_follow_those_that_are_shared(groups, tmp_path, caplog):
    full, window = groups
    store = open_tier(tmp_path, Shelves([Shelf((full,), 2), Shelf((window,), 3)]), 8)
    kept = [content((full,), (1,)), content((window,), (2,)), content((window,), (3,))]
    assert store.move([Swap(1, (1,), True), Swap(2, (2,), True), Swap(4, (3,), True)]) == ()
    size, other = full.bytes_per_block, window.bytes_per_block
    assert os.fstat(store._file.fileno()).st_size == 2 * size + 3 * other
    assert store.move([Swap(1, (0,), False), Swap(4, (0,), False), Swap(2, (5,), False)]) == ()
    assert [content((full,), (0,)), content((window,), (5,)), content((window,), (0,))] == kept
    (byte,) = os.pread(store._file.fileno(), 1, 2 * size)
    os.pwrite(store._file.fileno(), bytes([byte ^ 1]), 2 * size)
    assert store.move([Swap(2, (1,), False), Swap(1, (2,), False), Swap(3, (1,), False)]) == (2, 3)
    assert content((full,), (2,)) == kept[0] and not any(content((window,), (1,))[0])
    store.close()


def test_moves_are_made_in_their_order(store, groups):
    first, second = content(groups, (0, 0)), content(groups, (1, 1))
    moves = [Swap(0, (0, 0), True), Swap(1, (1, 1), True), Swap(0, (1, 1), False), Swap(1, (0, 0), False)]
    assert store.move(moves) == ()
    assert (content(groups, (1, 1)), content(groups, (0, 0))) == (first, second)


def test_one_bit_that_has_changed_is_found_logged_and_leaves_zeros(store, groups, caplog):
    store.move([Swap(2, (3, 3), True), Swap(1, (4, 4), True)])
    size = sum(cache.bytes_per_block for cache in groups)
    where = 2 * size + size // 2
    (byte,) = os.pread(store._file.fileno(), 1, where)
    os.pwrite(store._file.fileno(), bytes([byte ^ 16]), where)
    assert store.move([Swap(2, (0, 0), False), Swap(1, (5, 5), False)]) == (2,)
    assert not any(any(part) for part in content(groups, (0, 0)))
    assert content(groups, (5, 5)) == content(groups, (4, 4))
    assert "place 2 is not what was written there" in caplog.text
    assert store.move([Swap(2, (0, 0), False)]) == (2,)


def test_what_was_never_written_or_stands_in_another_place_is_a_miss(store, groups):
    assert store.move([Swap(3, (0, 0), False)]) == (3,)
    store.move([Swap(0, (1, 1), True), Swap(1, (2, 2), True)])
    size = sum(cache.bytes_per_block for cache in groups)
    os.pwrite(store._file.fileno(), os.pread(store._file.fileno(), size, size), 0)
    assert store.move([Swap(0, (0, 0), False)]) == (0,)


def test_a_file_cut_short_is_a_miss(store, caplog):
    store.move([Swap(3, (1, 1), True)])
    os.ftruncate(store._file.fileno(), 100)
    assert store.move([Swap(3, (0, 0), False)]) == (3,)
    assert "the file ends too early" in caplog.text


def test_a_disk_that_takes_a_part_at_a_time_gets_all_of_it(store, groups, monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, part, offset: write(file, part[:100], offset))
    kept = content(groups, (1, 1))
    assert store.move([Swap(0, (1, 1), True)]) == ()
    assert store.move([Swap(0, (0, 0), False)]) == ()
    assert content(groups, (0, 0)) == kept


def test_a_full_disk_fails_that_write_alone_and_is_told_once(store, groups, monkeypatch, caplog):
    kept = content(groups, (1, 1))
    assert store.move([Swap(0, (1, 1), True)]) == ()
    write, room = os.pwrite, [1500]

    def pwrite(file, part, offset):
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(file, part[: room[0]], offset)
        room[0] -= count
        return count

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert store.move([Swap(1, (2, 2), True), Swap(2, (3, 3), True), Swap(0, (4, 4), False)]) == (1, 2)
    assert content(groups, (4, 4)) == kept
    assert store.move([Swap(1, (4, 4), False)]) == (1,)
    assert caplog.text.count("No space left on device") == 1


def test_the_file_has_no_name(store, tmp_path):
    store.move([Swap(0, (0, 0), True)])
    assert list((tmp_path / "swap").iterdir()) == []


def test_a_disk_that_is_too_small_is_refused_with_the_figures(groups, tmp_path):
    with pytest.raises(CapacityError, match="swapped KV blocks: it needs"):
        open_tier(tmp_path, Shelves([Shelf(groups, 1 << 40)]), 8)


def test_a_folder_that_cannot_be_written_is_refused(groups, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CapacityError, match="cannot make a file for swapped KV blocks"):
        open_tier(tmp_path / "file" / "swap", Shelves([Shelf(groups, 4)]), 8)
