from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from llmctl.kernels.errors import CapacityError, CheckpointError, UnsupportedModel, UsageError
from llmctl.quant.calibrate import QuantizedBlock
from llmctl.quant.formats import safetensors
from llmctl.quant.formats.detect import detect_format
from llmctl.quant.formats.safetensors_write import PlannedTensor, SafetensorsWriter
from llmctl.quant.save import AwqWriter, plan_awq, text_files, write_card
from llmctl.quant.scheme import Scheme, quantized_linears
from llmctl.quant.solve import rtn
from llmctl.quant.staging import staged_folder

SHAPES = {
    "model.embed_tokens.weight": (40, 64),
    "model.layers.0.input_layernorm.weight": (64,),
    "model.layers.0.mlp.up_proj.weight": (96, 64),
    "model.layers.0.mlp.up_proj.bias": (96,),
    "model.layers.0.mlp.down_proj.weight": (64, 96),
    "model.norm.weight": (64,),
}
FORMAT = Scheme("rtn").format([64, 96])


def write_model(folder: Path, shard_bytes: int = 1 << 30) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    layer = {n.removeprefix("model.layers.0."): t for n, t in tensors.items() if "layers" in n}
    linears = {n.removesuffix(".weight"): rtn.quantize(t, FORMAT) for n, t in layer.items() if t.ndim == 2}
    block = QuantizedBlock(linears, {n: t for n, t in layer.items() if t.ndim == 1}, ())
    writer = AwqWriter(folder, SHAPES, quantized_linears(SHAPES), FORMAT, shard_bytes)
    writer.add("model.norm.weight", tensors["model.norm.weight"])
    writer.add_block("model.layers.0.", block)
    writer.add("model.embed_tokens.weight", tensors["model.embed_tokens.weight"])
    writer.finish({"model_type": "llama", "dtype": "bfloat16"}, {"tokenizer.json": b"{}"})
    return tensors


def test_a_written_model_reads_back_as_quantized(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "out") as staging:
        tensors = write_model(staging)
        write_card(staging, {"perplexity": 3.5})
    out = tmp_path / "out"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json", "llmctl_quality.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    config = json.loads((out / "config.json").read_text())
    assert config["torch_dtype"] == "float16" and "dtype" not in config and config["model_type"] == "llama"
    stored = load_file(out / "model.safetensors")
    format = detect_format(config["quantization_config"])
    parts = {n.rsplit(".", 1)[1]: t for n, t in stored.items() if "down_proj" in n}
    linear = format.decode("model.layers.0.mlp.down_proj", parts)
    expected = rtn.quantize(tensors["model.layers.0.mlp.down_proj.weight"], FORMAT)
    np.testing.assert_array_equal(linear.weight.dequantize(), expected.dequantize())
    np.testing.assert_array_equal(stored["model.norm.weight"], tensors["model.norm.weight"].half().numpy())
    assert FORMAT.group == 32 and "model.layers.0.mlp.up_proj.bias" in stored
    with safe_open(out / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_shards_are_indexed_and_read_by_our_own_reader(tmp_path: Path) -> None:
    write_model(tmp_path, shard_bytes=6000)
    plan = plan_awq(SHAPES, quantized_linears(SHAPES), FORMAT)
    files = safetensors.open_files(tmp_path)
    assert len(files.files) > 1 and set(files.tensors) == {tensor.name for tensor in plan}
    index = json.loads((tmp_path / safetensors.INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in plan)


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), staged_folder(tmp_path / "out") as staging:
        write_model(staging)
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_leaves_no_target_and_the_next_one_succeeds(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from llmctl.quant.formats.safetensors_write import PlannedTensor, SafetensorsWriter\n"
        "from llmctl.quant.staging import staged_folder\n"
        "with staged_folder(Path(sys.argv[1])) as staging:\n"
        "    SafetensorsWriter(staging, [PlannedTensor('a', 'F16', (64,))])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    with staged_folder(tmp_path / "out") as staging:
        assert list(staging.iterdir()) == []
        write_model(staging)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite"])
def test_a_full_disk_is_a_clear_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(CapacityError, match="No space left"), staged_folder(tmp_path / "out") as staging:
        write_model(staging)
    assert list(tmp_path.iterdir()) == []


def test_existing_output_is_refused_and_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(UsageError, match="already exists"), staged_folder(tmp_path / "full"):
        pass
    (tmp_path / "empty").mkdir()
    with staged_folder(tmp_path / "empty") as staging:
        (staging / "file").touch()
    assert (tmp_path / "empty" / "file").exists()


def test_an_output_that_is_replaced_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    with pytest.raises(RuntimeError), staged_folder(out, replace=True):
        raise RuntimeError
    assert [path.name for path in out.iterdir()] == ["old"]
    with staged_folder(out, replace=True) as staging:
        assert (out / "old").exists()
        (staging / "new").touch()
    assert [path.name for path in out.iterdir()] == ["new"] and list(tmp_path.iterdir()) == [out]


def test_two_writers_of_one_output_do_not_meet(tmp_path: Path) -> None:
    with staged_folder(tmp_path / "out") as staging:
        with pytest.raises(UsageError, match="another process"), staged_folder(tmp_path / "out"):
            pass
        (staging / "file").touch()
    assert (tmp_path / "out" / "file").exists()


def test_a_tensor_that_was_never_written_is_noticed(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path, [PlannedTensor("a", "F16", (4,)), PlannedTensor("b", "I32", ())])
    writer.write("b", np.array(3, np.int32))
    with pytest.raises(AssertionError, match="a"):
        writer.finish()


def test_values_beyond_float16_and_odd_outputs_are_refused(tmp_path: Path) -> None:
    writer = AwqWriter(tmp_path, SHAPES, quantized_linears(SHAPES), FORMAT)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        writer.add("model.norm.weight", torch.full((64,), 1e6))
    with pytest.raises(UnsupportedModel, match="99 outputs"):
        plan_awq({"model.layers.0.mlp.up_proj.weight": (99, 64)}, ["model.layers.0.mlp.up_proj"], FORMAT)


def test_text_files_are_copied_by_name(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors", "config.json"):
        (tmp_path / name).write_text(name)
    assert text_files(tmp_path) == {"tokenizer.json": b"tokenizer.json", "chat_template.jinja": b"chat_template.jinja"}
