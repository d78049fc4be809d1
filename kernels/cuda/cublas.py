"""cuBLAS through its C interface: the `Library` of a real GPU, if it is installed and computes what it should.

It comes with torch, with the package nvidia-cublas or with a CUDA toolkit. A trial when it is opened multiplies two
small matrices whose products are exact: a library that cannot be loaded, fails or gives anything else is not used, and
the log says why. Its workspace is given to it once, so that a graph can be captured around its launches.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from ctypes import c_float, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .driver import DriverError
from .gpu import Gpu

log = logging.getLogger(__name__)

_NAMES = ("libcublas.so.13", "libcublas.so.12")
_PACKAGES = ("nvidia.cu13", "nvidia.cublas")  # since CUDA 13, and before
_TYPES = {"f16": 2, "bf16": 14}  # cudaDataType
_TRANSPOSED, _PLAIN = 1, 0  # cublasOperation_t
_COMPUTE_32F, _DEFAULT = 68, -1  # cublasComputeType_t, cublasGemmAlgo_t
_WHOLE_SUMS = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
WORKSPACE_BYTES = 32 << 20  # what NVIDIA advises for Hopper


@dataclass(frozen=True, slots=True, eq=False)
class Cublas:
    """The library on one GPU's stream."""

    library: ctypes.CDLL
    handle: c_void_p

    def multiply(
        self, dtype: str, y: int, x: int, weight: int, *, rows: int, outputs: int, inputs: int, width: int, add: bool
    ) -> None:
        # It stores by columns: a row-major matrix is its own transpose there, so y^T = weight x^T.
        one, before, kind = c_float(1.0), c_float(1.0 if add else 0.0), _TYPES[dtype]
        self.call(
            "cublasGemmEx", self.handle, _TRANSPOSED, _PLAIN, outputs, rows, inputs, ctypes.byref(one),
            c_void_p(weight), kind, inputs, c_void_p(x), kind, inputs, ctypes.byref(before), c_void_p(y), kind, width,
            _COMPUTE_32F, _DEFAULT,
        )  # fmt: skip

    def call(self, name: str, *arguments: Any) -> None:
        if (status := getattr(self.library, name)(*arguments)) != 0:
            raise DriverError(f"{name} failed with {status}")


def open_cublas(gpu: Gpu) -> Cublas | None:
    """The library for this GPU, None where there is none that works; the log says which."""
    before, _ = gpu.driver.memory()
    library = _load()
    if library is None:
        log.info("no cuBLAS is found: our own kernels multiply 16-bit weights, which takes longer for many rows")
        return None
    handle = c_void_p()
    found = Cublas(library, handle)
    try:
        found.call("cublasCreate_v2", ctypes.byref(handle))
        found.call("cublasSetStream_v2", handle, c_void_p(gpu.stream))
        found.call("cublasSetWorkspace_v2", handle, c_void_p(gpu.allocate(WORKSPACE_BYTES)), c_size_t(WORKSPACE_BYTES))
        found.call("cublasSetMathMode", handle, c_int(_WHOLE_SUMS))
        right = all(_trial(found, gpu, dtype) for dtype in _TYPES)
    except DriverError as error:
        log.warning("cuBLAS is not used: %s", error)
        return None
    if not right:
        log.warning("cuBLAS is not used: it gave a wrong product in a trial")
        return None
    taken = before - gpu.driver.memory()[0] - WORKSPACE_BYTES
    log.info("cuBLAS took %d bytes of device memory for itself beside its workspace of %d", taken, WORKSPACE_BYTES)
    return found


def _trial(library: Cublas, gpu: Gpu, dtype: str) -> bool:
    """Whether small integers are multiplied and added to what they should be."""
    rng, rows, outputs, inputs, width = np.random.default_rng(1), 5, 24, 32, 32
    x, weight, before = (rng.integers(-3, 4, shape) for shape in ((rows, inputs), (outputs, inputs), (rows, width)))
    expected = before.copy()
    expected[:, :outputs] += x @ weight.T
    at = [gpu.upload(_stored(values, dtype)) for values in (before, x, weight)]
    gpu.driver.synchronize(gpu.stream)
    library.multiply(dtype, *at, rows=rows, outputs=outputs, inputs=inputs, width=width, add=True)
    landing = gpu.pin(2 * rows * width)
    gpu.driver.download(int(landing.ctypes.data), at[0], 2 * rows * width, gpu.stream)
    gpu.driver.synchronize(gpu.stream)
    return bool(np.array_equal(landing.view(np.uint16).reshape(rows, width), _stored(expected, dtype)))


def _stored(values: np.ndarray[Any, np.dtype[np.int64]], dtype: str) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Small integers in a 16-bit type, which holds them exactly, as bits."""
    if dtype == "f16":
        return values.astype(np.float16).view(np.uint16)
    return (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _load() -> ctypes.CDLL | None:
    for path in (*_packaged(), *map(Path, _NAMES)):
        try:
            # Its other half is looked for in the system's folders only; what is loaded is found.
            if path.is_absolute():
                for half in path.parent.glob("libcublasLt.so*"):
                    ctypes.CDLL(str(half))
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    return None


def _packaged() -> list[Path]:
    """Where pip puts the library."""
    folders: list[str] = []
    for package in _PACKAGES:
        try:
            spec = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        folders += [] if spec is None else list(spec.submodule_search_locations or [])
    return [Path(folder) / "lib" / name for folder in folders for name in _NAMES]
