"""The commands by name, each imported when it is asked for.

A command brings the imports and the options of its part of the program. All of them together take longer than a warm
start of the engine, so a command line pays for the one that it names; only `--help` needs them all.
"""

from __future__ import annotations

import importlib

import typer
import typer.core

from .expand import expand
from .plain_values import PlainCommand, plain, read_plainly

_MODULES = {  # in the order of `--help`
    "chat": "chat",
    "quantize": "quantize",
    "bench": "bench",
    "bench kernels": "bench_kernels",
    "bench compare": "bench_compare",
    "bench cache-sim": "bench_cache_sim",
    "bench scheduler": "bench_scheduler",
    "bench soak": "bench_soak",
    "serve": "serve",
    "plan": "plan",
    "doctor": "doctor",
    "models": "models",
    "kernels": "kernels",
}


class CommandTable(typer.core.TyperGroup):
    """Finds commands in `commands/`. Knows some of two words: `bench kernels`, beside `bench`, which takes a model."""

    def get_help_option(self, context):  # type: ignore[no-untyped-def]
        return plain(super().get_help_option(context), None)

    def list_commands(self, context):  # type: ignore[no-untyped-def]
        return list(_MODULES)

    def get_command(self, context, name):  # type: ignore[no-untyped-def]
        return _load(name) if name in _MODULES else None

    def resolve_command(self, context, arguments):  # type: ignore[no-untyped-def]
        pair = " ".join(arguments[:2])
        if len(arguments) > 1 and pair in _MODULES:
            arguments = [pair, *arguments[2:]]
        return super().resolve_command(context, arguments)


def _load(name: str) -> typer.core.TyperCommand | typer.core.TyperGroup:
    module = _MODULES[name]
    made = getattr(importlib.import_module(f".commands.{module}", __package__), module)
    if isinstance(made, typer.Typer):
        group = typer.main.get_command(made)
        assert isinstance(group, typer.core.TyperGroup), type(group)
        group.name = name
        return group
    function = expand(made)
    alone = typer.Typer(rich_markup_mode=None, add_completion=False)
    alone.command(name, cls=PlainCommand)(function)
    command = typer.main.get_command(alone)
    assert isinstance(command, typer.core.TyperCommand), type(command)
    read_plainly(command, function)
    return command
