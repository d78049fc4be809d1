"""The core loop under trouble: NaN in one row, aborts at any moment, tiny pools."""

from __future__ import annotations

import dataclasses
import errno
import random
from pathlib import Path
from typing import NoReturn

import pytest

from llmctl.engine.assemble import build_engine
from llmctl.engine.config import EngineConfig
from llmctl.engine.engine import Engine, StepRunner
from llmctl.engine.request import FinishReason, Output, Request, SamplingParams
from llmctl.engine.runner import cache
from llmctl.engine.schedule.step import Step
from llmctl.kernels.errors import CapacityError
from llmctl.kernels.ops import LOGIT_ROWS

from .tiny import write_checkpoint

POISON = 50


class PoisonedProgram:
    """Runs the real program, then spoils the logits of every sequence whose current token is POISON."""

    def __init__(self, runner: object) -> None:
        self._runner, self._program = runner, runner.decoder.program  # type: ignore[attr-defined]

    def replay(self) -> None:
        self._program.replay()
        batch, logits = self._runner._batch, self._runner.decoder.logits  # type: ignore[attr-defined]
        for i in range(batch.counts[LOGIT_ROWS]):
            if batch.token[batch.logit_rows[i]] == POISON:
                logits[i, 7] = float("nan")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny"), "llama"))


def make_engine(folder: str, **options: object) -> Engine:
    settings = {"max_model_len": 256, "num_gpu_blocks_override": 40, "block_size": 16, **options}
    return build_engine(EngineConfig(model=folder, **settings), epoch=1)[0]


def make_request(name: str, prompt: list[int], **changes: object) -> Request:
    sampling = SamplingParams(temperature=0, max_tokens=10, **changes)
    return Request(id=name, prompt=tuple(prompt), sampling=sampling, seed=1, stop_ids=(), max_tokens=10)


def drain(engine: Engine) -> dict[str, list[Output]]:
    outputs: dict[str, list[Output]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_with_nan_fails_that_request_alone_and_its_blocks_are_not_reused_as_prefix(
    folder: str, depth: int
) -> None:
    calm = make_engine(folder)
    calm.add(make_request("good", [9, 8, 7, 6, 5]))
    expected = tokens_of(drain(calm)["good"])
    engine = make_engine(folder, async_depth=depth)
    runner = engine._runner
    runner.decoder = dataclasses.replace(runner.decoder, program=PoisonedProgram(runner))  # type: ignore[attr-defined]
    poisoned = [*range(60, 100), POISON]
    engine.add(make_request("bad", poisoned))
    engine.add(make_request("good", [9, 8, 7, 6, 5]))
    outputs = drain(engine)
    assert outputs["bad"][-1].finish is FinishReason.ERROR and "NaN" in outputs["bad"][-1].error
    assert tokens_of(outputs["good"]) == expected
    engine.add(make_request("again", [*poisoned[:-1], 51]))
    assert drain(engine)["again"][0].cached_tokens == 0
    stats = engine.stats()
    assert stats.blocks_active == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_aborts_at_random_moments_leak_nothing_and_change_no_other_tokens(folder: str, depth: int) -> None:
    rng = random.Random(5)
    prompts = {str(i): [rng.randrange(3, 300) for _ in range(rng.randrange(1, 60))] for i in range(24)}
    calm = make_engine(folder)
    for name, prompt in prompts.items():
        calm.add(make_request(name, prompt))
    expected = {name: tokens_of(outputs) for name, outputs in drain(calm).items()}
    engine = make_engine(folder, async_depth=depth, num_gpu_blocks_override=16, max_model_len=128)
    for name, prompt in prompts.items():
        engine.add(make_request(name, prompt))
    victims, outputs = set(rng.sample(sorted(prompts), 8)), {name: [] for name in prompts}
    todo = sorted(victims)
    while engine.has_work:
        if todo and rng.random() < 0.4:
            engine.abort(todo.pop())
        for output in engine.step():
            outputs[output.request_id].append(output)
    for name in set(prompts) - victims:
        assert tokens_of(outputs[name]) == expected[name], name
    stats = engine.stats()
    assert stats.blocks_active == 0


def test_no_mapping_or_array_is_made_in_a_steady_decode_step(folder: str, tmp_path: Path) -> None:
    import tracemalloc

    engine = make_engine(folder)
    engine.add(make_request("one", [5] * 30, ignore_eos=True))
    for _ in range(3):
        engine.step()
    before = Path("/proc/self/maps").read_text().count("\n")
    tracemalloc.start()
    for _ in range(4):
        engine.step()
    largest = max(stat.size for stat in tracemalloc.take_snapshot().statistics("lineno"))
    tracemalloc.stop()
    assert largest < 1 << 16, "a step allocated something large"
    assert Path("/proc/self/maps").read_text().count("\n") <= before + 2


@pytest.mark.parametrize(
    ("blocks", "hint"), [(40, "--num-gpu-blocks-override 16"), (16, "a smaller `--max-model-len`")]
)
def test_memory_that_the_system_refuses_is_told_with_the_plan(
    folder: str, blocks: int, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(size: int) -> NoReturn:
        raise OSError(errno.ENOMEM, f"no {size} bytes")

    monkeypatch.setattr(cache, "_zero_pages", refuse)
    with pytest.raises(CapacityError, match="the system refused to give (?s:.)* KV cache +") as caught:
        make_engine(folder, num_gpu_blocks_override=blocks)
    assert hint in caught.value.hint


class FailingRunner:
    """Fails every step, as a bug in a kernel would."""

    def __init__(self, runner: StepRunner) -> None:
        self.runner, self.is_closed = runner, False

    def submit(self, step: Step) -> FailingRunner:
        return self

    def result(self) -> NoReturn:
        raise RuntimeError("a kernel failed")

    def close(self) -> None:
        self.is_closed = True
        self.runner.close()


def test_an_engine_whose_step_failed_can_still_be_closed(folder: str) -> None:
    whole = make_engine(folder, max_num_batched_tokens=32, async_depth=2)
    failing = FailingRunner(whole._runner)
    engine = Engine(whole._scheduler, failing, depth=2)
    for name in "ab":  # one step each: the second is in flight when the first fails
        engine.add(make_request(name, [5] * 32))
    with pytest.raises(RuntimeError, match="a kernel failed"):
        engine.step()
    engine.close()
    assert failing.is_closed
