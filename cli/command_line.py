"""A command line that does what this one does, wherever its options came from."""

from __future__ import annotations

import shlex
from collections.abc import Collection

import typer
import typer.core

from .config_file import ConfigFile


def command_line(context: typer.Context, model: str, left_out: Collection[str]) -> str:
    """The command with its model and every option that was given, on the line or in a file, quoted for a shell.

    `left_out` are names of parameters that do not belong on it, or that must not be shown.
    """
    words = [*context.command_path.split(), model]
    for option in context.command.params:
        name = option.name or ""
        source = context.get_parameter_source(name)
        value = context.params.get(name)
        if source is None or source.name == "DEFAULT" or name in ("model", "model_option", *left_out):
            continue
        assert isinstance(option, typer.core.TyperOption), name
        if not isinstance(value, ConfigFile):
            words += _words(option, value)
    return shlex.join(words)


def _words(option: typer.core.TyperOption, value: object) -> list[str]:
    flag = next(name for name in option.opts if name.startswith("--"))
    if isinstance(value, bool):
        return [flag] if value else [option.secondary_opts[0]]
    values = value if isinstance(value, (list, tuple)) else [value]
    return [word for item in values for word in (flag, str(item))]
