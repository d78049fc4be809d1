"""Kernels against their roofs: every op is measured, the reckoning is right, and limits are kept and told."""

import itertools

import msgspec
import pytest

from llmctl.cli import app
from llmctl.cli.bench.roofline import measure as measuring
from llmctl.cli.bench.roofline.cases import Case, all_cases, filler
from llmctl.cli.bench.roofline.measure import Roofline, Wanted, measure, pick
from llmctl.cli.bench.roofline.peaks import Level, Peaks, measure_peaks
from llmctl.cli.exits import ExitCode
from llmctl.kernels import _cpu, registry
from llmctl.kernels.device import read_machine
from llmctl.kernels.errors import UsageError

COMPILED = {entry.op for entry in registry.entries()}  # the others have the reference only, and no speed to speak of
PEAKS = Peaks(
    threads=2,
    levels=(Level(name="L2", bytes=1000, gbps=100.0), Level(name="memory", bytes=0, gbps=10.0)),
    fma_gops=100.0,
    int16_gops=200.0,
    int8_gops=400.0,
)


def silent(*_):
    pass


def ticking(step):
    """A clock that moves on by `step` seconds whenever it is read."""
    times = itertools.count()
    return lambda: next(times) * step


def test_every_op_and_every_row_count_is_there_under_a_name_of_its_own():
    cases = list(all_cases())
    assert {case.op for case in cases} == COMPILED
    assert len({case.name for case in cases}) == len(cases)
    assert {case.rows for case in cases if case.op == "linear"} == {1, 4, 16, 64, 512}
    kinds = {case.format for case in cases if case.op == "linear"}
    assert {"int4g32", "int4g32min", "int4g128int", "int8g32", "f16", "bf16", "f32"} <= kinds
    assert {case.format[:4] for case in cases if case.op == "linear" and case.size == "8B"} == {"int4"}


def test_cases_move_and_compute_what_their_shapes_say():
    cases = {case.name: case for case in all_cases()}
    linear = cases["linear/0.1B/gate_proj/int4g32/m16"]
    assert linear.ops == 2 * 16 * 576 * 1536 and linear.unit == "int8"
    assert linear.cold_bytes == 576 * 1536 * 9 // 16, "4 bits and a 16-bit scale for 32"
    attend = cases["attend/0.1B/decode after 512/f16/m4"]
    assert attend.cold_bytes == 4 * 513 * 2 * 3 * 64 * 2 and attend.ops == 4 * 4 * 9 * 64 * 513
    prefill = cases["attend/0.1B/prefill after 512/f16/m64"]
    assert prefill.ops == 4 * 9 * 64 * sum(range(513, 577)) and prefill.cold_bytes == 576 * 2 * 3 * 64 * 2


def test_copies_fill_more_than_a_cache_and_what_is_in_a_cache_needs_none():
    case = Case("linear", "s", "p", "f", 1, 1000, 10, 1.0, "fma", lambda copies, threads: [])
    assert case.copies(64_000) == 64 and case.copies(64_001) == 65
    assert Case("norm", "s", "p", "f", 1, 0, 10, 0.0, "", lambda copies, threads: []).copies(64_000) == 16


def test_filler_is_finite_in_every_float_format():
    data = filler(4096)
    assert data.size == 4096 and data.min() >= 0x20 and data.max() < 0x40
    assert all((abs(data.view(kind)) < 4).all() for kind in ("<f2", "<f4"))


@pytest.mark.parametrize(
    ("cold", "warm", "ops", "unit", "seconds", "roof"),
    [
        (10_000_000_000, 0, 1e9, "fma", 1.0, "memory"),
        (1_000_000_000, 500, 100e9, "fma", 1.0, "fma"),
        (1_000_000_000, 0, 400e9, "int8", 1.0, "int8"),
        (0, 1000, 0.0, "", 1e-8, "L2"),
        (0, 10_000_000_000, 0.0, "", 1.0, "memory"),
    ],
)
def test_roof_is_the_nearer_bound(cold, warm, ops, unit, seconds, roof):
    case = Case("linear", "s", "p", "f", 1, cold, warm, ops, unit, lambda copies, threads: [])
    assert measuring._roof(case, PEAKS) == (pytest.approx(seconds), roof)


def test_only_known_names_are_picked():
    assert pick("0.1B, 8B", "--model-size", ["0.1B", "8B"]) == ("0.1B", "8B") and pick("", "x", []) == ()
    with pytest.raises(UsageError, match="--model-size has `7B`"):
        pick("7B", "--model-size", ["0.1B", "8B"])


def test_peaks_are_work_over_time():
    machine = read_machine()
    peaks = measure_peaks(machine, 1 << 20, ticking(0.01))
    assert peaks.levels[-1].name == "memory" and peaks.memory.bytes == 0 and peaks.level(1e12) is peaks.memory
    assert peaks.fma_gops > 0 and peaks.int8_gops >= peaks.int16_gops > 0


def test_probes_say_how_much_they_did():
    once, twice = (_cpu.probe("fma", rounds, 0, 0) for rounds in (1, 2))
    assert twice == 2 * once > 0
    data = filler(1 << 16)
    assert _cpu.probe("read", 3, data.ctypes.data, data.size) == pytest.approx(3 * data.size, rel=0.01)
    with pytest.raises(ValueError, match="unknown probe `guess`"):
        _cpu.probe("guess", 1, 0, 0)


@pytest.mark.parametrize("op", sorted(COMPILED))
def test_every_op_runs_and_its_time_is_per_op(op):
    wanted = Wanted(only=(f"{op}/",), sizes=("0.1B",), rows=(4,) if op != "kv_copy" else (1,), limit_s=1e6)
    cases = [case for case in all_cases() if wanted.takes(case)][:1]
    wanted = Wanted(only=(f"{cases[0].name}/",), limit_s=1e6, limit_bytes=128 << 20)
    found = measure(wanted, 2, silent, ticking(0.01))
    (point,) = found.points
    assert (point.op, point.size, point.runs) == (op, "0.1B", 6) and found.skipped == ()
    per_program = 1e4 / point.us
    assert per_program == pytest.approx(round(per_program)) and round(per_program) in range(1, 17)
    assert point.percent > 0
    assert point.weak is (point.percent < 70 and not point.tiny)


def test_what_has_no_time_memory_or_kernel_is_listed_with_its_reason():
    late = measure(Wanted(only=("norm/0.1B/",), limit_s=1.0), 1, silent, ticking(0.9))
    assert late.points == () and "no time was left of 1 s" in late.skipped[0].reason
    big = measure(Wanted(only=("lm_head/int4g32/m1/",), sizes=("8B",), limit_bytes=64 << 20), 1, silent, ticking(0.01))
    assert big.points == () and big.skipped[0].reason.endswith("of 64 MiB")
    other = measure(Wanted(only=("norm/0.1B/i8 form/m1/",), isa="z80"), 1, silent, ticking(0.01))
    assert "no kernel for instruction set `z80`" in other.skipped[0].reason
    with pytest.raises(UsageError, match="no kernel has such a name"):
        measure(Wanted(only=("nothing",)), 1, silent)


def test_command_prints_a_table_and_json(make_console):
    arguments = ["bench", "kernels", "--only", "norm/0.1B", "--rows", "1", "--memory-limit", "64M", "--threads", "1"]
    console = make_console()
    assert app.run(arguments, console) == ExitCode.OK
    text = console.stdout.getvalue()
    assert "float32 multiply-add" in text and "norm" in text and "of their roof" in text
    console = make_console()
    assert app.run([*arguments, "--isa", "generic", "--json"], console) == ExitCode.OK
    found = msgspec.json.decode(console.stdout.getvalue(), type=Roofline)
    assert [(point.op, point.isa) for point in found.points] == [("norm", "generic")]
    assert found.build == registry.build_id() and found.threads == 1


def test_an_option_that_is_repeated_asks_for_all_of_its_values(make_console, monkeypatch):
    wanted = []

    def stop(given, *_):
        wanted.append(given)
        raise UsageError("measured")

    monkeypatch.setattr(measuring, "measure", stop)
    arguments = ["--rows", "1", "--rows", "512", "--only", "linear,attend", "--only", "norm", "--model-size", "1.5B"]
    assert app.run(["bench", "kernels", *arguments], make_console()) == ExitCode.USAGE
    assert wanted == [Wanted(("linear", "attend", "norm"), ("1.5B",), (1, 512), "", 300.0, 1 << 30)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model-size", "7B"], "--model-size has `7B`"),
        (["--rows", "3"], "--rows has `3`"),
        (["--only", "warp"], "no kernel has such a name"),
        (["--memory-limit", "1M"], "--memory-limit 1048576 bytes"),
        (["--time-limit", "0"], "--time-limit is 0 s"),
    ],
)
def test_mistakes_on_the_command_line_are_named(console, arguments, message):
    assert app.run(["bench", "kernels", *arguments], console) == ExitCode.USAGE
    assert message in console.stderr.getvalue()
