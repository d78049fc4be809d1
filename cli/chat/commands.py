"""What a line typed in chat means: a message, or one of the few commands that begin with a slash."""

from __future__ import annotations

import difflib
import enum
from dataclasses import dataclass

from ...kernels.errors import UsageError


class Action(enum.Enum):
    """What a command does; the value is what is typed after the slash."""

    HELP = "help"
    SYSTEM = "system"
    RESET = "reset"
    EXIT = "exit"


@dataclass(frozen=True, slots=True)
class Command:
    """A command and the text behind it."""

    action: Action
    argument: str


HELP: tuple[tuple[str, str], ...] = (
    ("/help", "show this"),
    ("/system TEXT", 'set the system prompt (alone: show it; "": remove it)'),
    ("/reset", "forget the conversation, keep the system prompt"),
    ("/exit", "leave; so does Ctrl-D"),
    ("Alt-Enter", "a new line in the message"),
    ("Ctrl-C", "stop the answer"),
)

_ALIASES = {"quit": "exit", "bye": "exit", "clear": "reset", "?": "help"}
_TAKES_ARGUMENT = (Action.SYSTEM,)


def parse(line: str) -> Command | None:
    """The command in `line`, or None if it is a message. A leading space makes any line a message.

    Raises UsageError for a command that does not exist, naming the nearest, or that has text it cannot use.
    """
    if not line.startswith("/"):
        return None
    word, _, argument = line[1:].partition(" ")
    name = _ALIASES.get(word, word)
    names = [action.value for action in Action]
    if name not in names:
        near = difflib.get_close_matches(word, [*names, *_ALIASES], n=1)
        suggestion = f"did you mean `/{near[0]}`?" if near else "`/help` lists the commands"
        raise UsageError(f"no command `/{word}`", f"{suggestion} A leading space sends the line as a message")
    action = Action(name)
    argument = argument.strip()
    if argument and action not in _TAKES_ARGUMENT:
        raise UsageError(f"`/{name}` takes no text, got `{argument}`", "a leading space sends the line as a message")
    return Command(action, argument)
