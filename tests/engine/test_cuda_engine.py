"""The engine as it runs on a GPU, with only the driver replaced: kernels are emulated, copies and waits are checked.

In float32 its tokens are those of the CPU. The driver puts off all that is asynchronous for as long as it may, so what
is read or written too early would show in them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmctl.engine.llm import LLM
from llmctl.engine.request import SamplingParams
from llmctl.kernels.cuda import devices
from llmctl.kernels.cuda.emulate import compiler
from llmctl.kernels.cuda.host_driver import HostDriver

from .tiny import write_checkpoint

BUILDS = Path(__file__).resolve().parents[2] / "build" / "emulated"
OPTIONS = {"max_model_len": 96, "num_gpu_blocks_override": 24, "block_size": 16, "max_num_batched_tokens": 32}
PREFIX = [(i * 37) % 290 + 5 for i in range(21)]
PROMPTS = [[*PREFIX, 7], [11, 12, 13], [*PREFIX[:18], 40, 41], [9] * 35]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PARAMS = [GREEDY, SamplingParams(temperature=0.9, seed=5, max_tokens=9, ignore_eos=True), GREEDY, GREEDY]


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    if compiler() is None:
        pytest.skip("emulation needs a C++ compiler")
    host = HostDriver(BUILDS)
    devices.use_driver(host, host.get)
    yield host
    devices.use_driver(None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


def tokens(model: Path, device: str, **options: object) -> list[tuple[int, ...]]:
    with LLM(str(model), dtype="float32", process=False, device=device, **{**OPTIONS, **options}) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_the_tokens_are_those_of_the_cpu(driver: HostDriver, model: Path, eager: bool) -> None:
    options = {"deterministic": True, "enforce_eager": eager}
    assert tokens(model, "cuda", **options) == tokens(model, "cpu")
    assert any(call.name == "replay" for call in driver.calls) != eager
