"""Numbers out of a `config.json`, checked: a value that makes no sense is a CheckpointError that names its key.

Who opened the file adds its name (`engine/load/origin.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from ...kernels.errors import CheckpointError

Config = Mapping[str, object]

MAX_INT = (1 << 31) - 1
MAX_FLOAT = 3.4e38  # what float32 holds, which is what the kernels compute with


def int_field(config: Config, key: str, default: int | None = None, low: int = 1, high: int = MAX_INT) -> int:
    """The integer under `key`; a missing one and `null` mean `default`, if there is one."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"the config has no `{key}`")
    if type(value) is not int or not low <= value <= high:
        raise CheckpointError(f"`{key}` in the config is {shown(value)}, expected an integer from {low} to {high}")
    return value


def float_field(config: Config, key: str, default: float | None = None) -> float:
    """The positive number under `key`; a missing one and `null` mean `default`, if there is one."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"the config has no `{key}`")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_FLOAT:
        raise CheckpointError(
            f"`{key}` in the config is {shown(value)}, expected a number above 0 and at most {MAX_FLOAT:g}"
        )
    return float(value)


def flag_field(config: Config, key: str, default: bool) -> bool:
    """The truth value under `key`; a missing one and `null` mean `default`."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"`{key}` in the config is {shown(value)}, expected true or false")
    return value


def shown(value: object) -> str:
    """The value as a message shows it, cut where it would fill the screen."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
