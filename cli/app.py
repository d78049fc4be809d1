"""The root of the command line, and the one boundary where errors become words and exit codes.

Commands raise; nothing else in the program prints an error or calls `sys.exit`. Typer's own runner is not used because
it has a boundary of its own: `run` parses and invokes, and catches what either raises. Command modules load nothing
heavy when they are imported, so that `llmctl --help` loads neither torch nor transformers.
"""

from __future__ import annotations

import difflib
import logging
import re
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, cast

import typer
import typer.core

from .. import __version__
from ..kernels.errors import LlmctlError
from .command_table import CommandTable
from .console import Console, terminal
from .exits import ExitCode, exit_code
from .foreign import why_not
from .output import OutputError, abandon

# Typer hands on one of Click's errors, from Click itself or from its own copy; the base class of that one is the error
# for every mistake on a command line.
_MistypedError = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])

# Plain help: Rich's boxes cut long option names short on a terminal of 80 columns.
app = typer.Typer(
    name="llmctl",
    cls=CommandTable,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", "-V", help="Print the version and exit.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Say on stderr what is decided and why.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and debug logs; may stand anywhere on the line.")
    ] = False,
) -> None:
    """Chat with language models on this machine, serve them, and see beforehand what fits and what will run."""
    console: Console = context.obj
    if version:
        console.data(f"llmctl {__version__}")
        raise typer.Exit
    _configure_logs(console, logging.DEBUG if debug else logging.INFO if verbose else logging.WARNING)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(ExitCode.USAGE)


def main() -> int:
    """Run this process's command line to its end; returns its exit code."""
    console = terminal()
    code = run(sys.argv[1:], console)
    try:
        console.stdout.flush()
    except BrokenPipeError:
        code = ExitCode.PIPE
        abandon(console.stdout)
    except OutputError as error:
        if code == ExitCode.OK:
            console.error(error.message, error.hint)
            code = ExitCode.FAILURE
        abandon(console.stdout)
    return code


def run(arguments: Sequence[str], console: Console) -> int:
    """Run one command line; returns its exit code. Errors are shown on the console's stderr."""
    arguments, debug = _take_debug(list(arguments))
    command = typer.main.get_command(app)
    try:
        with command.make_context("llmctl", arguments, obj=console) as context:
            command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code
    except (KeyboardInterrupt, typer.Abort):
        console.say("interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        return ExitCode.PIPE
    except _MistypedError as error:
        console.error(*_explain(error))
        return ExitCode.USAGE
    except LlmctlError as error:
        if debug:
            console.say(traceback.format_exc().rstrip(), "dim")
        console.error(error.message, error.hint)
        return exit_code(error)
    except Exception as error:
        if debug:
            console.say(traceback.format_exc().rstrip(), "dim")
        hint = "" if debug else "this is a bug; run again with `--debug` for the traceback to report"
        console.error(f"{type(error).__name__}: {error}", hint)
        return ExitCode.FAILURE
    return ExitCode.OK


def _configure_logs(console: Console, level: int) -> None:
    """Show our own logs from this level on; those of the libraries we use are left as they are."""
    handler = logging.StreamHandler(console.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger(__name__.partition(".")[0])
    ours.handlers[:] = [handler]
    ours.setLevel(level)


def _take_debug(arguments: list[str]) -> tuple[list[str], bool]:
    """The arguments with `--debug` moved to the front: people add it at the end of the line that failed."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    rest = [argument for argument in arguments[:end] if argument != "--debug"] + arguments[end:]
    debug = len(rest) < len(arguments)
    return (["--debug", *rest] if debug else rest), debug


def _explain(error: typer.BadParameter) -> tuple[str, str]:
    """The message and hint for a mistake on the command line, with the nearest name for a misspelt one."""
    text = error.format_message().split(" (Possible options")[0].split(" Did you mean")[0].rstrip(".")
    context = error.ctx
    if context is None:
        return text[:1].lower() + text[1:], "see `llmctl --help`"
    help_hint = f"see `{context.command_path} --help`"
    unknown = re.fullmatch(r"No such (command|option):? '?(\S+?)'?", text)
    if unknown is None:
        return text[:1].lower() + text[1:], help_hint
    kind, word = unknown.groups()
    if kind == "command":
        known = cast(typer.core.TyperGroup, context.command).list_commands(context)
    else:
        known = [name for option in context.command.params for name in (*option.opts, *option.secondary_opts)]
    if kind == "option" and (reason := why_not(word)):
        return f"option `{word}` has no meaning here", reason
    near = difflib.get_close_matches(word, known, n=1)
    return f"no such {kind} `{word}`", f"did you mean `{near[0]}`?" if near else help_hint
