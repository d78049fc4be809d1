"""Typed reads of a quantization config, which is JSON that some tool of some year wrote."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...kernels.errors import CheckpointError

Config = Mapping[str, object]


def read_int(config: Config, *names: str, default: int | None = None) -> int:
    """The integer under the first of these names that is there."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int:
            raise CheckpointError(f"`{name}` of the quantization config is {value!r}, expected an integer")
        return value
    if default is None:
        raise CheckpointError(f"the quantization config has no `{names[0]}`")
    return default


def read_bool(config: Config, name: str, default: bool) -> bool:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"`{name}` of the quantization config is {value!r}, expected true or false")
    return value


def read_text(config: Config, *names: str, default: str) -> str:
    """The string under the first of these names that is there, in lower case."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, str):
            raise CheckpointError(f"`{name}` of the quantization config is {value!r}, expected text")
        return value.lower()
    return default


def read_names(config: Config, name: str) -> tuple[str, ...]:
    """A list of strings, empty if it is missing or null."""
    value = config.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"`{name}` of the quantization config is {value!r}, expected a list of names")
    return tuple(value)


def read_object(config: Config, name: str) -> Config:
    """A JSON object, empty if it is missing or null."""
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"`{name}` of the quantization config is {value!r}, expected an object")
    return value


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A regular expression out of a config."""
    try:
        return re.compile(pattern)
    except (re.error, RecursionError) as error:
        raise CheckpointError(f"the quantization config has a broken pattern `{pattern}`: {error}") from error
