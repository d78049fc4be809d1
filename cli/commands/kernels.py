"""`llmctl kernels`: compile the kernels of a GPU before they are needed, also where there is none."""

from __future__ import annotations

from dataclasses import asdict, astuple
from typing import TYPE_CHECKING, Annotated

import typer

from ...engine.config import environment
from ...kernels.errors import LlmctlError, UsageError
from ..console import Console
from ..options import Json
from ..sigterm import sigterm_like_ctrl_c

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ...kernels.cuda.compile_many import Outcome
    from ...kernels.cuda.table import ModelNeeds
    from ...kernels.formats import WeightFormat
    from ...quant.formats.stored import StoredTensor

kernels = typer.Typer(rich_markup_mode=None)  # which would take `[cuda]` for a style


ACTIVATIONS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
KV_FORMATS = {"auto": "", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2", "int8": "int8"}


@kernels.callback()
def group() -> None:
    """Compile the kernels of a GPU before they are needed."""


@kernels.command()
def build(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="Whose kernels; without it LLMCTL_MODEL or the default model.")
    ] = "",
    all: Annotated[bool, typer.Option("--all", help="Every registered kernel, not one model's.")] = False,
    arch: Annotated[
        str,
        typer.Option(
            help="Which GPUs: sm_75 (float16), sm_80, sm_86, sm_89, sm_90a (H200), sm_100a, sm_120, several, or all."
        ),
    ] = "sm_90a",
    dtype: Annotated[
        str | None, typer.Option(help="A model's activations: bfloat16 (the default), float16 or float32.")
    ] = None,
    kv_cache_dtype: Annotated[
        str | None,
        typer.Option(
            help="A model's KV cache: auto (the default, as the activations), fp8 (the same as fp8_e4m3), fp8_e5m2 or "
            "int8."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", help="Processes that compile; 0: one per core.")] = 0,
    json: Json = False,
) -> None:
    """Compile into the cache what a model runs on a GPU, so that its first start need not.

    Neither a GPU nor a driver is needed, only the compiler of `pip install 'llmctl-toolchain[cuda]'`. What was compiled
    before is kept, so an interrupted build goes on where it was.
    """
    from ...kernels.cuda import nvrtc
    from ...kernels.cuda.compile_many import Job, compile_many, families
    from ...kernels.cuda.table import all_kernels, model_kernels
    from ...kernels.device import default_threads

    console: Console = context.obj
    archs = _architectures(arch)
    for name, value in (("the model", model), ("--dtype", dtype), ("--kv-cache-dtype", kv_cache_dtype)):
        if all and value:
            raise UsageError(f"--all and {name} `{value}` are both given", "leave one of them out")
    if not 0 <= jobs <= 1024:
        raise UsageError(f"--jobs is {jobs}, it must be from 0 to 1024")
    nvrtc.version()  # before anything starts: whether there is a compiler
    folder = environment().cache / "cubins"
    needs = None if all else _needs(model, dtype or "bfloat16", kv_cache_dtype or "auto", archs)
    wanted = [
        Job(one, item.kernel)
        for one in archs
        for item in (all_kernels(one) if needs is None else model_kernels(one, needs))
    ]
    outcomes: list[Outcome] = []
    with sigterm_like_ctrl_c(console), console.progress() as progress:
        for outcome in compile_many(wanted, folder, jobs or default_threads()):
            outcomes.append(outcome)
            progress(f"compiling for {', '.join(archs)}", len(outcomes), len(wanted))
    compiled = sum(outcome.compiled for outcome in outcomes)
    failed = {_called(outcome): outcome.error for outcome in outcomes if outcome.error}
    spilling = [_called(outcome) for outcome in outcomes if outcome.spills]
    found = families(outcomes)
    if json:
        figures = {"archs": archs, "kernels": len(wanted), "compiled": compiled, "spilling": spilling}
        console.json({**figures, "failed": failed, "folder": str(folder), "families": [asdict(one) for one in found]})
    else:
        console.data(f"{len(wanted)} kernels for {', '.join(archs)} in {folder}, {compiled} of them compiled now")
        if all:
            rows = [[str(word) for word in astuple(one)] for one in sorted(found, key=lambda one: one.template)]
            console.table(("template", "arch", ">kernels", ">registers", ">spills", ">local"), rows)
        for name in spilling:
            console.say(f"{name} spills registers to memory")
    if failed:
        name, error = next(iter(failed.items()))
        raise LlmctlError(f"{len(failed)} of {len(wanted)} kernels do not compile, the first is {name}: {error}")


def _architectures(text: str) -> tuple[str, ...]:
    """Those that `--arch` names."""
    from ...kernels.cuda.jit import ARCHITECTURES

    named = ARCHITECTURES if text == "all" else tuple(dict.fromkeys(text.split(",")))
    for arch in named:
        if arch not in ARCHITECTURES:
            raise UsageError(f"--arch is `{arch}`", f"choose one of: {', '.join(ARCHITECTURES)}, several, or all")
    return named


def _called(outcome: Outcome) -> str:
    return f"{outcome.job.kernel.expression} for {outcome.job.arch}"


def _needs(model: str, dtype: str, kv_cache_dtype: str, archs: Sequence[str]) -> ModelNeeds:
    """What decides which kernels the model runs, from its headers alone; UnsupportedModel if it would run nowhere."""
    from ...engine.gpu_support import check_on_gpu
    from ...engine.load.checkpoint import open_checkpoint
    from ...engine.load.hub import resolve
    from ...kernels.cuda.attend import compute_of
    from ...kernels.cuda.table import ModelNeeds

    if dtype not in ACTIVATIONS:
        raise UsageError(f"--dtype is `{dtype}`", f"choose one of: {', '.join(ACTIVATIONS)}")
    if kv_cache_dtype not in KV_FORMATS:
        raise UsageError(f"--kv-cache-dtype is `{kv_cache_dtype}`", f"choose one of: {', '.join(KV_FORMATS)}")
    source = resolve(model, environment=environment())
    checkpoint = open_checkpoint(source)
    spec, act = checkpoint.spec, ACTIVATIONS[dtype]
    for arch in archs:
        check_on_gpu(source.name, spec, arch)
    kv = KV_FORMATS[kv_cache_dtype] or act
    return ModelNeeds(
        act=act,
        compute=compute_of(act, kv),
        kv=kv,
        head_dim=spec.head_dim,
        hidden_size=spec.hidden_size,
        activation=spec.activation,
        weights=tuple(dict.fromkeys(_linears(checkpoint.tensors.values(), act))),
        experts=spec.experts is not None,
        latent=None if spec.latent is None else (spec.num_heads, spec.latent.kv_rank, spec.latent.rope_dim),
    )


def _linears(tensors: Iterable[StoredTensor], act: str) -> Iterator[WeightFormat]:
    """How the model's matrices are multiplied: floats in the type of the activations, codes as they are stored."""
    from ...kernels.cuda.linear import Linear, refusal
    from ...kernels.formats import WeightFormat

    for tensor in tensors:
        if tensor.format is None or len(tensor.shape) != 2:
            continue
        format = WeightFormat(act) if tensor.format.is_float else tensor.format
        if refusal(Linear(act, format, *tensor.shape)) is None:
            yield format
