"""What this machine is: `read_machine()` gives instruction sets, usable cores, memory and caches as a frozen record.

Usable means: after the affinity mask and the limits of every control group above us, version 1 or 2, because a
container that is told it has 64 cores and may use two runs slower with 64 threads than with two. Everything is read
from /proc and /sys, so that neither torch nor our extension has to be loaded to plan or to explain.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KNOWN_FEATURES = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
    *("avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve"),
)


@dataclass(frozen=True, slots=True)
class Machine:
    """A CPU machine as this process may use it. Sizes in bytes, 0 where unknown.

    features          instruction sets that could matter to a kernel, named as in /proc/cpuinfo
    cores             logical CPUs that we may run on, rounded down where a quota allows a fraction
    physical_cores    the same with hardware threads of one core counted once
    memory_available  what can still be allocated without swapping or hitting a limit
    """

    model: str
    features: tuple[str, ...]
    cores: int
    physical_cores: int
    memory_total: int
    memory_available: int
    l1d_bytes: int
    l2_bytes: int
    l3_bytes: int


def read_machine(root: Path = Path("/")) -> Machine:
    """This machine as it is now. `root` is where /proc and /sys are found."""
    cpuinfo = _read(root / "proc/cpuinfo")
    cpus = os.sched_getaffinity(0)
    quota = _cpu_quota(root)
    physical = {_core_of(root, cpu) for cpu in cpus}
    total, available = _memory(root)
    return Machine(
        model=_field(cpuinfo, "model name") or _field(cpuinfo, "Processor") or "unknown CPU",
        features=_features(cpuinfo),
        cores=_capped(len(cpus), quota),
        physical_cores=_capped(len(physical), quota),
        memory_total=total,
        memory_available=available,
        l1d_bytes=_cache_bytes(root, min(cpus), 1),
        l2_bytes=_cache_bytes(root, min(cpus), 2),
        l3_bytes=_cache_bytes(root, min(cpus), 3),
    )


def default_threads() -> int:
    """How many threads compute when nobody says: one per physical core that we may use."""
    return read_machine().physical_cores


def give_back_freed_memory() -> None:
    """Return to the system what this process has freed and its allocator keeps, where the allocator can (glibc's).

    Loading takes memory in large pieces, and what is allocated for good lies between those that are freed.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _capped(count: int, quota: float | None) -> int:
    return count if quota is None else max(1, min(count, int(quota)))


def _features(cpuinfo: str) -> tuple[str, ...]:
    present = set((_field(cpuinfo, "flags") or _field(cpuinfo, "Features")).split())
    return tuple(name for name in KNOWN_FEATURES if name in present)


def _field(text: str, name: str) -> str:
    """The value of the first `name : value` line, "" if there is none."""
    found = re.search(rf"^{re.escape(name)}\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else ""


def _core_of(root: Path, cpu: int) -> tuple[str, str]:
    """What hardware threads of one core have in common: (package, core), or the CPU itself if nobody says."""
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    core = _read(topology / "core_id").strip()
    return _read(topology / "physical_package_id").strip(), core or f"cpu{cpu}"


def _cache_bytes(root: Path, cpu: int, level: int) -> int:
    for index in sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*")):
        if _read(index / "level").strip() == str(level) and _read(index / "type").strip() != "Instruction":
            size = re.fullmatch(r"(\d+)([KMG]?)", _read(index / "size").strip())
            return int(size[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[size[2]] if size else 0
    return 0


def _memory(root: Path) -> tuple[int, int]:
    """(total, available) bytes after control group limits."""
    meminfo = _read(root / "proc/meminfo")
    total, available = (int((_field(meminfo, name) or "0").split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    for folder in _group_folders(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is None or limit >= total:  # version 1 writes "no limit" as a huge number
            continue
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        droppable = re.search(r"^(?:total_)?inactive_file (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
        used -= int(droppable[1]) if droppable else 0
        total = limit
        available = min(available, max(0, limit - max(0, used)))
    return total, available


def _cpu_quota(root: Path) -> float | None:
    """The smallest CPU quota of the control groups above us in CPUs, None without one."""
    quotas = []
    for folder in _group_folders(root, "cpu"):
        both = _read(folder / "cpu.max").split()
        if len(both) != 2:
            both = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if both[0].isdigit() and both[1].isdigit():  # "max" and -1 mean none
            quotas.append(int(both[0]) / int(both[1]))
    return min(quotas, default=None)


def _group_folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of our control group and of all above it that may limit this controller.

    A container often sees its host's path in /proc/self/cgroup while its own group is mounted at the top: folders
    that do not exist are passed over, and the top is always among them.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            tops = [mounts, mounts / "unified"]
        elif controller in controllers.split(","):
            tops = [mounts / controllers, mounts / controller]
        else:
            continue
        for top in tops:
            inside = Path(path.lstrip("/"))
            yield from (top / part for part in (inside, *inside.parents) if (top / part).is_dir())


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    """The text of a file, "" if it is not there or not for us: each kernel and container shows a different part."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
