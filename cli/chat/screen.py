"""How chat looks: the line editor, the words under an answer, and what may reach a terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...engine.request import FinishReason, SamplingParams
from .commands import HELP
from .conversation import Answer

if TYPE_CHECKING:
    from prompt_toolkit.input import Input
    from prompt_toolkit.output import Output

PROMPT = "> "

# A model can write any byte, escape sequences included; a terminal gets text, newlines and tabs only.
_UNPRINTABLE = {code: None for code in (*range(0x20), 0x7F, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """`text` without the control characters that could move the cursor or change the terminal."""
    return text.translate(_UNPRINTABLE)


def line_editor(history: Path, source: Input | None = None, output: Output | None = None) -> Callable[[], str]:
    """A function that reads one message with editing and history; raises KeyboardInterrupt and EOFError as typed.

    Enter sends, Alt-Enter starts a new line, Ctrl-C clears what was typed and is raised only on an empty line.
    `source` and `output` stand in for the terminal in tests.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    def _clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    history.parent.mkdir(parents=True, exist_ok=True)
    session: PromptSession[str] = PromptSession(
        history=FileHistory(str(history)),
        key_bindings=keys,
        multiline=True,
        prompt_continuation=" " * len(PROMPT),
        input=source,
        output=output,
    )
    return lambda: session.prompt(PROMPT)


def status(answer: Answer, max_model_len: int) -> str:
    """One line about an answer: size, speed, what the prefix cache saved, and what room is left."""
    left = max(0, max_model_len - answer.prompt_tokens - answer.tokens)
    parts = [f"{answer.tokens} token{'' if answer.tokens == 1 else 's'}"]
    if answer.tokens_per_s:
        parts.append(f"{answer.tokens_per_s:.1f} tokens/s")
    if answer.tokens:
        parts.append(f"first after {answer.first_token_s:.2f} s")
    if answer.cached_tokens is not None:
        parts.append(f"{answer.cached_tokens} of {answer.prompt_tokens} prompt tokens cached")
    parts.append(f"{left} left")
    if answer.finish is None:
        parts.append("stopped")
    elif answer.finish is FinishReason.LENGTH:
        parts.append("cut at the token limit" if left else "cut at the end of the context")
    return " | ".join(parts)


def help_text(sampling: SamplingParams) -> str:
    """The commands, and how answers are sampled."""
    width = max(len(name) for name, _ in HELP)
    lines = [f"  {name:<{width}}  {text}" for name, text in HELP]
    return "\n".join([*lines, f"sampling: {describe(sampling)}"])


def describe(sampling: SamplingParams) -> str:
    """The sampling options that are in force."""
    if sampling.temperature == 0:
        parts = ["greedy (temperature 0)"]
    else:
        parts = [f"temperature {sampling.temperature:g}"]
        parts += [f"top_p {sampling.top_p:g}"] if sampling.top_p < 1 else []
        parts += [f"top_k {sampling.top_k}"] if sampling.top_k > 0 else []
        parts += [f"min_p {sampling.min_p:g}"] if sampling.min_p > 0 else []
        parts += [f"seed {sampling.seed}"] if sampling.seed is not None else []
    if sampling.repetition_penalty != 1:
        parts.append(f"repetition_penalty {sampling.repetition_penalty:g}")
    parts.append(
        "answers as long as the context allows"
        if sampling.max_tokens is None
        else f"at most {sampling.max_tokens} tokens"
    )
    parts += [f"stop {text!r}" for text in sampling.stop]
    return ", ".join(parts)
