"""`llmctl quantize` on tiny models: what it writes loads, what it says is measured, what cannot work is told."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from llmctl.cli import app
from llmctl.cli.console import Console
from llmctl.cli.exits import ExitCode
from llmctl.engine.llm import LLM
from llmctl.engine.load.checkpoint import open_checkpoint
from llmctl.engine.load.hub import Source
from llmctl.engine.request import SamplingParams
from tests.engine.quantized import write_quantized
from tests.engine.tiny import write_checkpoint

WORDS = "the sea a ship sails under heavy weather and nobody aboard knows where it ends".split()  # noqa: SIM905


def write_text(path: Path, words: int, seed: int = 1) -> Path:
    path.write_text(" ".join(random.Random(seed).choices(WORDS, k=words)))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny", "qwen2", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "sea.txt", 2000)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(console: Console, *line: object) -> int:
    return app.run(["quantize", *map(str, line)], console)


def calibrated(model: Path, text: Path) -> list[object]:
    return ["-m", model, "--calib-dataset", text, "--calib-samples", 4, "--calib-seqlen", 64, "--eval-tokens", 128]


def test_awq_writes_a_folder_that_loads_and_its_card(console: Console, model: Path, text: Path, here: Path) -> None:
    assert run(console, "--awq", "--group-size", "128", *calibrated(model, text)) == ExitCode.OK
    out = here / "tiny-awq-g32"
    assert sorted(path.name for path in here.iterdir()) == ["tiny-awq-g32"]
    assert sorted(path.name for path in out.iterdir()) == [
        "chat_template.jinja", "config.json", "generation_config.json", "llmctl_quality.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    card = json.loads((out / "llmctl_quality.json").read_text())
    assert card["scheme"]["group_size_asked"] == 128 and card["scheme"]["group_size"] == 32
    assert card["calibration"] == {"text": "sea.txt", "samples": 4, "tokens_per_sample": 64, "seed": 0}
    assert card["evaluation"]["text"] == "a part of sea.txt that was not used for calibration"
    assert card["evaluation"]["predicted_tokens"] == 127 and not card["source"]["dequantized_first"]
    assert 0 < card["kl"]["mean"] <= card["kl"]["p99"] and 0 < card["top1_agreement"] <= 1
    assert card["bytes"]["after"] < card["bytes"]["before"] == card["bytes"]["float16"]
    assert min(card["decode_tokens_per_s"].values()) > 0
    shown = console.stdout.getvalue()
    assert "groups of 32 (asked 128, which does not divide every layer)" in shown
    assert f"{card['kl']['mean']:.4f}" in shown and "calibrated on 4 x 64 tokens: sea.txt" in shown
    formats = {t.format.name for t in open_checkpoint(Source(out, "hf", "t")).tensors.values() if t.format is not None}
    assert formats == {"int4g32int", "f16"}
    with LLM(str(out), max_model_len=64) as llm:
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        assert len(llm.generate("the sea", greedy)[0].outputs[0].token_ids) == 8


def test_names_of_other_tools_and_a_configuration_file_say_the_same(console: Console, model: Path, text: Path) -> None:
    line = ["--quantization", "awq", "--w-group-size", 64, "--w-bits", 4, "--output", "a", "--json", "--seed", 5]
    assert run(console, *line, *calibrated(model, text)) == ExitCode.OK
    card = json.loads(console.stdout.getvalue())
    assert card["output"] == "a" and card["calibration"]["seed"] == 5
    Path("recipe.yaml").write_text(
        f"model: {model}\nmethod: awq\ngroup_size: 64\noutput: b\nseed: 5\ncalib_dataset: {text}\ncalib_samples: 4\n"
        "calib_seqlen: 64\neval_tokens: 128\n"
    )
    assert run(console, "--config", "recipe.yaml") == ExitCode.OK
    assert Path("a/model.safetensors").read_bytes() == Path("b/model.safetensors").read_bytes()


def test_without_text_the_model_writes_its_own_and_python_is_measured_on(console: Console, model: Path) -> None:
    line = [model, "-o", "out", "--calib-samples", 3, "--calib-seqlen", 24, "--eval-tokens", 64, "--json"]
    assert run(console, *line) == ExitCode.OK
    card = json.loads(console.stdout.getvalue())
    assert card["calibration"]["text"] == "text sampled from the model itself (no --calib-dataset was given)"
    assert card["evaluation"]["text"].startswith("Python 3") and card["evaluation"]["predicted_tokens"] == 63
    assert "calibrating on text that the model writes itself" in console.stderr.getvalue()
    assert run(console, *line[:1], "-o", "again", *line[3:]) == ExitCode.OK
    assert Path("out/model.safetensors").read_bytes() == Path("again/model.safetensors").read_bytes()


def test_rounding_needs_no_text_and_modules_can_be_kept(console: Console, model: Path, text: Path) -> None:
    line = ["--rtn", model, "--sym", "--ignore", "layers.1.mlp", "--ignore", "lm_head", "-o", "out", "--json"]
    assert run(console, *line, "--eval-text", text, "--eval-tokens", 50) == ExitCode.OK
    card = json.loads(console.stdout.getvalue())
    assert card["calibration"] is None and card["scheme"]["linears"] == 11 and card["scheme"]["symmetric"]
    config = json.loads(Path("out/config.json").read_text())["quantization_config"]
    kept = [f"model.layers.1.mlp.{part}_proj" for part in ("down", "gate", "up")]
    assert config["modules_to_not_convert"] == kept
    stored = load_file("out/model.safetensors")
    original = load_file(model / "model.safetensors")
    for module in kept:
        assert torch.equal(stored[f"{module}.weight"], original[f"{module}.weight"].half())
    assert bool((stored["model.layers.0.mlp.up_proj.qzeros"] == -0x77777778).all())


@pytest.mark.parametrize("family", ["llama-tied-bias", "qwen3", "gemma3"])
def test_other_families_are_quantized_too(console: Console, tmp_path: Path, text: Path, family: str) -> None:
    model = write_checkpoint(tmp_path / "m", family)
    assert run(console, "--awq", *calibrated(model, text), "-o", "out", "--json") == ExitCode.OK
    card = json.loads(console.stdout.getvalue())
    assert card["kl"]["mean"] < 1 and card["scheme"]["rounded_to_nearest"] == 0


def test_a_quantized_model_is_unpacked_first_and_says_so(console: Console, tmp_path: Path, text: Path) -> None:
    values = write_quantized(write_checkpoint(tmp_path / "m", "llama"), "gptq-v2-desc-act")
    assert run(console, "--rtn", tmp_path / "m", "-o", "out", "--eval-text", text, "--eval-tokens", 64) == ExitCode.OK
    assert "is quantized already (f16, int4g32int): its values are unpacked" in console.stderr.getvalue()
    assert "before: the values of the model as it is stored (f16, int4g32int)" in console.stdout.getvalue()
    name = "model.layers.0.mlp.up_proj.weight"
    again = open_checkpoint(Source(Path("out"), "hf", "t")).read(name).dequantize()
    step = np.abs(values[name]).max() / 4
    assert np.abs(again - values[name]).max() < step


def test_limits_that_are_exceeded_end_with_1_and_keep_the_folder(console: Console, model: Path, text: Path) -> None:
    line = ["--rtn", model, "--eval-text", text, "--eval-tokens", 64, "-o", "out"]
    assert run(console, *line, "--fail-if", "kl>1e-9", "--fail-if", "top1<0") == ExitCode.FAILURE
    assert "`out` is written, but kl>1e-09" in console.stderr.getvalue() and Path("out/config.json").exists()
    assert run(console, *line, "--overwrite", "--fail-if", "kl > 100") == ExitCode.OK


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--fail-if", "kl=3"], "--fail-if is `kl=3`"),
        (["--fail-if", "nonsense>3"], "known are kl, kl_p99, ppl"),
        (["--awq", "--rtn"], "--awq says awq and --rtn says rtn"),
        (["--awq", "--method", "rtn"], "--awq says awq and --method says rtn"),
        (["--method", "gptq"], "--method is `gptq`"),
        (["--quantization", "fp8"], "--quantization is `fp8`"),
        (["--bits", "3"], "awq with 3 bits"),
        (["--group-size", "16"], "group size 16"),
        (["--strict-group-size"], "group size 128 does not divide 64 inputs"),
        (["--ignore", "nowhere"], "no module matches `--ignore nowhere`"),
        (["--ignore", "proj"], "--ignore leaves nothing to quantize"),
        (["--rtn", "--calib-samples", "3"], "rtn reads no calibration text"),
        (["--calib-samples", "0"], "--calib-samples is 0"),
        (["--calib-dataset", "nowhere.txt"], "there is no file `nowhere.txt`"),
        (["--eval-text", "nowhere/at/all"], "there is no file `nowhere/at/all`"),
        (["--output", "."], "--output is `.`"),
    ],
)
def test_what_cannot_work_is_a_usage_error(
    console: Console, model: Path, here: Path, line: list[str], message: str
) -> None:
    assert run(console, model, *line) == ExitCode.USAGE
    assert message in console.stderr.getvalue()
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has 0 tokens, enough for 0 samples of 64, but 4 are needed"),
        ("too short", "has 9 tokens"),
        ("x" * 200, "has 200 tokens, enough for 3 samples"),
        (b"\xff\xfe\x00", "as UTF-8 text"),
    ],
)
def test_calibration_text_that_will_not_do(
    console: Console, model: Path, here: Path, content: str | bytes, message: str
) -> None:
    path = here / "text.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert run(console, *calibrated(model, path)) == ExitCode.USAGE
    assert message in console.stderr.getvalue()
    assert [item.name for item in here.iterdir()] == ["text.txt"]


def test_samples_longer_than_the_context_do_not_fit(console: Console, model: Path, text: Path) -> None:
    assert run(console, *calibrated(model, text)[:4], "--calib-seqlen", 600) == ExitCode.CAPACITY
    assert "the model's context is 512" in console.stderr.getvalue()


def test_weights_that_are_not_finite_are_named_and_nothing_is_written(
    console: Console, tmp_path: Path, text: Path, here: Path
) -> None:
    model = write_checkpoint(tmp_path / "broken", "llama")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][2, 3] = torch.nan
    save_file(tensors, model / "model.safetensors")
    assert run(console, *calibrated(model, text)) == ExitCode.CHECKPOINT
    assert "`model.layers.1.mlp.up_proj.weight`" in console.stderr.getvalue() and "[2, 3]" in console.stderr.getvalue()
    assert [path.name for path in here.iterdir()] == ["broken"]


def test_outputs_are_not_overwritten_by_accident(console: Console, model: Path, here: Path) -> None:
    taken = here / "taken"
    taken.mkdir()
    (taken / "thesis.txt").write_text("all my work")
    assert run(console, model, "--rtn", "-o", taken) == ExitCode.USAGE
    assert "already exists" in console.stderr.getvalue()
    assert run(console, model, "--rtn", "-o", taken, "--overwrite") == ExitCode.USAGE
    assert "holds no llmctl_quality.json" in console.stderr.getvalue()
    assert run(console, model, "--rtn", "-o", model, "--overwrite") == ExitCode.USAGE
    assert "would replace the model itself" in console.stderr.getvalue()
    assert [path.name for path in taken.iterdir()] == ["thesis.txt"]


def test_an_interrupted_run_leaves_nothing(
    console: Console, model: Path, text: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llmctl.cli.quantize import run as work

    def interrupted(*_: object) -> None:
        assert [path.name for path in here.iterdir()] == [".tiny-awq-g32.partial"]
        raise KeyboardInterrupt

    monkeypatch.setattr(work, "measure_quality", interrupted)
    assert run(console, *calibrated(model, text)) == ExitCode.INTERRUPTED
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("json_too", [False, True])
def test_a_dry_run_reads_headers_and_writes_nothing(
    console: Console, model: Path, here: Path, monkeypatch: pytest.MonkeyPatch, json_too: bool
) -> None:
    monkeypatch.setattr("llmctl.engine.load.checkpoint.Checkpoint.read", None)
    assert run(console, model, "--awq", "--dry-run", *["--json"] * json_too) == ExitCode.OK
    shown = console.stdout.getvalue()
    if json_too:
        report = json.loads(shown)
        assert report["group_size_asked"] == 128 and report["group_size"] == 32 and report["linears"] == 14
        assert 0 < report["output_bytes"] < report["disk_free_bytes"] and report["memory_bytes"] > 0
    else:
        assert "groups of 32 (asked 128" in shown and "14 Linears quantized" in shown
    assert list(here.iterdir()) == []
