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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llmctl.kernels.cuda import nvrtc
from llmctl.kernels.cuda.jit import Jit, Resources
from llmctl.kernels.cuda.table import Listed
from llmctl.kernels.cuda.tiles import blocks_per_sm

GOLDEN = Path(__file__).with_name("golden.json")
CUBINS = Path(__file__).resolve().parents[3] / "build" / "cubins"
ARCHS = ("sm_75", "sm_80", "sm_90a")

# Instructions that tell whether a kernel is what it should be: reads of global memory, and of these loads and copies of
# 16 bytes; matrix loads, products on tensor cores, arithmetic on floats, on integers and addresses, exponentials and
# roots; and local memory, where registers would have gone that a thread has not got.
FACTS = {
    "reads": r"LDG",
    "load_16": r"LDG\.E\.(\w+\.)*128",
    "copy_16": r"LDGSTS\.E\.(\w+\.)*128",
    "matrix_load": r"LDSM",
    "mma": r"[HQI]MMA",
    "float": r"FADD|FMUL|FFMA|FSEL|FSET|FMNMX|FCHK|HADD2|HMUL2|HFMA2|F2F|F2I|I2F",
    "integer": r"U?(IADD|IMAD|ISETP|IMNMX|IABS|VIMNMX|VIADD|LEA|LOP3|SHF|PRMT)",
    "special": r"MUFU",
    "local": r"LDL|STL",
}
_LINE = re.compile(
    r"^\s*(?:(?P<label>\.L_x_\d+):|/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(?P<op>[A-Z][A-Z0-9_.]+)(?P<rest>[^;]*);)",
    re.MULTILINE,
)

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
    row = resource_row(listed, arch, cubin.resources)
    if (program := disassembler()) is not None:
        row |= count_instructions(program, cubin.code)
    return row


def resource_row(listed: Listed, arch: str, resources: Resources) -> Row:
    shared = listed.shared_bytes + resources.shared
    blocks = blocks_per_sm(arch, listed.threads, resources.registers, shared)
    return {
        "registers": resources.registers,
        "spills": resources.spills,
        "shared": shared,
        "warps_per_sm": blocks * (-(-listed.threads // 32)),
        "in_flight_per_sm": blocks * listed.in_flight,
    }


def count_instructions(program: Path, code: bytes) -> Row:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        # A limit because disassemblers have been seen to hang on the newest architectures: of its time, not of ours.
        limited = ("sh", "-c", 'ulimit -t 60; exec "$0" -c "$1"', program, file.name)
        return count_listing(subprocess.run(limited, capture_output=True, text=True, check=True).stdout)


def count_listing(text: str) -> Row:
    """How many instructions a disassembled kernel has of each kind, and its main loop: `loop`, of that `loop_mma`.

    The main loop is, of all jumps back, the one around the most products on tensor cores, else the most reads, else the
    most instructions; 0 where there is none.
    """
    opcodes: list[str] = []
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    for line in _LINE.finditer(text):
        if line["label"]:
            labels[line["label"]] = len(opcodes)
            continue
        opcodes.append(line["op"])
        if line["op"].startswith("BRA") and (target := re.search(r"\.L_x_\d+", line["rest"])):
            jumps.append((len(opcodes), target[0]))
    assert opcodes, "nothing was disassembled"

    def count(pattern: str, part: list[str]) -> int:
        return sum(bool(re.match(pattern, op)) for op in part)

    # A kernel ends with a jump to itself.
    loops = [opcodes[labels[target] : end] for end, target in jumps if labels.get(target, end) < end - 1]
    main = max(loops, key=lambda one: (count(FACTS["mma"], one), count(FACTS["reads"], one), len(one)), default=[])
    return {
        "instructions": len(opcodes) - opcodes.count("NOP"),
        **{fact: count(pattern, opcodes) for fact, pattern in FACTS.items()},
        "loop": len(main),
        "loop_mma": count(FACTS["mma"], main),
    }


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
