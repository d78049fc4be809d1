"""Groups of options as one parameter.

Every command that runs the engine has the same fifteen options. Typer wants each of them in the command's own
signature; written out in each command they would drift apart. Here a command says
`config: Annotated[EngineConfig, Built(engine_config)]`, and `expand` puts the parameters of `engine_config` in its
place. Two builders may share an option (`--seed`): it must then be declared the same way in both.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, TypeVar, get_args, get_origin

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Built:
    """Marks a parameter whose value `builder` makes from options of its own."""

    builder: Callable[..., object]


def expand(command: Callable[..., Result]) -> Callable[..., Result]:
    """`command` as a function that has its builders' options, behind its own, instead of what they build.

    A builder may be expanded too: that is how options of one command become part of another's.
    """
    parameters: dict[str, inspect.Parameter] = {}
    builders: dict[str, Callable[..., object]] = {}
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        builder = _builder_of(parameter)
        if builder is None:
            _add(parameters, parameter)
        else:
            builders[name] = builder
    own = tuple(parameters)
    taken: dict[str, tuple[str, ...]] = {}
    for name, builder in builders.items():
        options = inspect.signature(builder, eval_str=True).parameters
        taken[name] = tuple(options)
        for option in options.values():
            _add(parameters, option)

    @functools.wraps(command)
    def run(**given: object) -> Result:
        arguments = {name: given[name] for name in own}
        for name, builder in builders.items():
            arguments[name] = builder(**{option: given[option] for option in taken[name]})
        return command(**arguments)

    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return run


def _builder_of(parameter: inspect.Parameter) -> Callable[..., object] | None:
    if get_origin(parameter.annotation) is Annotated:
        for mark in get_args(parameter.annotation)[1:]:
            if isinstance(mark, Built):
                return mark.builder
    return None


def _add(parameters: dict[str, inspect.Parameter], parameter: inspect.Parameter) -> None:
    known = parameters.get(parameter.name)
    assert known is None or known.annotation == parameter.annotation, f"two meanings of option {parameter.name}"
    parameters[parameter.name] = parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
