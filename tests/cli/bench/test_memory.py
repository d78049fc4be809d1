"""PSS of process trees, read from /proc."""

import os

from llmctl.cli.bench.memory import PeakMemory, tree_pss


def make_proc(root, tree):
    """{pid: (kB, children)} as /proc shows it."""
    for pid, (kilobytes, children) in tree.items():
        task = root / str(pid) / "task" / str(pid)
        task.mkdir(parents=True)
        (task / "children").write_text("".join(f"{child} " for child in children))
        (root / str(pid) / "smaps_rollup").write_text(
            f"0-f ---p 0 00:00 0 [rollup]\nRss:  {9 * kilobytes} kB\nPss:  {kilobytes} kB\nPss_Anon: 1 kB\n"
        )
    return root


def test_tree_is_added_up_without_the_trees_of_others(tmp_path):
    proc = make_proc(tmp_path, {1: (10, [2, 3]), 2: (20, [4]), 3: (40, []), 4: (80, []), 9: (500, [])})
    assert tree_pss([1], proc=proc) == 150 << 10
    assert tree_pss([1], [2], proc=proc) == 50 << 10
    assert tree_pss([1, 4], proc=proc) == 150 << 10, "nobody is counted twice"


def test_processes_that_are_gone_are_passed_over(tmp_path):
    proc = make_proc(tmp_path, {1: (10, [2])})
    assert tree_pss([1], proc=proc) == 10 << 10
    assert tree_pss([7], proc=proc) is None and tree_pss([], proc=proc) is None


def test_peak_of_this_process_is_seen_and_nobody_has_none():
    memory = PeakMemory([os.getpid()])
    peak = memory.stop()
    assert peak is not None and peak > 1 << 20
    assert PeakMemory([]).stop() is None
