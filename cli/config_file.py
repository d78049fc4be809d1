"""`--config FILE`: a command's options from YAML, where the command line wins.

Keys are the options' names, with dashes or underscores, at the top or in one of the sections that configuration files
of this kind have. They become the command's defaults, so a value is read exactly as if it had been typed. The model is
handed to the command instead: on the line it has two names, and either must win.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from ..kernels.errors import UsageError
from .foreign import why_not

SECTIONS = ("engine", "scheduler", "cache", "server")
_OBJECTS = ("speculative-config", "rope-scaling", "hf-overrides")  # their values are JSON objects; YAML may spell them
_PAIRS = ("tenant-weights", "max-queue-per-tenant")  # theirs are names with values, which YAML may spell out too
_OTHER_NAMES = {"policy": "scheduling-policy", "max-context-len": "max-model-len"}
_NOT_FROM_FILE = ("config", "help", "model", "print-command")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file that was read: its options by key, dotted where they are in a section, and the model it names."""

    path: Path
    options: Mapping[str, object]
    model: str


def read_config(text: str) -> ConfigFile:
    """The configuration in the file of this name. UsageError if it cannot be read."""
    import yaml

    path = Path(text)
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read `{path}`: {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"`{path}` is not YAML: {error}") from error
    if isinstance(content, list):
        raise UsageError(f"`{path}` is a list", "write `name: value` lines, without dashes in front")
    if not isinstance(content, dict):
        raise UsageError(f"`{path}` holds no options", "write one `name: value` a line")
    options = dict(_flat(path, content))
    model = options.pop("model", "")
    if not isinstance(model, str):
        raise UsageError(f"`model` in `{path}` is {model!r}, it must be a name")
    return ConfigFile(path, options, model)


def choose_named(given: str, file: ConfigFile | None) -> str:
    """The model that the command line names, else the one that the file does; "" if neither does."""
    return given or (file.model if file else "")


def _apply(context: typer.Context, value: ConfigFile | None) -> ConfigFile | None:
    """Make the file's options the defaults of the command that is being parsed."""
    if value is not None:
        known = _options(context)
        defaults = context.default_map = {}
        for key, given in value.options.items():
            option = known.get(_canonical(key))
            if option is None:
                raise _unknown(value.path, key, list(known))
            defaults[option.name] = _checked(value.path, key, given, option)
    return value


Config = Annotated[
    ConfigFile | None,
    typer.Option(
        "--config",
        metavar="FILE",
        parser=read_config,
        callback=_apply,
        is_eager=True,
        help="Options from a YAML file; those on the command line win.",
    ),
]


def _flat(path: Path, content: Mapping[object, object]) -> Iterator[tuple[str, object]]:
    for key, value in content.items():
        if not isinstance(value, dict) or _canonical(str(key)) in (*_OBJECTS, *_PAIRS):
            yield str(key), _one_text(str(key), value)
        elif key not in SECTIONS:
            raise UsageError(f"`{path}` has a section `{key}`", f"sections are: {', '.join(SECTIONS)}")
        else:
            yield from ((f"{key}.{name}", _one_text(str(name), inner)) for name, inner in value.items())


def _one_text(key: str, value: object) -> object:
    """A mapping that the option of this key takes, as it is written on the command line; anything else as it is."""
    if isinstance(value, dict) and _canonical(key) in _OBJECTS:
        return json.dumps(value, default=str)
    if isinstance(value, dict) and _canonical(key) in _PAIRS:
        return ",".join(f"{name}={weight}" for name, weight in value.items())
    return value


def _canonical(key: str) -> str:
    section, _, name = key.rpartition(".")
    name = (name if section in ("", *SECTIONS) else key).replace("_", "-")
    return _OTHER_NAMES.get(name, name)


def _options(context: typer.Context) -> dict[str, typer.core.TyperOption]:
    """The command's options by each of their long names, without dashes."""
    return {
        name.removeprefix("--"): option
        for option in context.command.params
        if isinstance(option, typer.core.TyperOption)
        for name in option.opts
        if name.startswith("--") and name.removeprefix("--") not in _NOT_FROM_FILE
    }


def _checked(path: Path, key: str, value: object, option: typer.core.TyperOption) -> Any:
    """The value if YAML gave one of the kind that the option takes."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise UsageError(f"`{key}` in `{path}` is {value!r}, it must be true or false")
        return value
    if option.multiple:
        values = value if isinstance(value, list) else [value]
        return [_checked_scalar(path, key, item) for item in values]
    return _checked_scalar(path, key, value)


def _checked_scalar(path: Path, key: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise UsageError(f"`{key}` in `{path}` is {value!r}, it must be a text or a number")
    return str(value)


def _unknown(path: Path, key: str, known: list[str]) -> UsageError:
    name = _canonical(key)
    if reason := why_not(name):
        return UsageError(f"`{key}` in `{path}` has no meaning here", reason)
    near = difflib.get_close_matches(name, [*known, *_OTHER_NAMES], n=1)
    hint = f"did you mean `{near[0].replace('-', '_')}`?" if near else "keys are the names of the command's options"
    return UsageError(f"`{path}` has an unknown key `{key}`", hint)
