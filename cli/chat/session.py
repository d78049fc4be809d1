"""The loop of an interactive chat: read a line, obey or ask, say what it took."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from ...engine.request import SamplingParams
from ...kernels.errors import CapacityError, EngineDead, LlmctlError
from ..console import Console
from ..output import OutputError
from .commands import Action, Command, parse
from .conversation import Conversation, ask
from .screen import help_text, printable, status

if TYPE_CHECKING:
    from ...engine.frontend import Frontend


def talk(
    console: Console,
    frontend: Frontend,
    conversation: Conversation,
    sampling: SamplingParams,
    read: Callable[[], str],
) -> None:
    """Chat until the user leaves: `/exit`, Ctrl-D, or Ctrl-C twice on an empty line.

    Mistakes, messages that do not fit and answers that fail are told and the chat goes on; a dead engine is raised.
    The signal of Ctrl-C interrupts answers only: the line editor takes the key itself, and whoever presses it just when
    an answer ends does not mean to leave.
    """
    with _on_interrupt(signal.SIG_IGN):
        _talk(console, frontend, conversation, sampling, read)


def _talk(
    console: Console,
    frontend: Frontend,
    conversation: Conversation,
    sampling: SamplingParams,
    read: Callable[[], str],
) -> None:
    leaving = False
    while True:
        try:
            line = read()
        except EOFError:
            return
        except KeyboardInterrupt:
            if leaving:
                return
            leaving = True
            console.say("Ctrl-C again, or Ctrl-D, leaves", "dim")
            continue
        leaving = False
        if not line.strip():
            continue
        try:
            command = parse(line)
            if command is None:
                _answer(console, frontend, conversation, sampling, line.strip())
            elif command.action is Action.EXIT:
                return
            else:
                _obey(console, conversation, sampling, command)
        except (EngineDead, OutputError):
            raise
        except CapacityError as error:
            console.error(error.message, "shorten the message, or `/reset` to start over")
        except LlmctlError as error:
            console.error(error.message, error.hint)


def _answer(
    console: Console, frontend: Frontend, conversation: Conversation, sampling: SamplingParams, question: str
) -> None:
    def write(text: str) -> None:
        console.stdout.write(printable(text))
        console.stdout.flush()

    try:
        with _on_interrupt(signal.default_int_handler):
            answer = ask(frontend, conversation.messages(question), sampling, write)
    except KeyboardInterrupt:  # before the request was made
        console.say("stopped", "dim")
        return
    console.data("")
    if answer.text or answer.finish is not None:
        conversation.add(question, answer.text)
    console.say(status(answer, frontend.info.max_model_len), "dim")


def _obey(console: Console, conversation: Conversation, sampling: SamplingParams, command: Command) -> None:
    if command.action is Action.HELP:
        console.say(help_text(sampling))
    elif command.action is Action.RESET:
        conversation.reset()
        console.say("the conversation is forgotten", "dim")
    elif not command.argument:
        console.say(f"system prompt: {conversation.system or '(none)'}", "dim")
    else:
        conversation.system = "" if command.argument == '""' else command.argument
        console.say("system prompt set" if conversation.system else "system prompt removed", "dim")


@contextlib.contextmanager
def _on_interrupt(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> Iterator[None]:
    """Handle the signal of Ctrl-C like this meanwhile."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
