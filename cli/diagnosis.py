"""What `doctor` finds out: the machine, the kernels it would get, the packages, the caches, and what is wrong.

Everything is looked up, nothing is loaded or computed, and a thing that is broken becomes a finding, not an exception.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from dataclasses import dataclass
from pathlib import Path

from .. import __version__
from ..engine.config import DEFAULT_MODEL, Environment
from ..engine.load.convert import rounding
from ..engine.load.hub import Remotes, hub_download, resolve
from ..engine.load.wheel import pip_download
from ..engine.models.families import known_families
from ..kernels.cpu.pages import STATE, large_pages_allowed
from ..kernels.cuda import devices
from ..kernels.device import Machine, default_threads, read_machine
from ..kernels.errors import LlmctlError
from ..quant.formats.gguf_blocks import TYPES
from .kernel_choice import Choice, choices

# Distribution names. Torch and transformers are not needed to chat from a warm cache, `datasets` only reads parquet:
# these may be absent.
NEEDED = (
    *("httptools", "httpx", "huggingface-hub", "jinja2", "msgspec", "numpy", "prometheus-client", "prompt-toolkit"),
    *("pyyaml", "pyzmq", "rich", "starlette", "tokenizers", "typer", "uvicorn", "uvloop"),
)
OPTIONAL = ("datasets", "torch", "transformers")

_GIVEN = "for weights and KV cache"
_NOT_GIVEN = f"not given by this system: decoding is slower (write `madvise` to {STATE})"


@dataclass(frozen=True, slots=True)
class CacheFolder:
    """A folder that may grow: what it is for, where it is, and the bytes in it (0 if it does not exist)."""

    purpose: str
    path: Path
    bytes: int


@dataclass(frozen=True, slots=True)
class GpuState:
    """A GPU; `problem` says why no kernel could run on it, "" if they could. Memory in bytes."""

    device: str
    name: str
    capability: str
    processors: int
    memory_total: int
    problem: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`problems` keep something from working here; `default_model` is its file or folder, "" if not fetched yet.

    `families` are those of our own decoder; other decoders go through transformers. `gguf_types` are those that keep
    every value, `gguf_roundings` say what happens to the others that can be read. `no_gpu` says why there are no
    `gpus`.
    """

    version: str
    machine: Machine
    large_pages: str
    threads: int
    isa: str
    kernels: tuple[Choice, ...]
    families: tuple[str, ...]
    gguf_types: tuple[str, ...]
    gguf_roundings: tuple[str, ...]
    packages: dict[str, str]
    caches: tuple[CacheFolder, ...]
    default_model: str
    gpus: tuple[GpuState, ...]
    no_gpu: str
    problems: tuple[str, ...]


def diagnose(environment: Environment) -> Diagnosis:
    """The state of this machine and this installation."""
    found = choices()
    gguf = {kind.name: kind.format for kind in TYPES.values() if kind.format is not None}
    remotes = Remotes(_hub_cache(), hub_download, pip_download, default_order=("hub",))
    packages = {name: _version(name) for name in (*NEEDED, *OPTIONAL)}
    gpus, no_gpu = _gpus()
    return Diagnosis(
        version=__version__,
        machine=read_machine(),
        large_pages=_GIVEN if large_pages_allowed() else _NOT_GIVEN,
        threads=default_threads(),
        isa=", ".join(dict.fromkeys(choice.isa for choice in found)),
        kernels=found,
        families=known_families(),
        gguf_types=tuple(name for name, format in gguf.items() if not rounding(name, format)),
        gguf_roundings=tuple(line for name, format in gguf.items() if (line := rounding(name, format))),
        packages=packages,
        caches=(
            CacheFolder("models and packed weights", environment.cache, folder_bytes(environment.cache)),
            CacheFolder("Hugging Face downloads", remotes.hub_cache, folder_bytes(remotes.hub_cache)),
        ),
        default_model=_default_model(environment, remotes),
        gpus=gpus,
        no_gpu=no_gpu,
        problems=tuple(_problems(environment, found, packages)),
    )


def folder_bytes(folder: Path) -> int:
    """Bytes of the files under `folder`, links not followed; what vanishes meanwhile counts nothing."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _gpus() -> tuple[tuple[GpuState, ...], str]:
    """The GPUs of this machine, and why there are none."""
    try:
        found = devices.gpus()
    except LlmctlError as error:
        return (), error.message
    states = tuple(
        GpuState(
            f"cuda:{info.index}", info.name, "{}.{}".format(*info.capability), info.processors, info.memory_total,
            devices.why_unusable(info),
        )
        for info in found
    )  # fmt: skip
    return states, "" if states else "the CUDA driver knows of none"


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _default_model(environment: Environment, remotes: Remotes) -> str:
    local = dataclasses.replace(environment, model="", offline=True)
    try:
        return str(resolve(DEFAULT_MODEL, environment=local, remotes=remotes).path)
    except LlmctlError:
        return ""


def _problems(environment: Environment, kernels: tuple[Choice, ...], packages: dict[str, str]) -> list[str]:
    problems = [f"package `{name}` is not installed" for name in NEEDED if not packages[name]]
    # An op that only the reference has on every machine is no fault of this one.
    some = any(choice.isa != "reference" for choice in kernels)
    slow = [choice for choice in kernels if choice.isa == "reference" and (choice.refused or not some)]
    for reason in dict.fromkeys("; ".join(choice.refused) for choice in slow):
        ops = dict.fromkeys(choice.op for choice in slow if "; ".join(choice.refused) == reason)
        problems.append(f"{', '.join(ops)} would run on the slow reference: {reason or 'no kernel is registered'}")
    if not _writable(environment.cache):
        problems.append(f"`{environment.cache}` cannot be written to; LLMCTL_CACHE names another folder")
    return problems


def _writable(folder: Path) -> bool:
    """Whether the folder, or the nearest one above it that exists, lets us write."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK)
