"""Numbers out of a `config.json`, checked: a value that makes no sense is a CheckpointError that names its key."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ...kernels.errors import CheckpointError

Config = Mapping[str, object]


def int_field(config: Config, key: str, default: int | None = None, low: int = 1, high: int = 1 << 31) -> int:
    """The integer under `key`; a missing one and `null` mean `default`, if there is one."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"the config has no `{key}`")
    if type(value) is not int or not low <= value <= high:
        raise CheckpointError(f"`{key}` in the config is {value!r}, expected an integer from {low} to {high}")
    return value


def float_field(config: Config, key: str, default: float | None = None) -> float:
    """The positive number under `key`; a missing one and `null` mean `default`, if there is one."""
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"the config has no `{key}`")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"`{key}` in the config is {value!r}, expected a positive number")
    return float(value)


def flag_field(config: Config, key: str, default: bool) -> bool:
    """The truth value under `key`; a missing one and `null` mean `default`."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"`{key}` in the config is {value!r}, expected true or false")
    return value
