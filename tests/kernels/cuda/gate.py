"""What the compiler made of the registered kernels, as a table that is kept beside the tests.

`python tests/kernels/cuda/gate.py` writes the table of the representatives anew: look at what
changed before it is committed. Nothing in it says how fast anything is.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llmctl.kernels.cuda import nvrtc
from llmctl.kernels.cuda.jit import Jit
from llmctl.kernels.cuda.table import Listed
from llmctl.kernels.cuda.tiles import blocks_per_sm

GOLDEN = Path(__file__).with_name("golden.json")
CUBINS = Path(__file__).resolve().parents[3] / "build" / "cubins"
ARCHS = ("sm_75", "sm_80", "sm_90a")

# Instructions that tell whether a kernel is what it should be: loads and copies of 16 bytes, matrix loads, products on
# tensor cores, and local memory, where registers would have gone that a thread has not got.
FACTS = {
    "load_16": r"LDG\.E\.(\w+\.)*128",
    "copy_16": r"LDGSTS\.E\.(\w+\.)*128",
    "matrix_load": r"LDSM",
    "mma": r"[HQI]MMA",
    "local": r"LDL|STL",
}
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", re.MULTILINE)

Row = dict[str, int]


def disassembler() -> Path | None:
    """nvdisasm of the test environment, None if it is not installed."""
    try:
        spec = importlib.util.find_spec("nvidia.cu13")
    except ModuleNotFoundError:
        return None
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    return next((path for folder in folders if (path := Path(folder) / "bin" / "nvdisasm").exists()), None)


def measure(listed: Listed, arch: str, folder: Path = CUBINS) -> Row:
    """One kernel's row: what the assembler said, what fits on a multiprocessor, and counts of instructions."""
    cubin = Jit(folder, arch).get(listed.kernel)
    resources = cubin.resources
    blocks = blocks_per_sm(arch, listed.threads, resources.registers, listed.shared_bytes + resources.shared)
    row = {
        "registers": resources.registers,
        "spills": resources.spills,
        "shared": listed.shared_bytes + resources.shared,
        "warps_per_sm": blocks * (-(-listed.threads // 32)),
        "in_flight_per_sm": blocks * listed.in_flight,
    }
    if (program := disassembler()) is not None:
        row |= count_instructions(program, cubin.code)
    return row


def count_instructions(program: Path, code: bytes) -> Row:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        # A limit because disassemblers have been seen to hang on the newest architectures: of its time, not of ours.
        limited = ("sh", "-c", 'ulimit -t 60; exec "$0" -c "$1"', program, file.name)
        text = subprocess.run(limited, capture_output=True, text=True, check=True).stdout
    opcodes = Counter(_INSTRUCTION.findall(text))
    assert opcodes, "nothing was disassembled"
    return {fact: sum(n for op, n in opcodes.items() if re.match(pattern, op)) for fact, pattern in FACTS.items()}


def table(listed: Sequence[Listed], arch: str, folder: Path = CUBINS) -> dict[str, Row]:
    """The rows of these kernels by name, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        rows = list(pool.map(lambda item: measure(item, arch, folder), listed))
    return {item.kernel.expression: row for item, row in zip(listed, rows, strict=True)}


def write() -> None:
    from llmctl.kernels.cuda.table import representatives

    golden = {"nvrtc": nvrtc.version(), **{arch: table(representatives(arch), arch) for arch in ARCHS}}
    lines = json.dumps(golden, indent=1)
    # One kernel a line, so that a diff names it.
    lines = re.sub(r"\n   +\"(\w+)\": (\d+)", r' "\1": \2', lines)
    lines = re.sub(r"\n  }", " }", lines)
    temporary = GOLDEN.with_suffix(".tmp")
    temporary.write_text(lines + "\n")
    os.replace(temporary, GOLDEN)


if __name__ == "__main__":
    write()
