"""The engine as it runs on a GPU, with only the driver replaced: kernels are emulated, copies and waits are checked.

In float32 its tokens are those of the CPU. The driver puts off all that is asynchronous for as long as it may, so what
is read or written too early would show in them; and it complains of memory that is not given back at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from llmctl.engine import assemble
from llmctl.engine.config import EngineConfig
from llmctl.engine.gpu_sizes import _KEPT_GRAPHS, _LAYER_NODES, _OTHER_NODES, gpu_workspace_bytes
from llmctl.engine.llm import LLM
from llmctl.engine.models.families import decoder_spec
from llmctl.engine.request import SamplingParams
from llmctl.kernels.cuda import devices
from llmctl.kernels.cuda.emulate import compiler
from llmctl.kernels.cuda.gpu import NODE_BYTES
from llmctl.kernels.cuda.host_driver import HostDriver, Recorded
from llmctl.kernels.errors import CapacityError, LlmctlError

from .tiny import FAMILIES, write_checkpoint

BUILDS = Path(__file__).resolve().parents[2] / "build" / "emulated"
OPTIONS = {"max_model_len": 96, "num_gpu_blocks_override": 24, "block_size": 16, "max_num_batched_tokens": 32}
PREFIX = [(i * 37) % 290 + 5 for i in range(21)]
PROMPTS = [[*PREFIX, 7], [11, 12, 13], [*PREFIX[:18], 40, 41], [9] * 35]
GROWING = [[(i * 31 + j * 7) % 290 + 5 for i in range(12 + 3 * j)] for j in range(3)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=5, max_tokens=9, ignore_eos=True, top_k=60, top_p=0.9),
    SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(temperature=0, max_tokens=6, min_tokens=4, logit_bias={17: 3.0}, logprobs=2),
]


@pytest.fixture
def driver() -> Iterator[HostDriver]:
    """A GPU that computes."""
    if compiler() is None:
        pytest.skip("emulation needs a C++ compiler")
    yield from _in_use(HostDriver(BUILDS))


@pytest.fixture
def recorder() -> Iterator[HostDriver]:
    """A GPU that only writes down what it is told."""
    yield from _in_use(HostDriver(None))


def _in_use(host: HostDriver) -> Iterator[HostDriver]:
    devices.use_driver(host, host.get)
    yield host
    devices.use_driver(None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3")


def outputs(model: Path, device: str, prompts: Any = PROMPTS, params: Any = PARAMS, **options: Any) -> list[Any]:
    with LLM(str(model), dtype="float32", process=False, device=device, **{**OPTIONS, **options}) as llm:
        found = [output.outputs[0] for output in llm.generate(prompts, params)]
        if "preemption_mode" in options:
            assert llm.frontend.stats().preemptions > 0
    return found


def tokens(*args: Any, **options: Any) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs(*args, **options)]


@pytest.mark.parametrize("options", [{"deterministic": True, "enforce_eager": True}, {}], ids=["eager", "graphs"])
def test_the_tokens_are_those_of_the_cpu(driver: HostDriver, model: Path, options: dict[str, bool]) -> None:
    found, expected = outputs(model, "cuda", **options), outputs(model, "cpu")
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]
    assert found[3].cumulative_logprob == pytest.approx(expected[3].cumulative_logprob, abs=1e-4)
    assert any(call.name == "replay" for call in driver.calls) != bool(options)


@pytest.mark.parametrize("family", ["qwen3-moe", pytest.param("mixtral-wide", marks=pytest.mark.slow)])
def test_experts_give_the_tokens_of_the_modules_on_a_cpu(driver: HostDriver, tmp_path: Path, family: str) -> None:
    model = write_checkpoint(tmp_path, family)
    expected = tokens(model, "cpu")
    assert tokens(model, "cuda", deterministic=True, enforce_eager=True) == expected
    driver.calls.clear()
    assert tokens(model, "cuda") == expected
    assert any(call.name == "replay" for call in driver.calls)
    with pytest.raises(LlmctlError, match="computes on a GPU only"):
        tokens(model, "cpu", model_impl="llmctl")


@pytest.mark.parametrize("family", ["deepseek-v2-wide", pytest.param("deepseek-v3-wide", marks=pytest.mark.slow)])
def test_attention_on_latents_gives_the_tokens_of_the_cpu(driver: HostDriver, tmp_path: Path, family: str) -> None:
    model = write_checkpoint(tmp_path, family)
    expected = tokens(model, "cpu")
    assert tokens(model, "cuda", deterministic=True, enforce_eager=True) == expected
    driver.calls.clear()
    assert tokens(model, "cuda") == expected
    assert any(call.name == "replay" for call in driver.calls)


@pytest.mark.parametrize("family", ["deepseek-v3-experts", pytest.param("deepseek-v2-experts", marks=pytest.mark.slow)])
def test_latents_and_experts_together_give_the_tokens_of_transformers(
    driver: HostDriver, tmp_path: Path, family: str
) -> None:
    model = write_checkpoint(tmp_path, family)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = tokens(model, "cuda", PROMPTS, [GREEDY] * 4)
    for prompt, given in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            expected = oracle.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        assert list(given) == expected[0, len(prompt) :].tolist()


def test_latents_are_swapped_and_found_again_and_copied_by_token(driver: HostDriver, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "deepseek-v2-wide")
    params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 3
    options = {"num_gpu_blocks_override": 8, "preemption_mode": "swap", "swap_space": 0.01}
    assert tokens(model, "cuda", GROWING, params, **options) == tokens(model, "cpu", GROWING, params, **options)
    both = [PREFIX, [*PREFIX[:18], 40, 41]]
    for prompts in ([[*PREFIX, *PREFIX]], both):
        assert tokens(model, "cuda", prompts, PARAMS[:1] * len(prompts)) == tokens(
            model, "cpu", prompts, PARAMS[:1] * len(prompts)
        )
    assert any(call.kernel == "copy_tokens" for call in driver.launches)
    with pytest.raises(LlmctlError, match="attention on latents multiplies in the type of its activations"):
        tokens(model, "cuda", attention_compute="tf32")


def test_preemption_and_pinned_swap_space_change_no_token(driver: HostDriver, model: Path) -> None:
    params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 3
    options = {"num_gpu_blocks_override": 8, "preemption_mode": "swap", "swap_space": 0.01}
    driver.calls.clear()
    assert tokens(model, "cuda", GROWING, params, **options) == tokens(model, "cpu", GROWING, params, **options)
    block = 2 * 2 * 16 * 2 * 32 * 4  # K and V of two layers, 16 tokens, two heads of 32 dimensions in float32
    copies = [call for call in driver.calls if call.name in ("download", "upload")]
    moved = {call.name for call in copies if call.numbers[2] == block}
    assert moved == {"download", "upload"}


def test_a_step_that_does_not_wait_for_what_leaves_its_blocks_is_found(
    driver: HostDriver, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * 3
    options = {"num_gpu_blocks_override": 8, "preemption_mode": "swap", "swap_space": 0.01}
    streams, follow = [], HostDriver.follow

    def forget(self: HostDriver, stream: int, event: int) -> None:
        streams.append(stream)
        if stream == streams[0]:  # the copies', which wait for what was computed
            follow(self, stream, event)

    monkeypatch.setattr(HostDriver, "follow", forget)
    with pytest.raises(BaseException, match="another stream changed meanwhile"):
        tokens(model, "cuda", GROWING, params, **options)


def test_blocks_of_a_window_go_to_places_of_their_own_in_pinned_memory(recorder: HostDriver, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, "qwen3")
    windows = {"use_sliding_window": True, "sliding_window": 24, "layer_types": ["full_attention", "sliding_attention"]}
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | windows))
    options = {"block_size": 16, "num_gpu_blocks_override": 13, "max_model_len": 200, "max_num_batched_tokens": 16}
    prompts = [[(i * 31 + j * 7 + i * i) % 290 + 5 for i in range(150)] for j in range(3)]
    with LLM(str(model), dtype="float32", device="cuda", max_num_seqs=1, swap_space=0.01, **options) as llm:
        for _ in range(2):
            outputs = [llm.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True))[0] for prompt in prompts]
        stats = llm.frontend.stats()
    assert all(output.num_cached_tokens == 149 for output in outputs)
    assert stats.tier_hits > 0 == stats.tier_failures
    block = 2 * 2 * 16 * 32 * 4  # K and V of one layer, which each of the two groups has
    places = {call.numbers[0] for call in recorder.calls if call.name == "download" and call.numbers[2] == block}
    back = {call.numbers[1] for call in recorder.calls if call.name == "upload" and call.numbers[2] == block}
    assert back <= places and (max(places) - min(places)) // block > stats.tier_blocks // 2


def test_a_draft_model_on_the_gpu_changes_no_token(driver: HostDriver, model: Path) -> None:
    options = {"speculative_config": {"model": str(model)}}
    assert tokens(model, "cuda", GROWING, [GREEDY] * 3, **options) == tokens(model, "cpu", GROWING, [GREEDY] * 3)


def decode_steps(calls: list[Recorded]) -> list[list[Recorded]]:
    """The calls by step: each ends where what it sampled is fetched."""
    found: list[list[Recorded]] = [[]]
    for call in calls:
        found[-1].append(call)
        if call.name == "record" and len(found[-1]) > 1 and found[-1][-2].name == "download":
            found.append([])
    return found[:-1]


def test_a_step_sends_once_fetches_once_and_waits_for_nothing_else(recorder: HostDriver, model: Path) -> None:
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)] * 2
    for eager in (True, False):
        recorder.calls.clear()
        tokens(model, "cuda", PROMPTS[:2], params, enforce_eager=eager, speculative_config={"method": "none"})
        step = decode_steps(recorder.calls)[-6]
        names = [call.name for call in step if call.name not in ("launch", "replay")]
        # Memory that the copy reads is reused only when its event has come, which is the first wait; the second is for
        # the step before this one.
        assert sorted(names) == ["download", "record", "record", "upload", "wait", "wait"]
        launches = [call.kernel.partition("<")[0] for call in step if call.name == "launch"]
        if eager:
            layer = [
                "rms_norm", *3 * ["linear_fma"], "rope_store", "attend", "linear_fma",
                "rms_norm", *2 * ["linear_fma"], "act_mul_apart", "linear_fma",
            ]  # fmt: skip
            ends = ["rms_norm", "linear_fma", "sample", "keep_tokens"]
            assert launches == ["scatter_runs", "gather_tokens", "embed", *2 * layer, *ends]
        else:
            assert launches == ["scatter_runs"]
            assert [call.name for call in step].count("replay") == 1


def test_a_step_is_launched_while_the_one_before_it_runs(recorder: HostDriver, model: Path) -> None:
    tokens(model, "cuda", PROMPTS[:1], [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)])
    replays = [place for place, call in enumerate(recorder.calls) if call.name == "replay"]
    first, second = replays[-3:-1]
    fetched = next(place for place in range(first, len(recorder.calls)) if recorder.calls[place].name == "download")
    event = recorder.calls[fetched + 1].numbers[0]
    waited = next(
        place
        for place in range(fetched, len(recorder.calls))
        if recorder.calls[place] == Recorded("wait", "", (event,))
    )
    assert first < fetched < second < waited


@pytest.mark.parametrize(("node_bytes", "kept"), [(1 << 10, 4), (1 << 16, 3), (1 << 20, 0), (1 << 40, 0)])
def test_graphs_keep_to_the_memory_that_is_planned_for_them(
    recorder: HostDriver, model: Path, node_bytes: int, kept: int
) -> None:
    """Four numbers of sequences, and launches that take more and more memory when they are captured."""
    recorder.node_bytes = node_bytes
    limit = _KEPT_GRAPHS * (2 * _LAYER_NODES + _OTHER_NODES) * NODE_BYTES
    with LLM(str(model), dtype="float32", process=False, device="cuda", **OPTIONS) as llm:
        for count in (1, 2, 4, 8):
            llm.generate([[7] * 5] * count, [GREEDY] * count)
            taken = sum(map(len, recorder._graphs.values())) * max(node_bytes, NODE_BYTES)
            assert taken <= limit
        captured = [call.numbers[0] for call in recorder.calls if call.name == "end_capture"]
        destroyed = [call.numbers[0] for call in recorder.calls if call.name == "destroy_graph"]
        assert len(recorder._graphs) == kept == len(captured) - len(destroyed)
        assert set(destroyed) == set(captured[: len(destroyed)]), "those that were used longest ago"
    assert any(call.name == "replay" for call in recorder.calls) == (kept > 0)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"dtype": "float32"}),
        ("mixtral-wide", {"dtype": "bfloat16", "max_num_batched_tokens": 256, "enforce_eager": True}),
        ("mixtral-wide", {"dtype": "bfloat16", "deterministic": True, "max_num_batched_tokens": 512}),
        ("deepseek-v2-wide", {"dtype": "float16", "max_num_batched_tokens": 128}),
    ],
)
def test_a_gpu_gives_no_more_than_is_planned(
    recorder: HostDriver,
    tmp_path: Path,
    family: str,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans, resolve = [], assemble.resolve
    monkeypatch.setattr(assemble, "resolve", lambda *args: plans.append(resolve(*args)) or plans[-1])
    recorder.node_bytes = 5000
    model = write_checkpoint(tmp_path, family)
    with LLM(str(model), process=False, device="cuda", **{**OPTIONS, **options}) as llm:
        llm.generate(PROMPTS, [GREEDY] * 4)
    (_, budget) = plans[0]
    assert recorder.most_used <= budget.total
    assert budget.weights + budget.kv_bytes < recorder.most_used


def test_activations_are_counted_in_their_own_type() -> None:
    spec = decoder_spec({**FAMILIES["qwen3"].to_dict(), "hidden_size": 4096, "intermediate_size": 14336})
    config = EngineConfig(device="cuda:0", max_num_batched_tokens=8192, enforce_eager=True, deterministic=True)
    wide, narrow = (gpu_workspace_bytes(spec, config, 512, (kind,), 1) for kind in ("f32", "bf16"))
    values = 8192 * (2 * 4096 + 14336 + 4096 + 2 * 14336)
    sums = 4 * 7 * 8192 * 4096  # of 14336 inputs, which are cut into seven
    assert 4 * values < wide < 4 * values + (600 << 20)
    assert narrow - sums < wide / 2 + (300 << 20)


REFUSED = {
    "--device is `cuda:1`, and there is 1": {"device": "cuda:1"},
    "--device is `gpu`": {"device": "gpu"},
    "--kernels is `avx2`": {"kernels": "avx2"},
    "--kv-cache-dtype is `int16`": {"kv_cache_dtype": "int16"},
    "--block-size is 128": {"block_size": 128},
    "--cache-audit compares bits": {"cache_audit": 0.5},
    "transformers' modules": {"model_impl": "transformers"},
    "a f16 cache with f32 activations": {"kv_cache_dtype": "float16"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_gpu_does_not_do_is_refused(recorder: HostDriver, model: Path, message: str) -> None:
    with pytest.raises(LlmctlError) as error:
        tokens(model, **{"device": "cuda", **REFUSED[message]})
    assert message in error.value.message and error.value.hint
    recorder.close()  # nothing is left of a start that failed
    recorder.open(0)


def test_a_gpu_that_is_too_old_or_too_small_is_named(recorder: HostDriver, model: Path) -> None:
    recorder.capability = (7, 0)
    with pytest.raises(LlmctlError, match=r"no kernels for a GPU of compute capability 7\.0"):
        tokens(model, "cuda")
    recorder.capability, recorder.memory_total = (8, 0), 258 << 20
    with pytest.raises(CapacityError, match=r"(?s)workspace.*available +258"):
        tokens(model, "cuda")


def test_without_a_driver_auto_is_the_cpu_and_cuda_an_error(model: Path) -> None:
    try:
        devices.gpus()
    except LlmctlError:
        assert tokens(model, "auto", PROMPTS[:1], [GREEDY]) == tokens(model, "cpu", PROMPTS[:1], [GREEDY])
        with pytest.raises(LlmctlError, match="no CUDA driver") as error:
            tokens(model, "cuda")
        assert "--device cpu" in error.value.hint
