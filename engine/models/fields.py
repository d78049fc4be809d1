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


def window_field(config: Config, default: int = 0) -> int:
    """Positions a query sees in a sliding layer, 0 for all; `null` means all, a missing key `default`."""
    if "sliding_window" in config and config["sliding_window"] is None:
        return 0
    return int_field(config, "sliding_window", default=default, low=0)


def eos_field(config: Config, vocab_size: int) -> tuple[int, ...]:
    """The ids under `eos_token_id`, one or a list; `vocab_size` is the embedding's, padding included.

    One beyond that can never be sampled: it belongs to another vocabulary, and so may all else in its file.
    """
    value = config.get("eos_token_id")
    items = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int and 0 <= item < vocab_size for item in items):
        raise CheckpointError(
            f"`eos_token_id` is {shown(value)}, expected a token id (from 0 to {vocab_size - 1}) or a list of them"
        )
    return tuple(dict.fromkeys(items))


def shown(value: object) -> str:
    """The value as a message shows it, cut where it would fill the screen."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
