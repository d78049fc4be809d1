"""CPU time of process trees and of chosen CPUs, out of a made-up /proc."""

import os

import pytest

from llmctl.cli.bench.compare.run import used
from llmctl.cli.bench.compare.usage import Usage, cpus_busy_s, read_usage, tree_cpu_s

TICKS = os.sysconf("SC_CLK_TCK")


def make_process(proc, pid, ticks, children=(), name="a (b) c"):
    task = proc / str(pid) / "task" / str(pid)
    task.mkdir(parents=True)
    (task / "children").write_text(" ".join(map(str, children)))
    (proc / str(pid) / "stat").write_text(f"{pid} ({name}) S " + "0 " * 10 + f"{ticks} {2 * ticks} 0 0\n")


def test_a_tree_counts_its_children_and_passes_over_what_is_gone(tmp_path):
    make_process(tmp_path, 1, TICKS, [2, 9])
    make_process(tmp_path, 2, 2 * TICKS)
    assert tree_cpu_s([1], tmp_path) == pytest.approx(9.0)
    assert tree_cpu_s([1, 2], tmp_path) == pytest.approx(9.0), "nobody is counted twice"
    assert tree_cpu_s([8], tmp_path) == 0


def test_busy_time_is_that_of_the_cpus_in_use_without_idle_and_waiting(tmp_path):
    lines = ["cpu 9 9 9 9 9 9 9 9 9 9", f"cpu0 {TICKS} 0 {TICKS} 500 500 0 0 {TICKS} 0 0", "cpu1 7 7 7 7 7 7 7 7 7 7"]
    (tmp_path / "stat").write_text("\n".join(lines) + "\nintr 5\n")
    assert cpus_busy_s({0}, tmp_path) == pytest.approx(3.0)


def test_who_used_the_cpus_is_told_apart():
    before = Usage(100.0, (1.0, 5.0), 10.0, 50.0)
    after = Usage(110.0, (13.0, 5.5), 12.0, 68.0)
    found = used(before, after, (1,))
    assert (found.elapsed_s, found.server_s, found.client_s, found.idle_s) == (10.0, 12.0, 2.0, 0.5)
    assert found.foreign_s == pytest.approx(18 - 12 - 2 - 0.5)
    assert used(before, after, ()).server_s is None


def test_this_process_has_used_some():
    usage = read_usage([(os.getpid(),)], os.sched_getaffinity(0))
    assert usage.trees_s[0] > 0 and usage.busy_s > 0 and usage.own_s > 0
