"""Runs kernels on the CPU from the text that a GPU would get: builds them with g++ when first asked for, and launches.

`values` is optimized and finds wrong results, deadlocks and misuse of warp-wide operations. `checked` looks at every
access to memory as well (emu/checker.cpp) and is three times slower. Neither says how fast anything would be. A build
is named by the hash of all that went into it, and appears in its folder complete or not at all.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import UsageError
from .arguments import Argument
from .source import FOLDER, Kernel, headers_of, prologue, text_hash

Mode = Literal["values", "checked"]

SLOT_BYTES = 16  # kSlot of emu/emulator.hpp
UNIT_KERNELS = 8

_MACHINE = tuple(FOLDER / "emu" / name for name in ("machine.cpp", "warp.cpp", "checker.cpp"))
_MACHINE_HEADERS = tuple(FOLDER / "emu" / name for name in ("emulator.hpp", "machine.hpp", "numeric.hpp"))
# The hooks of emu/ keep their names; all else of a library is its own.
_COMMON = ("-std=c++20", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off", "-fvisibility=hidden", f"-I{FOLDER}")
_KERNEL = {
    "values": ("-O2", "-Wno-unknown-pragmas"),
    # Small functions inlined, no vectors: a report then names one line. Statics need no guards in one thread.
    "checked": (
        *("-O1", "-g1", "-fno-tree-vectorize", "-fsanitize=thread", "-fno-threadsafe-statics"),
        "-Wno-unknown-pragmas",
    ),
}
_MACHINE_FLAGS = {"values": ("-O2",), "checked": ("-O2", "-DLLMCTL_EMU_CHECK")}


@dataclass(frozen=True, slots=True, eq=False)
class Emulation:
    """Kernels built for this CPU. One at a time may run in a process."""

    library: ctypes.CDLL
    path: Path
    entries: dict[Kernel, str]

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        arguments: Sequence[Argument],
    ) -> bool:
        """Run the kernel to its end; False if a device would have refused or hung, and `reports` says why."""
        slots = b"".join(bytes(argument).ljust(SLOT_BYTES, b"\0") for argument in arguments)
        # Rounded up by hand: a kernel's parameters are read as their own types, which wants alignment.
        memory = ctypes.create_string_buffer(len(slots) + SLOT_BYTES)
        start = -(-ctypes.addressof(memory) // SLOT_BYTES) * SLOT_BYTES
        ctypes.memmove(start, slots, len(slots))
        entry = ctypes.cast(getattr(self.library, self.entries[kernel]), ctypes.c_void_p)
        sizes = (ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(threads, 1, 1)
        finished: bool = self.library.emu_launch(
            entry, *sizes, ctypes.c_size_t(shared_bytes), ctypes.c_void_p(start), ctypes.c_size_t(len(arguments))
        )
        return finished

    def register(
        self, address: int, num_bytes: int, name: str, *, written: bool = True, read_only: bool = False
    ) -> None:
        """Memory that kernels may touch in the checked build; not `written`: a kernel has to write before one reads."""
        self.library.emu_register(
            ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), name.encode(), written, read_only
        )

    def forget(self) -> None:
        """Forget all registered memory."""
        self.library.emu_forget()

    def order(self, name: Literal["ascending", "descending", "random"], seed: int = 1) -> None:
        """In which order threads and blocks run from now on."""
        which = ("ascending", "descending", "random").index(name)
        self.library.emu_order(which, ctypes.c_uint64(seed))

    def reports(self) -> tuple[str, ...]:
        """What was found since the last call, each once, with file and line."""
        size = 1 << 16
        while True:
            buffer = ctypes.create_string_buffer(size)
            if (needed := self.library.emu_reports(buffer, ctypes.c_size_t(size))) < size:
                break
            size = needed + 1
        found = [line.partition("\t")[2] for line in buffer.value.decode().splitlines()]
        return tuple(dict.fromkeys(self._with_places(found)))

    def counts(self) -> tuple[int, int]:
        """Since the last call: tensor-core instructions, and bank conflicts of ldmatrix."""
        out = (ctypes.c_long * 2)()
        self.library.emu_counts(out)
        return out[0], out[1]

    def _with_places(self, found: list[str]) -> list[str]:
        """Each `@0x...` replaced by file and line of the access."""
        offsets = sorted({offset for line in found for offset in re.findall(r"@(0x[0-9a-f]+)", line)})
        if not offsets:
            return found
        # A return address is behind its call; one byte before is inside it.
        calls = [hex(int(offset, 16) - 1) for offset in offsets]
        lines = subprocess.run(
            ["addr2line", "-e", str(self.path), *calls], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        places = {offset: line.split(" ")[0].rpartition("/")[2] for offset, line in zip(offsets, lines, strict=True)}
        return [re.sub(r"@(0x[0-9a-f]+)", lambda match: "at " + places[match[1]], line) for line in found]


def compiler() -> str | None:
    """The C++ compiler that emulation uses, None if there is none."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build(kernels: Sequence[Kernel], mode: Mode, folder: Path, *, jobs: int = 2) -> Emulation:
    """These kernels for this CPU, from `folder` if they are there. Kernels of one header are compiled together."""
    if (program := compiler()) is None:
        raise UsageError("no C++ compiler is found to emulate kernels with", "install g++, or name one in CXX")
    folder.mkdir(parents=True, exist_ok=True)
    wanted = tuple(dict.fromkeys(kernels))
    entries = {kernel: f"entry_{text_hash((), kernel.expression)}" for kernel in wanted}
    with ThreadPoolExecutor(jobs) as pool:
        machine = [pool.submit(_object, program, path, _machine_key(path, mode), mode, folder) for path in _MACHINE]
        units = [pool.submit(_kernels_object, program, unit, entries, mode, folder) for unit in _units(wanted)]
        objects = [job.result() for job in (*machine, *units)]
    name = text_hash((), mode, *(path.name for path in objects))
    library = folder / f"{name}.so"
    if not library.exists():
        _publish(library, [program, "-shared", "-o", "{out}", *map(str, objects), "-ldl"])
    return Emulation(_load(library), library, entries)


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.emu_launch.restype = ctypes.c_bool
    library.emu_reports.restype = ctypes.c_size_t
    return library


def _units(kernels: Sequence[Kernel]) -> list[tuple[Kernel, ...]]:
    """What is compiled together: kernels of one header, few enough that several units share the work."""
    units = []
    for header in dict.fromkeys(kernel.header for kernel in kernels):
        group = [kernel for kernel in kernels if kernel.header == header]
        units += [tuple(group[i : i + UNIT_KERNELS]) for i in range(0, len(group), UNIT_KERNELS)]
    return units


def _kernels_object(
    program: str, kernels: tuple[Kernel, ...], entries: dict[Kernel, str], mode: Mode, folder: Path
) -> Path:
    header = kernels[0].header
    text = prologue(header) + "".join(
        f'extern "C" __attribute__((visibility("default"))) void {entries[kernel]}(const unsigned char* slots) {{\n'
        f"  llmctl::emu::call({kernel.expression}, slots);\n}}\n"
        for kernel in kernels
    )
    key = text_hash((*headers_of(header), *_MACHINE_HEADERS), text, mode, *_COMMON, *_KERNEL[mode])
    unit = folder / f"{key}.cpp"
    if not (folder / f"{key}.o").exists():
        unit.write_text(text)
    return _object(program, unit, key, mode, folder)


def _machine_key(path: Path, mode: Mode) -> str:
    return text_hash((path, *_MACHINE_HEADERS), mode, *_COMMON, *_MACHINE_FLAGS[mode])


def _object(program: str, unit: Path, key: str, mode: Mode, folder: Path) -> Path:
    out = folder / f"{key}.o"
    if not out.exists():
        flags = _MACHINE_FLAGS[mode] if unit in _MACHINE else _KERNEL[mode]
        _publish(out, [program, *_COMMON, *flags, "-c", str(unit), "-o", "{out}"])
    return out


def _publish(path: Path, command: Sequence[str]) -> None:
    """Run a command that writes {out}, and give its result the name `path` once it is complete."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    os.close(handle)
    try:
        done = subprocess.run([part.replace("{out}", name) for part in command], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        os.chmod(name, 0o755)
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
