"""The whole engine on CUDA kernels, run by the emulator in float32: its tokens are those of the CPU's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmctl.engine import config
from llmctl.engine.llm import LLM
from llmctl.engine.request import SamplingParams
from llmctl.engine.runner import runner
from llmctl.kernels.cuda import register
from llmctl.kernels.cuda.emulate import compiler
from llmctl.kernels.cuda.emulated_machine import EmulatedMachine

from .quantized import write_quantized
from .tiny import write_checkpoint

BUILDS = Path(__file__).resolve().parents[2] / "build" / "emulated"
OPTIONS = {"max_model_len": 96, "num_gpu_blocks_override": 24, "block_size": 16, "max_num_batched_tokens": 32}
PREFIX = [(i * 37) % 290 + 5 for i in range(21)]
PROMPTS = [[*PREFIX, 7], [11, 12, 13], [*PREFIX[:18], 40, 41], [9] * 35]
GROWING = [[(i * 31 + j * 7) % 290 + 5 for i in range(12 + 3 * j)] for j in range(3)]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The emulator in use, `kernels="cuda"` an option, and a cache as plain on the CPU as it is on a GPU."""
    if compiler() is None:
        pytest.skip("emulation needs a C++ compiler")
    monkeypatch.setattr(config, "KERNELS", (*config.KERNELS, "cuda"))
    monkeypatch.setattr(runner, "fit_cache", lambda layers, model, plan: layers)
    register.use(EmulatedMachine(BUILDS))
    yield
    register.use(None)


def tokens(model: Path, kernels: str, *, twice: bool = False, **options: object) -> list[tuple[int, ...]]:
    """What four requests get, one of them with sampling; under preemption, what three that grow out of memory get."""
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = PROMPTS
    params = [greedy, SamplingParams(temperature=0.9, seed=5, max_tokens=9, ignore_eos=True), greedy, greedy]
    if "preemption_mode" in options:
        prompts, params = GROWING, [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 3
    with LLM(str(model), dtype="float32", process=False, kernels=kernels, **{**OPTIONS, **options}) as llm:
        for _ in range(2 if twice else 1):
            outputs = llm.generate(prompts, params)
        if twice:
            assert sum(output.num_cached_tokens for output in outputs) > 0
        if "preemption_mode" in options:
            assert llm.frontend.stats().preemptions > 0
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


def test_prefill_and_decode_give_the_tokens_of_the_cpu(model: Path) -> None:
    assert tokens(model, "cuda") == tokens(model, "auto")


def test_a_prefix_that_is_cached_changes_no_token(model: Path) -> None:
    assert tokens(model, "cuda", twice=True) == tokens(model, "auto")


@pytest.mark.parametrize("mode", ["recompute", pytest.param("swap", marks=pytest.mark.slow)])
def test_preemption_changes_no_token(model: Path, mode: str) -> None:
    options = {"num_gpu_blocks_override": 8, "preemption_mode": mode, "swap_space": 0.01}
    assert tokens(model, "cuda", **options) == tokens(model, "auto", **options)


@pytest.mark.parametrize("kind", ["fp8_e4m3", pytest.param("int8", marks=pytest.mark.slow)])
def test_a_cache_of_8_bits_gives_the_tokens_of_the_cpu(model: Path, kind: str) -> None:
    assert tokens(model, "cuda", kv_cache_dtype=kind) == tokens(model, "auto", kv_cache_dtype=kind)


@pytest.mark.parametrize("kind", ["awq", pytest.param("gptq-v2-desc-act", marks=pytest.mark.slow)])
def test_int4_weights_give_the_tokens_of_the_cpu(tmp_path: Path, kind: str) -> None:
    model = write_checkpoint(tmp_path, "qwen3")
    write_quantized(model, kind)
    assert tokens(model, "cuda") == tokens(model, "auto")
