"""Decoders that only transformers has, run by its modules on our cache, scheduler and sampler."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from llmctl import LLM, SamplingParams
from llmctl.engine.assemble import build_engine
from llmctl.engine.config import EngineConfig, environment
from llmctl.engine.load.hub import resolve
from llmctl.engine.load.model import open_model, why_transformers
from llmctl.engine.load.packed import list_entries, verify
from llmctl.engine.models.hf_trace import trace
from llmctl.engine.plan import resolve as resolve_plan
from llmctl.engine.runner.probe import try_bits
from llmctl.engine.runner.runner import Runner
from llmctl.kernels.errors import CheckpointError, UnsupportedModel

from .forced import forced_logits
from .tiny import FAMILIES, FOREIGN, SHAPE, VOCAB, write_checkpoint, write_tokenizer

OPTIONS = {"max_num_seqs": 64, "max_num_batched_tokens": 64, "block_size": 16}


def make_runner(folder: Path, cache: Path, implementation: str = "auto", **options: object) -> Runner:
    config = EngineConfig(**{"dtype": "float32", **OPTIONS, **options})
    source = resolve(str(folder), environment=environment())
    model = open_model(source, implementation=implementation, dtype=config.dtype, cache=cache, progress=None)
    return Runner(model, resolve_plan(config, model)[0])


def oracle_logits(folder: Path, tokens: list[int]) -> np.ndarray:
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return oracle(torch.tensor([tokens])).logits[0].numpy()


def some_tokens(count: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, count).tolist()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: write_checkpoint(tmp_path_factory.mktemp(family), family) for family in FOREIGN}


@pytest.mark.parametrize("family", FOREIGN)
def test_a_foreign_decoder_gives_its_own_logits_in_prefill_and_decode(
    family: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    tokens = some_tokens(60)
    expected = oracle_logits(folders[family], tokens)
    runner = make_runner(folders[family], tmp_path)
    np.testing.assert_allclose(forced_logits(runner, tokens[:40], VOCAB, 64, 16), expected[:40], atol=3e-4, rtol=0)
    np.testing.assert_allclose(forced_logits(runner, tokens, VOCAB, 7, 16), expected, atol=3e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama-tied-bias", "qwen2-window", "qwen3", "gemma3"])
def test_a_family_of_ours_gives_the_same_logits_through_transformers(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", family, dtype=torch.bfloat16)
    tokens = some_tokens(60)
    ours, theirs = (
        forced_logits(make_runner(folder, tmp_path, implementation), tokens, VOCAB, 64, 16)
        for implementation in ("llmctl", "transformers")
    )
    np.testing.assert_allclose(theirs, ours, atol=3e-4, rtol=0)


@pytest.mark.parametrize("family", ["olmo2", "gpt2"])
def test_weights_stay_in_the_type_that_they_are_stored_in(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", family, dtype=torch.bfloat16)
    config = EngineConfig(model=str(folder), kv_cache_dtype="float32", **OPTIONS)
    source = resolve(str(folder), environment=environment())
    model = open_model(source, implementation="auto", dtype="auto", cache=tmp_path / "cache", progress=None)
    assert model.weight_formats == ("bf16",)
    runner = Runner(model, resolve_plan(config, model)[0])
    tokens = some_tokens(30)
    got = forced_logits(runner, tokens, VOCAB, 64, 16)
    np.testing.assert_allclose(got, oracle_logits(folder, tokens), atol=3e-4, rtol=0)


@pytest.mark.parametrize("family", ["gpt-neox", "olmo2", "gpt2", "cohere2"])
def test_a_request_gives_the_same_bits_alone_together_and_preempted(family: str, folders: dict[str, Path]) -> None:
    prompts = [some_tokens(count, seed=count) for count in (5, 40, 17, 63, 9, 31)]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=20, ignore_eos=True, logprobs=2) for i in range(6)]
    runs = []
    for options in (
        {"threads": 1, "enable_prefix_caching": False, "max_num_batched_tokens": 512},
        {"max_num_batched_tokens": 512, "block_size": 64},
        {"max_num_batched_tokens": 7},
        {"num_gpu_blocks_override": 14, "block_size": 8, "max_model_len": 100},
    ):
        kept = {"max_model_len": 256, "num_gpu_blocks_override": 200, **options}
        with LLM(str(folders[family]), **kept) as llm:
            assert llm.frontend.info.model_impl == "transformers" and llm.frontend.info.same_bits
            if runs:
                outputs = llm.generate(prompts, params)
            else:
                outputs = [llm.generate([p], s)[0] for p, s in zip(prompts, params, strict=True)]
        runs.append([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs])
    assert all(run == runs[0] for run in runs)


def test_greedy_tokens_are_those_of_generate(folders: dict[str, Path]) -> None:
    folder, tokens = folders["olmo2"], some_tokens(25)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = oracle.generate(torch.tensor([tokens]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    with LLM(str(folder), max_model_len=128, num_gpu_blocks_override=20) as llm:
        (output,) = llm.generate([tokens], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    assert list(output.outputs[0].token_ids) == expected[0, 25:].tolist()


def test_what_our_decoder_refuses_goes_to_transformers(folders: dict[str, Path], tmp_path: Path) -> None:
    olmo2 = resolve(str(folders["olmo2"]), environment=environment())
    llama = resolve(str(write_checkpoint(tmp_path, "llama")), environment=environment())
    assert "unknown model family `olmo2`" in why_transformers(olmo2, "auto")
    assert why_transformers(llama, "auto") == "" and why_transformers(olmo2, "llmctl") == ""
    assert why_transformers(llama, "transformers") == "as `--model-impl transformers` asks"
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    assert why_transformers(llama, "auto") == (
        "our decoder does not know it: activation 'relu' in `hidden_act`; supported: silu, gelu_pytorch_tanh"
    )
    tokens = some_tokens(40)
    runner = make_runner(tmp_path, tmp_path / "cache")
    np.testing.assert_allclose(
        forced_logits(runner, tokens, VOCAB, 64, 16), oracle_logits(tmp_path, tokens), atol=3e-4, rtol=0
    )


def test_the_trial_tells_what_it_found(folders: dict[str, Path], tmp_path: Path) -> None:
    runner = make_runner(folders["olmo2"], tmp_path)
    config = EngineConfig(dtype="float32", **OPTIONS)
    model = open_model(
        resolve(str(folders["olmo2"]), environment=environment()),
        implementation="auto", dtype="float32", cache=tmp_path, progress=None,
    )  # fmt: skip
    plan = resolve_plan(config, model)[0]
    assert try_bits(runner, plan, VOCAB).same
    replay = runner.decoder.program.replay

    class Drifting:
        """Adds more to the logits of steps with more rows, as a library product of matrices may."""

        def __init__(self, by: float) -> None:
            self.by = by

        def replay(self) -> None:
            replay()
            runner.decoder.logits[0] += self.by * int(runner._batch.counts[0])

    runner.decoder = dataclasses.replace(runner.decoder, program=Drifting(1e-4))
    trial = try_bits(runner, plan, VOCAB)
    assert not trial.same and trial.ways == 3 and "token by token logits differ" in trial.finding
    runner.decoder = dataclasses.replace(runner.decoder, program=Drifting(10.0))
    with pytest.raises(UnsupportedModel, match="other logits token by token than at once"):
        try_bits(runner, plan, VOCAB)


def test_a_model_outside_the_promise_is_labelled(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="llmctl.engine.assemble"):
        engine, info = build_engine(
            EngineConfig(model=str(folders["olmo2"]), max_num_batched_tokens=1, max_num_seqs=1), epoch=1
        )
    engine.close()
    assert info.model_impl == "transformers" and not info.same_bits
    assert "outside the promise of the same bits: steps of one token" in caplog.text


def test_the_cache_entry_holds_the_text_side_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    source = resolve(str(folders["olmo2"]), environment=environment())
    model = open_model(source, implementation="auto", dtype="auto", cache=tmp_path, progress=None)
    (entry,) = list_entries(tmp_path)
    assert entry.folder == model.folder and entry.formats == () and entry.bytes < 100_000
    assert entry.implementation == f"transformers {transformers.__version__}" and verify(entry)
    assert (model.folder / "tokenizer.json").is_file()
    again = open_model(source, implementation="auto", dtype="auto", cache=tmp_path, progress=None)
    assert again.digest == model.digest and model.weight_bytes > 4 * VOCAB * 64


def write_config(folder: Path, config: transformers.PretrainedConfig) -> Path:
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.Gemma2Config(**SHAPE, head_dim=16), "its attention takes `softcap`"),
        (transformers.GptOssConfig(**{**SHAPE, "head_dim": 16, "num_local_experts": 2}), "its attention takes `s_aux`"),
        (transformers.BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4), "has no `position_ids`"),
        (transformers.MambaConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2), "has no `position_ids`"),
        (transformers.BertConfig(**SHAPE), "neither causal nor causal with a window"),
        (
            transformers.Phi3Config(
                **SHAPE,
                original_max_position_embeddings=256,
                rope_parameters={
                    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8
                },
            ),
            "depends on the company in a batch",
        ),
    ],
    ids=lambda value: value.model_type if isinstance(value, transformers.PretrainedConfig) else "",
)  # fmt: skip
def test_what_the_paged_cache_cannot_serve_is_refused(
    config: transformers.PretrainedConfig, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        make_runner(write_config(tmp_path / "model", config), tmp_path / "cache", "transformers")


def test_models_that_nobody_knows_and_code_of_strangers_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "olmo2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "no_such_family"}))
    with pytest.raises(UnsupportedModel, match="cannot read the config.*unknown model family `no_such_family`"):
        make_runner(folder, tmp_path / "cache")
    remote = {**config, "model_type": "stranger", "auto_map": {"AutoConfig": "stranger.Config"}}
    (folder / "config.json").write_text(json.dumps(remote))
    (folder / "stranger.py").write_text("raise SystemExit('run')")
    with pytest.raises(UnsupportedModel, match="cannot read the config"):
        make_runner(folder, tmp_path / "cache")
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(UnsupportedModel, match="quantized"):
        make_runner(folder, tmp_path / "cache")


def test_a_gguf_file_is_not_for_transformers(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(UnsupportedModel, match="no folder of safetensors"):
        make_runner(tmp_path / "x.gguf", tmp_path / "cache", "transformers")


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "olmo2")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match="missing keys.*`model.layers.2."):
        make_runner(folder, tmp_path / "cache")
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(CheckpointError, match="unexpected keys.*`model.layers.1."):
        make_runner(folder, tmp_path / "cache")
    (folder / "config.json").write_text(json.dumps(config))
    state = load_file(folder / "model.safetensors")
    state["model.norm.weight"][3] = float("nan")
    save_file(state, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="`model.norm.weight`.*NaN"):
        make_runner(folder, tmp_path / "cache")


@pytest.mark.parametrize("change", [{"sliding_window": -5}, {"eos_token_id": [2, VOCAB]}])
def test_a_config_that_cannot_be_is_refused_by_file_and_key(change: dict[str, object], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "olmo2")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=f"^`{path}`: `{next(iter(change))}` .*expected"):
        make_runner(folder, tmp_path / "cache")


def test_every_family_of_ours_can_be_traced() -> None:
    for name, config in FAMILIES.items():
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        traced = trace(model)
        assert len(traced.calls) == config.num_hidden_layers and traced.vocab_size == VOCAB, name
        assert model.config._attn_implementation == config._attn_implementation == "sdpa"
        windows = tuple(call.window for call in traced.calls)
        if name == "gemma3":
            assert windows == (24, 24, 0, 24) and traced.calls[0].scale == pytest.approx(40**-0.5)
        elif name == "mistral":
            assert windows == (24, 24)
