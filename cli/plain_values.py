"""Values of options read without Typer's validators.

Typer from 0.25 on validates each value with a model of pydantic's, whose import and making take a tenth of a second at
every start. Nearly all options of the commands are text, a number, a switch, or read by a function of ours: these need
no model. What is something else, a path or a number with bounds, is left to Typer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, get_args, get_origin

import typer
import typer.core
from typer.models import ParameterInfo

_Read = Callable[[Any], object]


class PlainCommand(typer.core.TyperCommand):
    """A command whose options are read plainly where `read_plainly` found out how."""

    def get_help_option(self, context):  # type: ignore[no-untyped-def]
        return plain(super().get_help_option(context), None)


def read_plainly(command: typer.core.TyperCommand, function: Callable[..., None]) -> None:
    """Give the options of `command`, which was made of `function`, the plain way to their values where there is one."""
    declared = inspect.signature(function, eval_str=True).parameters
    for option in command.params:
        if option.name in declared:
            plain(option, _reader(declared[option.name].annotation))


def plain(option, read: _Read | None):  # type: ignore[no-untyped-def]
    """The option, its value made by `read` from now on; without one it is left to Typer if there is a value at all."""
    if option is not None:
        typers = partial(type(option).process_value, option)
        option.process_value = partial(_value, option, read, typers)
    return option


def _reader(annotation: object) -> _Read | None:
    """What makes a value of what was typed, None if Typer has to."""
    if get_origin(annotation) is not Annotated:
        return None
    kind, *marks = get_args(annotation)
    for mark in marks:
        if isinstance(mark, ParameterInfo):
            if mark.parser is not None:
                parser: _Read = mark.parser
                return parser
            if mark.min is not None or mark.max is not None:
                return None
    return _READERS.get(kind)


def _texts(values: Iterable[str]) -> list[str]:
    return list(values)


def _whole(value: str | int) -> int:
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"`{value}` is not a valid integer") from None


def _number(value: str | float) -> float:
    try:
        return float(value)
    except ValueError:
        raise ValueError(f"`{value}` is not a valid number") from None


_READERS: dict[object, _Read] = {
    **dict.fromkeys((str, str | None), str),
    **dict.fromkeys((int, int | None), _whole),
    **dict.fromkeys((float, float | None), _number),
    **dict.fromkeys((list[str], list[str] | None), _texts),
}


def _value(option, read: _Read | None, typers, context: typer.Context, value):  # type: ignore[no-untyped-def]
    """As `process_value` of Click; `typers` is what Typer would have done."""
    several = option.multiple or option.nargs == -1
    if value is None or (several and not value):
        if option.required:
            return typers(context, value)
        made: object = () if several else None
    elif read is None or (several and read is not _texts):
        return typers(context, value)
    else:
        try:
            made = read(value)
        except ValueError as error:
            raise typer.BadParameter(str(error), ctx=context, param=option) from error
    return made if option.callback is None else option.callback(context, option, made)
