"""Paged memory under a real model: which block has which number does not matter, and a copy touches one block alone."""

from __future__ import annotations

import ctypes
import os
import random
import resource
from pathlib import Path

import msgspec
import numpy as np
import pytest

from llmctl.engine.assemble import build_engine, find_model
from llmctl.engine.config import EngineConfig, SpeculativeConfig
from llmctl.engine.engine import Engine
from llmctl.engine.plan import resolve
from llmctl.engine.request import Request, SamplingParams
from llmctl.engine.runner.runner import Runner
from llmctl.engine.schedule.step import Step
from llmctl.engine.score import Scorer

from .tiny import VOCAB, write_checkpoint

BLOCKS = 36


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3"))


def settings(folder: str, **options: object) -> EngineConfig:
    return EngineConfig(model=folder, max_model_len=256, num_gpu_blocks_override=BLOCKS, block_size=8, **options)


def add_requests(engine: Engine, count: int) -> None:
    rng = random.Random(3)
    stem = [rng.randrange(3, VOCAB) for _ in range(40)]
    for number in range(count):
        prompt = stem[: rng.randrange(40)] + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 30))]
        sampling = SamplingParams(n=3 if number % 3 == 0 else 1, logprobs=2)
        engine.add(
            Request(id=f"{number}", prompt=tuple(prompt), sampling=sampling, seed=number, stop_ids=(), max_tokens=24)
        )


def renumbered(step: Step, ids: list[int]) -> Step:
    """The step with every block id put through a permutation."""
    change = msgspec.structs.replace
    return change(
        step,
        tables=tuple(change(each, blocks=tuple(ids[block] for block in each.blocks)) for each in step.tables),
        copies=tuple(change(each, source=ids[each.source], target=ids[each.target]) for each in step.copies),
        swaps=tuple(change(each, blocks=tuple(ids[block] for block in each.blocks)) for each in step.swaps),
    )


def test_shuffled_block_ids_leave_every_bit_as_it_was(folder: str) -> None:
    recording: list[bytes] = []
    config = settings(folder, swap_space=0.01)
    engine, _ = build_engine(config, epoch=1, record=recording.append)
    add_requests(engine, 12)
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert stats.tier_writes and stats.prefix_hit_tokens
    engine.close()
    steps = [msgspec.msgpack.decode(each, type=Step) for each in recording]
    model = find_model(config)
    ids = list(range(BLOCKS))
    random.Random(9).shuffle(ids)
    plain, shuffled = (Runner(model, resolve(config, model)[0]) for _ in range(2))
    for step in steps:
        one, other = plain.forward(step).copy(), shuffled.forward(renumbered(step, ids))
        assert one.tobytes() == other.tobytes()
        for runner in (plain, shuffled):
            runner._tier.move(()) if not step.swaps else None
            runner._sampler.sample(step.chunks) if step.chunks else None


def test_a_copy_on_write_copies_one_block_and_leaves_all_others_as_they_were(folder: str) -> None:
    recording: list[bytes] = []
    config = settings(folder, enable_prefix_caching=False, speculative_config=SpeculativeConfig(method="none"))
    engine, _ = build_engine(config, epoch=1, record=recording.append)
    add_requests(engine, 1)
    while engine.has_work:
        engine.step()
    engine.close()
    model = find_model(config)
    runner = Runner(model, resolve(config, model)[0])
    (cache,) = runner.groups
    copies = 0
    for step in (msgspec.msgpack.decode(each, type=Step) for each in recording):
        before = cache.arena.reshape(BLOCKS, -1).copy()
        runner.execute(msgspec.structs.replace(step, chunks=()))
        after = cache.arena.reshape(BLOCKS, -1)
        changed = set(np.flatnonzero((before != after).any(axis=1)).tolist())
        assert changed <= {each.target for each in step.copies}, "a block that nobody writes to has changed"
        assert len(changed) == len(step.copies), "a copy for every sample that writes to the shared block"
        copies += len(step.copies)
        runner.forward(msgspec.structs.replace(step, drop=(), admit=(), tables=(), copies=()))
        runner._sampler.sample(step.chunks)
    assert copies == 2


class _MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


def test_memory_taken_from_the_system_does_not_grow_in_steady_steps(folder: str) -> None:
    try:
        mallinfo = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):
        pytest.skip("not a glibc that tells")
    mallinfo.restype = _MallInfo
    engine, _ = build_engine(settings(folder, swap_space=0.01), epoch=1)
    for number in range(4):
        request = Request(
            id=f"{number}", prompt=(5 + number,) * 4, sampling=SamplingParams(), seed=1, stop_ids=(), max_tokens=60
        )
        engine.add(request)
    for _ in range(10):
        engine.step()
    taken = []
    for _ in range(30):
        engine.step()
        info = mallinfo()
        taken.append((info.hblks, info.hblkhd, Path("/proc/self/maps").read_text().count("\n")))
    assert engine.has_work
    assert len(set(taken[1:])) == 1, "a step mapped memory"
    engine.close()


@pytest.mark.slow
def test_a_soak_keeps_its_memory_within_6_percent_and_gives_all_blocks_back(folder: str) -> None:
    engine, _ = build_engine(settings(folder, swap_space=0.01, async_depth=2), epoch=1)
    rng = random.Random(5)
    sizes, number = [], 0
    for round_ in range(60):
        for _ in range(20):
            prompt = tuple(rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 100)))
            sampling = SamplingParams(n=rng.choice((1, 1, 2)), logprobs=2)
            engine.add(
                Request(id=f"{number}", prompt=prompt, sampling=sampling, seed=number, stop_ids=(7,), max_tokens=30)
            )
            number += 1
        while engine.has_work:
            engine.step()
            if rng.random() < 0.02:
                engine.abort(f"{rng.randrange(number)}")
        stats = engine.stats()
        assert stats.blocks_free + stats.blocks_cached == BLOCKS and stats.fragmentation == 0
        if round_ >= 20:
            resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
            sizes.append(resident)
    assert (max(sizes) - min(sizes)) / (sum(sizes) / len(sizes)) <= 0.06
    engine.close()


def test_a_draft_model_and_a_scorer_take_no_swap_space(folder: str) -> None:
    config = settings(
        folder,
        swap_space=0.01,
        preemption_mode="swap",
        speculative_config=SpeculativeConfig(method="draft_model", model=folder),
    )
    model = find_model(config)
    plan, budget = resolve(config, model, model)
    assert plan.tier_blocks == budget.tier_blocks > 0 == plan.draft.tier_blocks
    assert Scorer(model, 64, config)._runner._tier is None


def test_a_swap_file_that_was_damaged_costs_time_and_no_bit(folder: str, caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = build_engine(settings(folder, swap_space=0.01), epoch=1)
    rng = random.Random(8)
    prompts = [tuple(rng.randrange(3, VOCAB) for _ in range(200)) for _ in range(2)]

    def ask(name: str, prompt: tuple[int, ...]) -> list[object]:
        sampling = SamplingParams(temperature=0, logprobs=3)
        engine.add(Request(id=name, prompt=prompt, sampling=sampling, seed=1, stop_ids=(), max_tokens=12))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        return [(output.tokens, output.logprobs) for output in outputs if output.tokens]

    first = [ask(f"first {place}", prompt) for place, prompt in enumerate(prompts)]
    file = engine._runner._tier._file  # type: ignore[attr-defined]
    size = os.fstat(file.fileno()).st_size
    for offset in range(0, size, 512):
        (byte,) = os.pread(file.fileno(), 1, offset)
        os.pwrite(file.fileno(), bytes([byte ^ 255]), offset)
    assert [ask(f"again {place}", prompt) for place, prompt in enumerate(prompts)] == first
    assert engine.stats().tier_failures > 0 and "is not what was written there" in caplog.text
    failed = engine.stats().tier_failures
    assert [ask(f"third {place}", prompt) for place, prompt in enumerate(prompts)] == first
    assert engine.stats().tier_failures == failed and engine.stats().tier_hits > 0
    engine.close()
