"""`llmctl quantize` on tiny models: what it writes loads, what it says is measured, what cannot work is told."""

from __future__ import annotations

import json
import random
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from llmctl.cli import app
from llmctl.cli.console import Console
from llmctl.cli.exits import ExitCode
from llmctl.cli.quantize import preflight, samples
from llmctl.cli.quantize import run as steps
from llmctl.engine.config import EngineConfig
from llmctl.engine.llm import LLM
from llmctl.engine.load.checkpoint import open_checkpoint
from llmctl.engine.load.hub import Source
from llmctl.engine.load.packed import PackedModel, open_packed
from llmctl.engine.plan import resolve as resolve_plan
from llmctl.engine.request import SamplingParams
from llmctl.engine.runner.kv_fit import fit_cache
from llmctl.engine.runner.layer_watch import LayerWatch
from llmctl.engine.runner.runner import Runner
from llmctl.engine.sizes import format_bytes
from llmctl.engine.tokenizer import Tokenizer
from tests.engine.quantized import write_quantized
from tests.engine.tiny import SHAPE, write_checkpoint, write_tokenizer

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
    monkeypatch.setattr(samples, "python_documentation", lambda: (" ".join(WORDS * 20),))  # 500 KB in truth
    return tmp_path


def run(console: Console, *line: object) -> int:
    return app.run(["quantize", "--threads", "1", *map(str, line)], console)


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
    assert len(card["golden"]["tokens"]) == len(card["golden"]["logits"]) == 16
    with LLM(str(out), max_model_len=64) as llm:  # which compares its logits with the golden ones
        greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        assert len(llm.generate("the sea", greedy)[0].outputs[0].token_ids) == 8
        assert llm.frontend.client.info.fingerprint == card["golden"]["fingerprint"]


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


@pytest.mark.parametrize("method", ["awq", "rtn"])
def test_scales_of_an_fp8_cache_are_stored_and_the_engine_takes_them(
    console: Console, tmp_path: Path, text: Path, method: str
) -> None:
    source = write_checkpoint(tmp_path / "source", "qwen2", dtype=torch.bfloat16)
    path = source / "model.safetensors"
    stale = torch.tensor([7.0])
    save_file({**load_file(path), "model.layers.1.self_attn.k_scale": stale}, path)
    line = calibrated(source, text) if method == "awq" else ["-m", source, "--eval-text", text, "--eval-tokens", 128]
    assert run(console, f"--{method}", "--kv-cache-scheme", "fp8", "-o", "out", "--json", *line) == ExitCode.OK
    assert json.loads(console.stdout.getvalue())["kv_cache_scheme"] == "fp8"
    stored = load_file(tmp_path / "out" / "model.safetensors")
    scales = {name: value for name, value in stored.items() if name.endswith("_scale")}
    assert sorted(scales) == [f"model.layers.{layer}.self_attn.{part}_scale" for layer in (0, 1) for part in "kv"]
    assert all(value.dtype == torch.float32 and value.shape == (1,) for value in scales.values())

    model = open_packed(Source(tmp_path / "out", "hf", "out"), cache=tmp_path / "cache")
    plan = resolve_plan(EngineConfig(kv_cache_dtype="fp8", max_model_len=64, max_num_seqs=2, threads=1), model)[0]
    runner = Runner(model, plan)
    taken = fit_cache(runner.groups[0].layers, model, plan)
    runner.close()
    ids = Tokenizer(model.folder).encode(text.read_text())[:64]
    for layer, seen in enumerate(LayerWatch(model, plan, 64).read(ids)):
        of_layer = [scales[f"model.layers.{layer}.self_attn.{part}_scale"].item() for part in "kv"]
        assert taken[layer].scales.tolist() == [[scale] * 2 for scale in of_layer]
        # what this text reaches is about what the calibration text did, and that is half of the largest that fits
        assert np.allclose(np.array(of_layer) * 448 / 2, seen.largest.max(axis=1), rtol=0.3)
    with LLM(str(tmp_path / "out"), max_model_len=64, kv_cache_dtype="fp8") as llm:
        (answer,) = llm.generate("the sea", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    assert len(answer.outputs[0].token_ids) == 8


def test_scales_of_the_source_are_left_out_and_that_is_told(console: Console, tmp_path: Path, text: Path) -> None:
    source = write_checkpoint(tmp_path / "source", "qwen2", dtype=torch.bfloat16)
    path = source / "model.safetensors"
    save_file({**load_file(path), "model.layers.1.self_attn.k_proj.k_scale": torch.tensor(7.0)}, path)
    assert run(console, "--rtn", "-o", "out", "-m", source, "--eval-text", text, "--eval-tokens", 64) == ExitCode.OK
    assert "1 scales of the model's KV cache are left out" in console.stderr.getvalue()
    assert not [name for name in load_file(tmp_path / "out" / "model.safetensors") if name.endswith("k_scale")]


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
        (["--kv-cache-scheme", "int4"], "--kv-cache-scheme is `int4`"),
        (["--group-size", "16"], "group size 16"),
        (["--group-size", "96"], "use 128, 64, 32, or -1"),
        (["--group-size", "1000000000"], "group size 1000000000"),
        (["--threads", "9999"], "--threads is 9999, it must be from 1 to 1024"),
        (["--threads", "9999", "--dry-run"], "--threads is 9999"),
        (["--seed", "-1"], "--seed is -1"),
        (["--calib-samples", "99999999999"], "--calib-samples is 99999999999, it must be from 1 to 1000000"),
        (["--eval-tokens", "99999999999"], "--eval-tokens is 99999999999"),
        (["--eval-tokens", "999999"], "tokens to measure on, 999999 are needed"),
        (["--output", ""], "--output is empty"),
        (["--strict-group-size"], "group size 128 does not divide 64 inputs"),
        (["--ignore", "nowhere"], "no module matches `--ignore nowhere`"),
        (["--ignore", "proj"], "--ignore leaves nothing to quantize"),
        (["--rtn", "--calib-samples", "3"], "rtn reads no calibration text\n\nhint: use --awq, or leave it out"),
        (["--calib-samples", "0"], "--calib-samples is 0"),
        (["--calib-dataset", "nowhere.txt"], "there is no file `nowhere.txt`"),
        (["--calib-dataset", "nosuch"], "there is no file `nosuch`"),
        (["--calib-dataset", "nosuch", "--dry-run"], "there is no file `nosuch`"),
        (["--eval-text", "nosuch"], "there is no file `nosuch`"),
        (["--eval-text", "nowhere/at/all"], "there is no file `nowhere/at/all`"),
        (["--output", "."], "--output is `.`"),
    ],
)
def test_what_cannot_work_is_a_usage_error_before_any_work(
    console: Console, model: Path, here: Path, monkeypatch: pytest.MonkeyPatch, line: list[str], message: str
) -> None:
    monkeypatch.setattr(steps, "write_text", None)
    monkeypatch.setattr(steps, "write_quantized", None)
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
    assert run(console, model, "--rtn", "-o", model / "sub" / "out") == ExitCode.USAGE
    assert "is inside the model's own folder" in console.stderr.getvalue() and not (model / "sub").exists()
    assert [path.name for path in taken.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED)]
)
def test_ctrl_c_and_sigterm_leave_nothing(
    console: Console, model: Path, text: Path, here: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    def interrupted(*_: object) -> None:
        assert [path.name for path in here.iterdir()] == [".tiny-rtn-g32.partial"]
        signal.raise_signal(number)

    monkeypatch.setattr(steps, "measure_quality", interrupted)
    assert run(console, model, "--rtn", "--eval-text", text, "--eval-tokens", 64) == code
    assert list(here.iterdir()) == []
    assert "Traceback" not in console.stderr.getvalue()


def test_a_killed_run_leaves_no_output_and_the_next_one_succeeds(
    console: Console, model: Path, text: Path, here: Path
) -> None:
    script = (
        "import os, signal, sys\n"
        "from llmctl.cli.app import main\n"
        "from llmctl.cli.quantize import run\n"
        "run.measure_quality = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "main()\n"
    )
    line = ["quantize", "--threads", 1, model, "--rtn", "--eval-text", text, "--eval-tokens", 64]
    done = subprocess.run([sys.executable, "-c", script, *map(str, line)], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name for path in here.iterdir()] == [".tiny-rtn-g32.partial"], "hidden, and nothing where it should be"
    assert run(console, *line[3:]) == ExitCode.OK
    assert [path.name for path in here.iterdir()] == ["tiny-rtn-g32"]


@pytest.mark.parametrize(
    ("dtype", "default", "reference"),
    [(torch.float16, "int16g32", "f16"), (torch.bfloat16, "int16g32", "bf16"), (torch.float32, "f32", "f32")],
)
def test_quality_is_measured_against_the_floats_of_the_source_and_speed_against_what_runs_by_default(
    console: Console, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, default: str,
    reference: str,
) -> None:  # fmt: skip
    seen: dict[str, tuple[str, ...]] = {}

    def watched(step: Callable[..., object], name: str) -> Callable[..., object]:
        def measure(original: PackedModel, *rest: object) -> object:
            seen[name] = original.weight_formats
            return step(original, *rest)

        return measure

    for name in ("measure_quality", "measure_speed"):
        monkeypatch.setattr(steps, name, watched(getattr(steps, name), name))
    source = write_checkpoint(tmp_path / "m", "llama", dtype=dtype)
    assert run(console, source, "--rtn", "-o", "out", "--eval-text", text, "--eval-tokens", 64) == ExitCode.OK
    assert seen == {"measure_quality": (reference,), "measure_speed": (default,)}


def test_a_source_of_several_float_types_is_measured_in_the_one_that_holds_them_all(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", "llama", dtype=torch.float16)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name].bfloat16()}, folder / "model.safetensors")
    assert preflight.reference_dtype(open_checkpoint(Source(folder, "hf", "m"))) == "float32"


@pytest.mark.parametrize("step", ["write_quantized", "write_card"])
def test_a_disk_that_fills_up_is_a_clear_error_and_leaves_nothing(
    console: Console, model: Path, text: Path, here: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(steps, step, with_small_files(getattr(steps, step)))
    line = [model, "--rtn", "-o", "out", "--eval-text", text, "--eval-tokens", 64]
    assert run(console, *line) == ExitCode.CAPACITY
    assert re.search(r"cannot write to `.*: File too large", console.stderr.getvalue())
    assert list(here.iterdir()) == []


def with_small_files(step: Callable[..., object]) -> Callable[..., object]:
    """The step with no file allowed to grow beyond 100 bytes, which fails as a full disk does: in the middle."""

    def limited(*arguments: object, **options: object) -> object:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            return step(*arguments, **options)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


def test_a_disk_without_room_is_noticed_before_anything_is_computed(
    console: Console, model: Path, text: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "free_bytes", lambda _: 1000)
    monkeypatch.setattr(steps, "open_packed", None)
    assert run(console, *calibrated(model, text)) == ExitCode.CAPACITY
    assert "on its disk, 1000 B are free" in console.stderr.getvalue()
    assert list(here.iterdir()) == []


def test_the_table_shows_what_the_card_says(console: Console, model: Path, text: Path) -> None:
    assert run(console, model, "--rtn", "-o", "out", "--eval-text", text, "--eval-tokens", 64) == ExitCode.OK
    card = json.loads(Path("out/llmctl_quality.json").read_text())
    sizes, bits, ppl, speed = (card[key] for key in ("bytes", "bits_per_weight", "perplexity", "decode_tokens_per_s"))
    expected = {
        "size": [format_bytes(sizes["before"]), format_bytes(sizes["after"])],
        "bits per weight": [f"{bits['before']:.2f}", f"{bits['after']:.2f}", f"{bits['quantized_linears']:.2f}"],
        "perplexity": [f"{ppl['before']:.3f}", f"{ppl['after']:.3f}", f"{ppl['after'] / ppl['before'] - 1:+.2%}"],
        "KL, mean": [f"{card['kl']['mean']:.4f}"],
        "KL, 99th percentile": [f"{card['kl']['p99']:.4f}"],
        "same likeliest token": [f"{card['top1_agreement']:.1%}"],
        "decode, tokens/s": [f"{speed['before']:.1f}", f"{speed['after']:.1f}"],
    }
    lines = console.stdout.getvalue().splitlines()
    for name, figures in expected.items():
        (row,) = (line for line in lines if line.strip().startswith(name))
        assert all(figure in row for figure in figures), (row, figures)


def test_progress_is_a_bar_on_a_terminal_and_plain_lines_in_a_pipe(
    make_console: Callable[..., Console], model: Path, text: Path
) -> None:
    terminal, pipe = make_console(tty=("stdout", "stderr")), make_console()
    line = [model, "--rtn", "--overwrite", "-o", "out", "--eval-text", text, "--eval-tokens", 64]
    assert run(terminal, *line) == run(pipe, *line) == ExitCode.OK
    shown = terminal.stderr.getvalue()
    assert "\x1b[" in shown and re.search(r"quantizing 2 layers.*━.*\d%", shown)
    said = pipe.stderr.getvalue()
    assert not set("\r\x1b━") & set(said) and "quantizing" not in pipe.stdout.getvalue()
    assert said.splitlines().count("quantizing 2 layers") == 1


def test_awq_loses_less_than_rounding_on_text_it_was_not_calibrated_on(
    make_console: Callable[..., Console], model_with_large_inputs: Path, here: Path
) -> None:
    calibration, other = write_text(here / "sea.txt", 3000), write_text(here / "other.txt", 600, seed=2)
    cards = {}
    for method in ("rtn", "awq"):
        line = ["-m", model_with_large_inputs, "-q", method, "-o", method, "--eval-text", other, "--eval-tokens", 512]
        if method == "awq":
            line += ["--calib-dataset", calibration, "--calib-samples", 8, "--calib-seqlen", 128]
        assert run(make_console(), *line) == ExitCode.OK
        cards[method] = json.loads(Path(method, "llmctl_quality.json").read_text())
    awq, rtn = cards["awq"], cards["rtn"]
    assert awq["kl"]["mean"] < 0.6 * rtn["kl"]["mean"] and awq["kl"]["p99"] < rtn["kl"]["p99"]
    assert awq["top1_agreement"] >= rtn["top1_agreement"]


@pytest.fixture
def model_with_large_inputs(tmp_path: Path) -> Path:
    """A model some of whose channels are much larger than others, as they are in trained ones."""
    folder = write_checkpoint(tmp_path / "large", "llama")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[1::16] *= 20
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(("width", "stored"), [(576, 64), (256, 128)])
def test_the_largest_group_that_divides_every_layer_is_stored(
    console: Console, tmp_path: Path, width: int, stored: int
) -> None:
    shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": width // 64}
    config = {**SHAPE, **shape, "num_key_value_heads": 1, "num_hidden_layers": 1}
    transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**config)).half().save_pretrained(tmp_path / "m")
    write_tokenizer(tmp_path / "m")
    line = [tmp_path / "m", "-q", "rtn", "--group-size", 128, "-o", "out", "--eval-tokens", 32]
    assert run(console, *line) == ExitCode.OK
    config = json.loads(Path("out/config.json").read_text())["quantization_config"]
    assert config["group_size"] == stored
    assert load_file("out/model.safetensors")["model.layers.0.mlp.up_proj.scales"].shape == (width // stored, 2 * width)
    said = f"groups of {stored}" + (" (asked 128, which does not divide every layer)" if stored != 128 else "")
    assert console.stderr.getvalue().splitlines()[0] == f"m: rtn, 4 bits, {said}"
    card = json.loads(Path("out/llmctl_quality.json").read_text())["scheme"]
    assert (card["group_size_asked"], card["group_size"]) == (128, stored)


def test_names_on_a_hub_that_cannot_be_reached(
    console: Console, model: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", refuse)
    line = [model, "-o", "out", "--calib-samples", 2, "--calib-seqlen", 16, "--eval-tokens", 32, "--json"]
    assert run(console, *line, "--calib-dataset", "org/text") == ExitCode.OK
    card = json.loads(console.stdout.getvalue())
    why = "`org/text` cannot be reached: no route to host"
    assert card["calibration"]["text"] == f"text sampled from the model itself ({why})"
    assert f"calibrating on text that the model writes itself: {why}" in console.stderr.getvalue()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run(console, "org/no-such-model", "--rtn") == ExitCode.CHECKPOINT
    assert "org/no-such-model" in console.stderr.getvalue()


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
