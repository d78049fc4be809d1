"""The roofline as a table: a line per kernel and shape, the weak ones marked."""

from __future__ import annotations

from collections import Counter

from ...console import Console
from .measure import WEAK_PERCENT, Point, Roofline

MARK = "<"


def show(console: Console, found: Roofline) -> None:
    """Print the peaks, every point, and how many are weak; what was skipped goes to stderr."""
    peaks = found.peaks
    rows = [[f"read from {level.name}", f"{level.gbps:.1f} GB/s"] for level in peaks.levels]
    rows += [
        [name, f"{gops:.0f} Gop/s"]
        for name, gops in (
            ("float32 multiply-add", peaks.fma_gops),
            ("int16 dot product", peaks.int16_gops),
            ("int8 dot product", peaks.int8_gops),
        )
    ]
    console.table(["peak", ">measured"], rows, f"{found.machine.model}, {found.threads} threads")
    columns = ["op", "model", "part", "format", ">rows", "isa", ">us", ">GB/s", ">Gop/s", "roof", ">of it", ""]
    console.table(columns, [_row(point) for point in found.points])
    weak = sum(point.weak for point in found.points)
    console.data(f"{len(found.points)} kernels and shapes, {weak} under {WEAK_PERCENT:g} % of their roof ({MARK})")
    for reason, count in Counter(one.reason for one in found.skipped).items():
        console.say(f"{count} not measured: {reason}")


def _row(point: Point) -> list[str]:
    return [
        point.op,
        point.size,
        point.part,
        point.format,
        str(point.rows),
        point.isa,
        f"{point.us:.1f}" if point.us < 1000 else f"{point.us:.0f}",
        f"{point.gbps:.1f}",
        f"{point.gops:.1f}" if point.gops else "",
        point.roof,
        f"{point.percent:.0f} %",
        MARK if point.weak else "tiny" if point.tiny else "",
    ]
