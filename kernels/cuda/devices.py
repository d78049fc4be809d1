"""The GPUs of this machine, and how one is put to use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import LlmctlError, UsageError
from . import nvrtc
from .driver import DeviceInfo, Driver
from .jit import Cubin, Jit, architecture
from .libcuda import load_driver
from .source import Kernel

if TYPE_CHECKING:
    from .gpu import Gpu
    from .library import Library

Code = Callable[[Kernel], Cubin]
Open = Callable[["Gpu"], "Library | None"]

_replaced: list[tuple[Driver, Code | None, Open]] = []


def use_driver(driver: Driver | None, code: Code | None = None, library: Open = lambda gpu: None) -> None:
    """Another driver from now on, with its own way from kernels to code, and its library; None: this machine's."""
    _replaced[:] = [] if driver is None else [(driver, code, library)]


def driver_in_use() -> Driver:
    """Raises UsageError where there is none."""
    return _replaced[0][0] if _replaced else load_driver()


def gpus() -> tuple[DeviceInfo, ...]:
    """Every GPU. Raises UsageError without a driver, DriverError where it has none."""
    return driver_in_use().devices()


def find_gpu(index: int) -> DeviceInfo:
    """The GPU of this number, which has kernels; UsageError or NoKernel otherwise."""
    found = gpus()
    if not 0 <= index < len(found):
        raise UsageError(
            f"--device is `cuda:{index}`, and there {'is' if len(found) == 1 else 'are'} {len(found)} of NVIDIA's GPUs",
            f"use `--device cuda:{len(found) - 1}`" if found else "use `--device cpu`",
        )
    architecture(*found[index].capability)
    return found[index]


def why_unusable(info: DeviceInfo) -> str:
    """Why no kernel could be run on this GPU, "" if they could."""
    try:
        architecture(*info.capability)
        if not _replaced:
            nvrtc.version()
    except LlmctlError as error:
        return error.message
    return ""


def free_memory(info: DeviceInfo) -> tuple[int, int]:
    """(free, total) bytes, the context of this process taken off already."""
    driver = driver_in_use()
    driver.open(info.index)
    try:
        return driver.memory()
    finally:
        driver.close()


def open_machine(info: DeviceInfo, cubins: Path, *, deterministic: bool, compile: bool) -> Gpu:
    """The GPU in use by this thread, its kernels compiled into the folder `cubins` unless that is forbidden."""
    from .cublas import open_cublas  # to ask for GPUs, as every start on a CPU does, needs none of these
    from .gpu import open_gpu
    from .library import use_library

    driver = driver_in_use()
    code = _replaced[0][1] if _replaced else None
    if code is None:
        if compile:
            nvrtc.version()
        code = Jit(cubins, architecture(*info.capability), compile).get
    gpu = open_gpu(driver, info, code, deterministic=deterministic)
    library: Open = _replaced[0][2] if _replaced else open_cublas
    use_library(None if deterministic else library(gpu))
    return gpu
