"""The whole engine on CUDA kernels, run by the emulator in float32: its tokens are those of the CPU's kernels."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from safetensors.numpy import save_file

from llmctl.engine import config
from llmctl.engine.llm import LLM
from llmctl.engine.request import SamplingParams
from llmctl.kernels.cuda import register
from llmctl.kernels.cuda.emulate import compiler
from llmctl.kernels.cuda.emulated_machine import EmulatedMachine
from llmctl.kernels.errors import LlmctlError, UsageError

from .quantized import write_float, write_quantized
from .tiny import FAMILIES, randomize, write_checkpoint, write_tokenizer

BUILDS = Path(__file__).resolve().parents[2] / "build" / "emulated"
OPTIONS = {"max_model_len": 96, "num_gpu_blocks_override": 24, "block_size": 16, "max_num_batched_tokens": 32}
PREFIX = [(i * 37) % 290 + 5 for i in range(21)]
PROMPTS = [[*PREFIX, 7], [11, 12, 13], [*PREFIX[:18], 40, 41], [9] * 35]
GROWING = [[(i * 31 + j * 7) % 290 + 5 for i in range(12 + 3 * j)] for j in range(3)]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The emulator in use, and `kernels="cuda"` an option."""
    if compiler() is None:
        pytest.skip("emulation needs a C++ compiler")
    monkeypatch.setattr(config, "KERNELS", (*config.KERNELS, "cuda"))
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
    with LLM(str(model), process=False, kernels=kernels, **{"dtype": "float32", **OPTIONS, **options}) as llm:
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


def test_attention_in_tf32_is_an_option_that_a_cpu_refuses(model: Path) -> None:
    assert len(tokens(model, "cuda", attention_compute="tf32")) == len(PROMPTS)
    with pytest.raises(UsageError, match="`tf32`, and attention runs on the CPU"):
        tokens(model, "auto", attention_compute="tf32")


@pytest.mark.parametrize("kind", ["awq", pytest.param("gptq-v2-desc-act", marks=pytest.mark.slow)])
def test_int4_weights_give_the_tokens_of_the_cpu(tmp_path: Path, kind: str) -> None:
    model = write_checkpoint(tmp_path, "qwen3")
    write_quantized(model, kind)
    unpacked = tokens(model, "auto")
    assert tokens(model, "cuda") == unpacked
    assert tokens(model, "cuda", dtype="auto", kv_cache_dtype="float32") == unpacked


@pytest.mark.parametrize("kind", ["fp8-block", "nf4", pytest.param("fp8-channel", marks=pytest.mark.slow)])
def test_float8_and_nf4_weights_stay_as_they_are(tmp_path: Path, kind: str) -> None:
    model = write_checkpoint(tmp_path, "qwen3")
    write_float(model, kind)
    options = {"dtype": "auto", "kv_cache_dtype": "float32"}
    assert tokens(model, "cuda", **options) == tokens(model, "auto")
    with LLM(str(model), process=False, kernels="cuda", **options, **OPTIONS) as llm:
        assert kind.split("-")[0] in llm.frontend.info.weight_format


def test_experts_in_int4_give_the_tokens_of_the_modules_with_their_values(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "int4", "qwen3-moe")
    plain = shutil.copytree(model, tmp_path / "values")
    save_file(write_quantized(model, "gptq"), plain / "model.safetensors")
    assert tokens(model, "cuda", dtype="auto", kv_cache_dtype="float32") == tokens(plain, "auto")


def write_wide(folder: Path, family: str) -> Path:
    """A tiny model of the family whose heads have 32 dimensions, the fewest that a GPU's attention takes."""
    config = copy.deepcopy(FAMILIES[family])
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 2, 1, 32
    model = transformers.AutoModelForCausalLM.from_config(config)
    randomize(model)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    "family",
    [
        family if family in ("llama-tied-bias", "mistral", "gemma3") else pytest.param(family, marks=pytest.mark.slow)
        for family in FAMILIES
    ],
)
def test_every_family_gives_the_tokens_of_the_cpu(tmp_path: Path, family: str) -> None:
    model = write_wide(tmp_path, family)
    found = []
    for kernels in ("cuda", "auto"):
        with LLM(str(model), dtype="float32", process=False, kernels=kernels, **OPTIONS) as llm:
            outputs = llm.generate([[7] * 3 + PREFIX * 2], [SamplingParams(temperature=0, max_tokens=5)])
            found.append(outputs[0].outputs[0].token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("gemma3", "heads have 24 dimensions; known are 32, 64"),
        ("deepseek-v2", "rotated keys of 8 values; multiples of 32 up to 128 are known"),
        ("mixtral", "heads have 16 dimensions"),
        ("olmo2", "a `olmo2` model is computed by transformers' modules, which run on the CPU alone"),
    ],
)
def test_what_a_gpu_cannot_run_is_refused_with_the_reason(tmp_path: Path, family: str, said: str) -> None:
    model = write_checkpoint(tmp_path, family)
    with pytest.raises(LlmctlError, match=said):
        LLM(str(model), dtype="float32", process=False, kernels="cuda", **OPTIONS)


def test_experts_whose_inputs_are_in_an_order_of_their_own_are_refused(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "qwen3-moe")
    write_quantized(model, "gptq-v2-desc-act")
    with pytest.raises(LlmctlError, match=r"`model\.layers\.0\.mlp\.experts\.0.* inputs in an order of its own"):
        tokens(model, "cuda", dtype="auto", kv_cache_dtype="float32")
