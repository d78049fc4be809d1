"""Defects planted in the text of a kernel, to see that the checker would find them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from llmctl.kernels.cuda.emulate import Emulation, build
from llmctl.kernels.cuda.source import FOLDER, Kernel


@dataclass(frozen=True)
class Defect:
    """A mistake in a header: what it replaces (once), with what, and what has to be said of it."""

    name: str
    header: str
    old: str
    new: str
    expected: str


def build_with(defect: Defect, kernels: Sequence[Kernel], folder: Path) -> tuple[Emulation, dict[Kernel, Kernel]]:
    """The kernels with the defect, in the checked build; and what each of them is called there."""
    assert (FOLDER / defect.header).read_text().count(defect.old) == 1, defect.name
    for path in FOLDER.glob("*.cuh"):
        text = path.read_text()
        (folder / path.name).write_text(text.replace(defect.old, defect.new) if path.name == defect.header else text)
    planted = {kernel: Kernel(str(folder / kernel.header), kernel.expression) for kernel in kernels}
    return build(list(planted.values()), "checked", folder), planted
