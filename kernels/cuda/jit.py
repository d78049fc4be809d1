"""Compiles kernels for a GPU when they are first used, and keeps them on disk: one cubin per specialization.

NVRTC needs neither a driver nor a GPU, so what runs on one machine can be compiled, and checked, on any other. A cubin
is named by the hash of the kernel's text, its includes, the flags and the architecture; beside it lies a record of the
compiler's version and of what the assembler said of registers and spills. The record is written after the cubin and
names its hash, so a file that is torn or foreign is compiled again, as is one of another compiler. `--no-jit` needs no
compiler at all.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..errors import NoKernel, UsageError
from . import nvrtc
from .source import FOLDER, Kernel, headers_of, prologue, text_hash

# Architectures that are compiled for; `a` ones run on that GPU only, and may use all that it has.
# sm_75 has float16 alone.
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")

# No fusing of products and sums but where a kernel says fmaf: two specializations then agree bit for bit.
FLAGS = ("-std=c++17", "--fmad=false", "-default-device", "--ptxas-options=-v", "--ptxas-options=--warn-on-spills")
# For a kernel that spills registers without it (prims.cuh).
ONE_BLOCK = "-DLLMCTL_ONE_BLOCK"
# For one that spills then, too: no other limit than there is, but the assembler allots registers in another way. Not
# part of a cubin's name: it decides between ways to assemble one text.
ALL_REGISTERS = "--maxrregcount=255"

_log = logging.getLogger(__name__)


class Resources(msgspec.Struct, frozen=True):
    """What one thread, and one block, of a kernel takes. Bytes but for registers; dynamic shared memory is apart."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int

    @property
    def spills(self) -> int:
        return self.spill_stores + self.spill_loads


class _Record(msgspec.Struct, frozen=True):
    expression: str
    arch: str
    compiler: str
    symbol: str
    sha256: str
    resources: Resources


@dataclass(frozen=True, slots=True, eq=False)
class Cubin:
    """A compiled kernel: machine code, its name in there, and what it takes."""

    code: bytes
    symbol: str
    resources: Resources


@dataclass(frozen=True, slots=True)
class Jit:
    """Cubins for one architecture, from `folder` or compiled into it.

    compile  False (`--no-jit`): what is not there is an error
    """

    folder: Path
    arch: str
    compile: bool = True

    def get(self, kernel: Kernel) -> Cubin:
        """The kernel's cubin. Raises NoKernel if it would have to be compiled and may not be."""
        key = self._key(kernel)
        if (found := self._read(key)) is not None:
            return found
        if not self.compile:
            raise NoKernel(
                f"{kernel.expression} is not compiled for {self.arch}, and `--no-jit` forbids to",
                f"run `llmctl kernels build --all --arch {self.arch}` first, or leave out `--no-jit`",
            )
        _log.info("compiling %s for %s", kernel.expression, self.arch)
        cubin = compile_cubin(kernel, self.arch)
        self._publish(key, kernel, cubin)
        return cubin

    def has(self, kernel: Kernel) -> bool:
        """Whether the kernel is compiled already."""
        return self._read(self._key(kernel)) is not None

    def _key(self, kernel: Kernel) -> str:
        return text_hash(headers_of(kernel.header), kernel.expression, self.arch, *FLAGS, ONE_BLOCK)

    def _read(self, key: str) -> Cubin | None:
        try:
            record = msgspec.json.decode((self.folder / f"{key}.json").read_bytes(), type=_Record)
            code = (self.folder / f"{key}.cubin").read_bytes()
        except FileNotFoundError:
            return None
        except msgspec.DecodeError:
            _log.warning("%s is damaged; compiling again", self.folder / f"{key}.json")
            return None
        if hashlib.sha256(code).hexdigest() != record.sha256:
            _log.warning("%s is not what was compiled; compiling again", self.folder / f"{key}.cubin")
            return None
        if self.compile and record.compiler != nvrtc.version():
            return None
        return Cubin(code, record.symbol, record.resources)

    def _publish(self, key: str, kernel: Kernel, cubin: Cubin) -> None:
        digest = hashlib.sha256(cubin.code).hexdigest()
        record = _Record(kernel.expression, self.arch, nvrtc.version(), cubin.symbol, digest, cubin.resources)
        _write(self.folder / f"{key}.cubin", cubin.code)
        _write(self.folder / f"{key}.json", msgspec.json.encode(record))


def architecture(major: int, minor: int) -> str:
    """The best of ARCHITECTURES for a GPU of this compute capability; raises NoKernel if there is none."""
    exact = {(9, 0): "sm_90a", (10, 0): "sm_100a"}
    if (major, minor) in exact:
        return exact[major, minor]
    plain = [int(arch[3:]) for arch in ARCHITECTURES if not arch.endswith("a")]
    # A cubin runs on every GPU of its own major number that is not older.
    fitting = [number for number in plain if number // 10 == major and number % 10 <= minor]
    if not fitting:
        raise NoKernel(
            f"no kernels for a GPU of compute capability {major}.{minor}",
            "supported are 7.5 (in float16), 8.0, 8.6, 8.9, 9.0, 10.0 and 12.x: choose such a GPU, or `--device cpu`",
        )
    return f"sm_{max(fitting)}"


def compile_cubin(kernel: Kernel, arch: str) -> Cubin:
    """The kernel compiled for an architecture, without a cache."""
    if arch not in ARCHITECTURES:
        raise UsageError(f"--arch is `{arch}`", f"choose one of: {', '.join(ARCHITECTURES)}")
    options = (f"-arch={arch}", *FLAGS, f"-I{FOLDER}")
    cubin = _compiled(kernel, options)
    for other in (ONE_BLOCK, ALL_REGISTERS):
        if cubin.resources.spills:
            cubin = min(cubin, _compiled(kernel, (*options, other)), key=lambda one: one.resources.spills)
    return cubin


def _compiled(kernel: Kernel, options: tuple[str, ...]) -> Cubin:
    code, symbol, log = nvrtc.compile(prologue(kernel.header), kernel.expression, options)
    return Cubin(code, symbol, parse_resources(log))


def parse_resources(log: str) -> Resources:
    """What the assembler reported of the only kernel in its log."""

    def number(pattern: str) -> int:
        match = re.search(pattern, log)
        return int(match[1]) if match else 0

    return Resources(
        number(r"Used (\d+) registers"),
        number(r"(\d+) bytes spill stores"),
        number(r"(\d+) bytes spill loads"),
        number(r"(\d+) bytes stack frame"),
        number(r"(\d+) bytes smem"),
    )


def _write(path: Path, content: bytes) -> None:
    """Give `path` this content at once, whoever else does the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
