"""`llmctl chat`: a conversation in the terminal, one answer for a script, or one for a pipe."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from ...engine.config import EngineConfig, environment
from ...engine.early import QUIET_BLAS
from ...engine.request import SamplingParams
from ...kernels.errors import UsageError
from ..chat.conversation import Conversation, ask
from ..chat.screen import describe, line_editor, printable, status
from ..chat.session import talk
from ..config_file import Config, choose_named
from ..console import Console
from ..exits import ExitCode
from ..options import EngineOptions, SamplingOptions
from ..uncollected import uncollected

if TYPE_CHECKING:
    from ...engine.frontend import Frontend
    from ...engine.messages import EngineInfo


def chat(
    context: typer.Context,
    config: EngineOptions,
    sampling: SamplingOptions,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="Answer this and exit; stdin is not read.")
    ] = None,
    system: Annotated[str, typer.Option("--system", metavar="TEXT", help="The system prompt.")] = "",
    file: Config = None,
) -> None:
    """Chat with a model.

    On a terminal this is a conversation (`/help` lists what can be typed). Without one, all of stdin is a single
    message, and stdout is the answer alone.
    """
    console: Console = context.obj
    config = msgspec.structs.replace(config, model=choose_named(config.model, file))
    question = _question(console, prompt)
    check_text(system, "`--system`")
    with contextlib.closing(_launch(console, config)) as frontend:
        chosen = sampling.over(chat_defaults(frontend.sampling_defaults))
        chosen.check(frontend.info.vocab_size)
        conversation = Conversation(system)
        if question is not None:
            _answer_once(console, frontend, conversation, chosen, question)
            return
        read = line_editor(environment().cache / "chat_history")
        console.say(heading(frontend.info), "bold")
        console.say(f"{describe(chosen)}; /help lists the commands", "dim")
        talk(console, frontend, conversation, chosen, read)


def heading(info: EngineInfo) -> str:
    """The model that answers, in a line."""
    by = "" if info.model_impl == "llmctl" else f", computed by {info.model_impl}"
    return f"{info.model}, {info.weight_format}, {info.max_model_len} tokens{by}"


def chat_defaults(model_defaults: SamplingParams) -> SamplingParams:
    """How answers are sampled when nothing is asked: as the model's authors say, else temperature 0.7 and top_p 0.9.

    Plain sampling at temperature 1 is what an API promises, but small models wander with it. An answer may be as long
    as the context allows.
    """
    silent = model_defaults == SamplingParams(max_tokens=model_defaults.max_tokens)
    if silent:
        return msgspec.structs.replace(model_defaults, temperature=0.7, top_p=0.9, max_tokens=None)
    return msgspec.structs.replace(model_defaults, max_tokens=None)


def _question(console: Console, prompt: str | None) -> str | None:
    """The only message there will be, or None for a conversation. Read before the model is loaded."""
    if prompt is not None:
        question, source = prompt, "`--prompt`"
    elif console.interactive:
        return None
    else:
        question, source = _read(console), "stdin"
    check_text(question, source)
    if not question.strip():
        raise UsageError(f"nothing to answer: {source} is empty", 'give a message, as in `llmctl chat -p "hello"`')
    return question.strip()


def _read(console: Console) -> str:
    try:
        return console.stdin.read()
    except UnicodeDecodeError as error:
        raise _not_text("stdin", error.object[error.start]) from error


def check_text(text: str, source: str) -> None:
    """Raise UsageError if `text` has bytes that are no UTF-8, which Python hands over as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _not_text(source, ord(text[error.start]) & 0xFF) from error


def _not_text(source: str, byte: int) -> UsageError:
    return UsageError(
        f"{source} is not UTF-8 text: it has the byte 0x{byte:02x}",
        "convert it, as in `iconv -f latin1 -t utf-8 FILE | llmctl chat`",
    )


def _launch(console: Console, config: EngineConfig) -> Frontend:
    os.environ.setdefault(*QUIET_BLAS)
    with uncollected():
        from ...engine.launch import launch

    with console.progress() as progress:
        return launch(config, progress=progress)


def _answer_once(
    console: Console, frontend: Frontend, conversation: Conversation, sampling: SamplingParams, question: str
) -> None:
    def write(text: str) -> None:
        console.stdout.write(printable(text) if console.stdout_tty else text)
        console.stdout.flush()

    answer = ask(frontend, conversation.messages(question), sampling, write)
    if not answer.text.endswith("\n"):
        console.data("")
    if console.stderr_tty:
        console.say(status(answer, frontend.info.max_model_len), "dim")
    if answer.finish is None:
        raise typer.Exit(ExitCode.INTERRUPTED)
