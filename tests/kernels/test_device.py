"""The machine record honours affinity, quotas and memory limits, whichever way they are shown."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path

import pytest

from llmctl.kernels.device import default_threads, give_back_freed_memory, read_machine

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 64 GiB, as large as the affinity mask, without limits."""
    write(tmp_path, "proc/cpuinfo", "processor : 0\nmodel name\t: Some CPU 9000\nflags\t\t: sse2 fma f16c avx2 zzz\n")
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {48 << 20} kB\n")
    cpu = min(os.sched_getaffinity(0))
    for index, (level, kind, size) in enumerate([(1, "Data", "32K"), (1, "Instruction", "64K"), (2, "Unified", "1M")]):
        folder = f"sys/devices/system/cpu/cpu{cpu}/cache/index{index}"
        write(tmp_path, f"{folder}/level", str(level))
        write(tmp_path, f"{folder}/type", kind)
        write(tmp_path, f"{folder}/size", size)
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_a_machine_without_limits_is_read_as_it_is(root):
    machine = read_machine(root)
    assert machine.model == "Some CPU 9000"
    assert machine.features == ("avx2", "fma", "f16c")
    assert machine.cores == len(os.sched_getaffinity(0))
    assert (machine.memory_total, machine.memory_available) == (64 * GIB, 48 * GIB)
    assert (machine.l1d_bytes, machine.l2_bytes, machine.l3_bytes) == (32 << 10, 1 << 20, 0)


def test_limits_of_a_version_2_group_and_of_its_parents_count(root):
    write(root, "proc/self/cgroup", "0::/pod/box\n")
    write(root, "sys/fs/cgroup/pod/cpu.max", "150000 100000\n")
    write(root, "sys/fs/cgroup/pod/memory.max", f"{8 * GIB}\n")
    write(root, "sys/fs/cgroup/pod/memory.current", f"{5 * GIB}\n")
    write(root, "sys/fs/cgroup/pod/memory.stat", f"anon 1\ninactive_file {2 * GIB}\n")
    write(root, "sys/fs/cgroup/pod/box/cpu.max", "max 100000\n")
    write(root, "sys/fs/cgroup/pod/box/memory.max", "max\n")
    machine = read_machine(root)
    assert machine.cores == machine.physical_cores == 1
    assert (machine.memory_total, machine.memory_available) == (8 * GIB, 5 * GIB)


def test_limits_of_version_1_count_also_when_the_path_is_the_hosts(root):
    write(root, "proc/self/cgroup", "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n")
    write(root, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "100000\n")
    write(root, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{4 * GIB}\n")
    write(root, "sys/fs/cgroup/memory/memory.usage_in_bytes", f"{1 * GIB}\n")
    machine = read_machine(root)
    assert machine.cores == 1
    assert (machine.memory_total, machine.memory_available) == (4 * GIB, 3 * GIB)


def test_unlimited_version_1_groups_change_nothing(root):
    write(root, "proc/self/cgroup", "5:memory:/\n4:cpu,cpuacct:/\n")
    write(root, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    write(root, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    write(root, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert read_machine(root).memory_total == 64 * GIB


def test_threads_never_exceed_the_affinity_mask():
    assert 1 <= default_threads() <= len(os.sched_getaffinity(0))


def test_memory_that_was_freed_between_what_stays_goes_back_to_the_system():
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        give_back_freed_memory()  # does nothing
        return
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    pieces = [libc.malloc(100_000) for _ in range(300)]
    for piece in pieces:
        ctypes.memset(piece, 1, 100_000)
    for piece in pieces[:-1]:
        libc.free(piece)
    held = resident()
    give_back_freed_memory()
    assert held - resident() > 20 << 20
    libc.free(pieces[-1])
