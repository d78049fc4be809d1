"""`llmctl models`: fetch models, and look after the packed weights that are kept of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ...engine.config import environment
from ...kernels.errors import UsageError
from ..console import Console
from ..exits import ExitCode
from ..options import Dtype, Json
from ..sigterm import sigterm_like_ctrl_c

if TYPE_CHECKING:
    from ...engine.load.packed import Entry

models = typer.Typer(help="Fetch models, and look after the packed weights that are kept of them.")

SHOWN_KEY = 12  # characters of a key that tables show; any unambiguous beginning is understood


@models.command("list")
def list_models(context: typer.Context, json: Json = False) -> None:
    """Show the packed models on this machine."""
    from ...engine.load.packed import list_entries
    from ...engine.sizes import format_bytes

    console: Console = context.obj
    entries = list_entries(environment().cache)
    if json:
        console.json([as_json(entry) for entry in entries])
        return
    if not entries:
        console.say("no packed models yet; `llmctl models pull` makes one")
        return
    rows = [
        [
            entry.key[:SHOWN_KEY],
            entry.name,
            entry.dtype,
            contents(entry),
            format_bytes(entry.bytes),
            entry.source,
            entry.problem or "-",
        ]
        for entry in entries
    ]
    console.table(["entry", "model", "dtype", "formats", ">size", "source", "problem"], rows)


@models.command()
def pull(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="A Hugging Face id, a folder or a GGUF file.")] = "",
    dtype: Dtype = "auto",
) -> None:
    """Fetch a model and pack its weights, so that the next start is instant. Prints where its files are.

    Without a name it is LLMCTL_MODEL or the default model.
    """
    from ...engine.load.hub import resolve
    from ...engine.load.model import open_model

    console: Console = context.obj
    settings = environment()
    with sigterm_like_ctrl_c(console), console.progress() as progress:
        source = resolve(name, environment=settings, progress=progress)
        open_model(source, implementation="auto", dtype=dtype, cache=settings.cache, progress=progress)
    console.data(str(source.path))


@models.command()
def verify(
    context: typer.Context,
    entry: Annotated[str, typer.Argument(metavar="[ENTRY]", help="An entry of `list`, or a model's name.")] = "",
    json: Json = False,
) -> None:
    """Read packed models in full and compare them with the hash made when they were built.

    All of them, or those that are named. The exit code is 1 if one is damaged.
    """
    from ...engine.load import packed

    console: Console = context.obj
    checked = [(found, packed.verify(found)) for found in select(packed.list_entries(environment().cache), entry)]
    if json:
        console.json([as_json(found) | {"intact": intact} for found, intact in checked])
    else:
        rows = [[f.key[:SHOWN_KEY], f.name, "intact" if intact else f.problem or "damaged"] for f, intact in checked]
        console.table(["entry", "model", "state"], rows)
    if not all(intact for _, intact in checked):
        console.error("a packed model is damaged", "it is rebuilt at the next start after `llmctl models prune --all`")
        raise typer.Exit(ExitCode.FAILURE)


@models.command()
def prune(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Also those that could still be used.")] = False,
    json: Json = False,
) -> None:
    """Remove packed models that are broken, or whose source has changed or gone.

    Downloads are left alone. Whatever is needed again is packed again.
    """
    from ...engine.load import packed
    from ...engine.sizes import format_bytes

    console: Console = context.obj
    cache = environment().cache
    keep = () if everything else [entry.key for entry in packed.list_entries(cache) if is_current(entry)]
    removed = packed.prune(cache, keep)
    if json:
        console.json([as_json(entry) for entry in removed])
        return
    for entry in removed:
        console.data(f"{entry.key[:SHOWN_KEY]} {entry.name}".rstrip())
    console.say(f"removed {len(removed)}, {format_bytes(sum(entry.bytes for entry in removed))}")


def contents(entry: Entry) -> str:
    """The formats of the entry's weights and what they do not keep of the model, or who reads it elsewhere."""
    if entry.implementation != "llmctl":
        return f"text only, for {entry.implementation}"
    return "; ".join((", ".join(entry.formats), *entry.roundings))


def select(entries: tuple[Entry, ...], wanted: str) -> tuple[Entry, ...]:
    """The entries with this name, or the one whose key begins like this; "" means all."""
    found = tuple(entry for entry in entries if wanted in ("", entry.name) or entry.key.startswith(wanted))
    if wanted and not found:
        raise UsageError(f"there is no packed model `{wanted}`", "`llmctl models list` shows them")
    return found


def is_current(entry: Entry) -> bool:
    """Whether a start with this entry's source and dtype would use it."""
    from pathlib import Path

    from ...engine.load.hub import Source
    from ...engine.load.packed import entry_key
    from ...kernels.errors import CheckpointError

    path = Path(entry.source)
    if entry.problem or not path.exists():
        return False
    try:
        source = Source(path, "hf" if path.is_dir() else "gguf", entry.name)
        return entry_key(source, entry.dtype, entry.implementation) == entry.key
    except CheckpointError:
        return False


def as_json(entry: Entry) -> dict[str, object]:
    """An entry as plain values."""
    return {
        "entry": entry.key,
        "model": entry.name,
        "dtype": entry.dtype,
        "formats": list(entry.formats),
        "roundings": list(entry.roundings),
        "implementation": entry.implementation,
        "bytes": entry.bytes,
        "source": entry.source,
        "folder": str(entry.folder),
        "problem": entry.problem,
    }
