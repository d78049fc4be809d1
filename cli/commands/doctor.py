"""`llmctl doctor`: what this machine is, which kernels would run on it and why, and what is wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from ...engine.config import environment
from ..console import Console
from ..exits import ExitCode
from ..options import Json

if TYPE_CHECKING:
    from ..diagnosis import Diagnosis
    from ..kernel_choice import Choice


def doctor(context: typer.Context, json: Json = False) -> None:
    """Explain this machine: its CPU, the kernels that would be bound and why, packages, caches.

    The exit code is 1 if something is wrong.
    """
    from ..diagnosis import diagnose

    console: Console = context.obj
    diagnosis = diagnose(environment())
    if json:
        console.json(as_json(diagnosis))
    else:
        show(console, diagnosis)
    if diagnosis.problems:
        raise typer.Exit(ExitCode.FAILURE)


def as_json(diagnosis: Diagnosis) -> dict[str, object]:
    """The diagnosis as plain values; sizes in bytes."""
    import msgspec

    plain: dict[str, object] = msgspec.to_builtins(diagnosis, enc_hook=str)
    return plain


def show(console: Console, diagnosis: Diagnosis) -> None:
    """Print the diagnosis: tables on stdout, each problem as an error on stderr."""
    from ...engine.sizes import format_bytes

    machine = diagnosis.machine
    caches = ", ".join(
        f"{name} {format_bytes(size)}"
        for name, size in (("L1d", machine.l1d_bytes), ("L2", machine.l2_bytes), ("L3", machine.l3_bytes))
        if size
    )
    console.table(
        [f"llmctl {diagnosis.version}", ""],
        [
            ["CPU", machine.model],
            ["instruction sets", " ".join(machine.features) or "none that matters here"],
            ["cores", f"{machine.physical_cores} physical, {machine.cores} logical; {diagnosis.threads} threads"],
            ["caches", caches or "unknown"],
            [
                "memory",
                f"{format_bytes(machine.memory_available)} available of {format_bytes(machine.memory_total)}",
            ],
            ["large pages", diagnosis.large_pages],
            ["kernels", diagnosis.isa],
            *gpu_rows(diagnosis),
            ["own decoder", ", ".join(diagnosis.families)],
            ["GGUF types", ", ".join(diagnosis.gguf_types)],
            *(["", line] for line in diagnosis.gguf_roundings),
            ["other decoders", other_decoders(diagnosis)],
            ["default model", diagnosis.default_model or "not fetched yet (`llmctl models pull`)"],
            *([folder.purpose, f"{format_bytes(folder.bytes)} in {folder.path}"] for folder in diagnosis.caches),
        ],
    )
    console.table(["op", "for", "runs on", "refused"], kernel_rows(diagnosis.kernels))
    console.table(
        ["package", "version"], [[name, version or "not installed"] for name, version in diagnosis.packages.items()]
    )
    for problem in diagnosis.problems:
        console.error(problem)


def gpu_rows(diagnosis: Diagnosis) -> list[list[str]]:
    """A row for each GPU, or why there is none."""
    from ...engine.sizes import format_bytes

    if not diagnosis.gpus:
        return [["GPU", f"none: {diagnosis.no_gpu}"]]
    return [
        [
            gpu.device,
            f"{gpu.name}, compute capability {gpu.capability}, {gpu.processors} SMs, {format_bytes(gpu.memory_total)}"
            + (f"; not used: {gpu.problem}" if gpu.problem else ""),
        ]
        for gpu in diagnosis.gpus
    ]


def other_decoders(diagnosis: Diagnosis) -> str:
    """What happens to a model that our own decoder does not know."""
    version = diagnosis.packages["transformers"]
    if not version:
        return "none: transformers is not installed"
    return f"the modules of transformers {version} on our cache and kernels; the same bits only if a trial passes"


def kernel_rows(kernels: tuple[Choice, ...]) -> list[list[str]]:
    """A row for each op and outcome; the formats that share one are in one row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for choice in kernels:
        rows.setdefault((choice.op, choice.isa, "; ".join(choice.refused) or "-"), []).append(choice.case)
    return [[op, ", ".join(cases), isa, refused] for (op, isa, refused), cases in rows.items()]
