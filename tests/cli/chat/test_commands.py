"""What a typed line means."""

import pytest

from llmctl.cli.chat.commands import Action, Command, parse
from llmctl.kernels.errors import UsageError


@pytest.mark.parametrize("line", ["hello", " /etc/hosts is a file", "a / b", ""])
def test_other_lines_are_messages(line):
    assert parse(line) is None


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("/help", Command(Action.HELP, "")),
        ("/system You are terse.", Command(Action.SYSTEM, "You are terse.")),
        ("/system", Command(Action.SYSTEM, "")),
        ("/reset ", Command(Action.RESET, "")),
        ("/clear", Command(Action.RESET, "")),
        ("/exit", Command(Action.EXIT, "")),
        ("/bye", Command(Action.EXIT, "")),
    ],
)
def test_slash_commands(line, command):
    assert parse(line) == command


def test_misspelt_command_names_the_nearest():
    with pytest.raises(UsageError, match="no command `/rest`") as caught:
        parse("/rest")
    assert "`/reset`" in caught.value.hint


def test_unknown_command_points_to_help():
    with pytest.raises(UsageError) as caught:
        parse("/zzz")
    assert "/help" in caught.value.hint


def test_text_behind_a_command_that_takes_none_is_not_dropped_silently():
    with pytest.raises(UsageError, match="takes no text"):
        parse("/exit now")
