"""Binding takes the best entry that accepts, and says why the others did not."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from llmctl.kernels import registry
from llmctl.kernels.cpu import register as cpu
from llmctl.kernels.entry import OPS, Entry
from llmctl.kernels.errors import NoKernel, UsageError
from llmctl.kernels.formats import KVFormat
from llmctl.kernels.ops import ActMulArgs, KVCopyArgs, make_act, make_batch, make_rows


def act_mul_args(activation: str = "silu") -> ActMulArgs:
    batch = make_batch(4, 4, 4, ())
    batch.counts[0] = 3
    gate, up = make_rows(20, 4), make_rows(20, 4)
    gate[:], up[:] = 0.5, 2.0
    return ActMulArgs(batch, gate, up, activation, make_act(20, 4, 1, ()))


@pytest.fixture
def registered(monkeypatch):
    """Entries added during a test are gone after it."""
    monkeypatch.setattr(registry, "_registered", [])
    monkeypatch.setattr(registry, "_warned", set())


@pytest.fixture
def no_extension(monkeypatch):
    """A build without the C++ extension."""
    monkeypatch.setitem(sys.modules, "llmctl.kernels.cpu.ops", None)
    monkeypatch.delattr("llmctl.kernels.cpu.ops", raising=False)  # what an earlier import left on the package
    cpu.entries.cache_clear()
    yield
    cpu.entries.cache_clear()


def fake_entry(priority: int, reason: str | None, built: object = ()) -> Entry:
    return Entry(
        "act_mul", "cpu", "fake", "generic", priority, lambda a: reason, lambda a: built, f"fake{priority}.hpp"
    )


def test_the_extension_is_built():
    from llmctl.kernels import _cpu

    assert _cpu.isa() in ("amx", "avx512", "avx2", "generic")


def test_every_op_has_an_entry_for_every_isa_and_a_reference():
    found = {(entry.op, entry.bits) for entry in registry.entries(include_reference=True)}
    classes = ("cpu-amx", "cpu-avx512", "cpu-avx2", "cpu-generic", "reference")
    assert {(op, bits) for op in OPS if op != "experts" for bits in classes} <= found
    assert ("experts", "reference") in found, "compiled kernels of experts are for GPUs"


def test_the_highest_priority_that_accepts_is_bound(registered):
    registry.register(fake_entry(99, "too new", "never"))
    registry.register(fake_entry(98, None, "this"))
    registry.register(fake_entry(97, None, "lower"))
    assert registry.bind("act_mul", act_mul_args()) == "this"


def test_no_kernel_lists_every_candidate_with_its_reason(registered):
    registry.register(fake_entry(99, "needs a unicorn"))
    with pytest.raises(NoKernel) as refused:
        registry.bind("act_mul", act_mul_args("sigmoid"))
    message = refused.value.message
    assert "fake99.hpp" in message and "needs a unicorn" in message
    assert "cpu-avx2" in message and "cpu-generic" in message and "reference" in message
    assert refused.value.hint


def test_without_the_extension_the_reference_answers_and_a_warning_says_why(no_extension, registered, caplog):
    args = act_mul_args()
    for op in registry.bind("act_mul", args):
        op.run()
    assert "reference" in caplog.text and "_cpu" in caplog.text
    assert np.allclose(args.act.values[:3], 1 / (1 + np.exp(-0.5)), atol=1e-6)
    registry.bind("act_mul", args)
    assert len(caplog.records) == 1


def test_asking_for_the_reference_is_not_worth_a_warning(caplog):
    registry.bind("act_mul", act_mul_args(), kernels="reference")
    assert not caplog.records


def test_generic_never_binds_another_instruction_set(no_extension, registered):
    registry.register(dataclasses.replace(fake_entry(99, None, "wide"), isa="avx9"))
    registry.register(fake_entry(5, None, "portable"))
    assert registry.bind("act_mul", act_mul_args(), kernels="generic") == "portable"


def test_an_unknown_kernels_choice_names_the_known_ones():
    with pytest.raises(UsageError) as refused:
        registry.bind("act_mul", act_mul_args(), kernels="fastest")
    assert "generic" in refused.value.hint


def test_a_cache_format_that_nobody_knows_is_refused():
    args = KVCopyArgs(np.zeros(64, np.uint8), 64, 1, 8, 1, 8, KVFormat("fp3"))
    with pytest.raises(NoKernel):
        registry.bind("kv_copy", args)


def test_a_program_of_mixed_ops_runs_them_in_order():
    ran = []

    class Step:
        def __init__(self, name):
            self.name = name

        def run(self):
            ran.append(self.name)

    registry.record([Step("a"), Step("b")], make_batch(1, 1, 1, ())).replay()
    assert ran == ["a", "b"]


def test_loading_the_registry_and_its_cpu_entries_leaves_torch_out():
    code = (
        "import sys\n"
        "from llmctl.kernels import registry\n"
        "registry.entries()\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
