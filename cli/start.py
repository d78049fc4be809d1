"""Where the command starts: a word about Ctrl-C before anything that takes time is imported.

Imports are a good part of a second, and a Ctrl-C meanwhile would otherwise show whatever line Python was reading. So
this file, and the package's own, import next to nothing.
"""

from __future__ import annotations

import os

INTERRUPTED = 130  # ExitCode.INTERRUPTED, which is not imported yet

try:
    import contextlib
    import signal
    import sys
    from typing import NoReturn
except KeyboardInterrupt:
    os._exit(INTERRUPTED)


def main() -> None:
    """Run this process's command line and exit."""
    _fill_closed_streams()
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a shell that ignores it for us is obeyed
    if ours:
        signal.signal(signal.SIGINT, _leave)
        sys.unraisablehook = _leave_if_interrupted
    from .uncollected import uncollected

    with uncollected():
        if _will_serve(sys.argv[1:]):
            from ..engine.early import begin_worker

            begin_worker()
        from .app import main as run_command_line

    try:
        if ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run_command_line()
    except KeyboardInterrupt:  # before or after the commands' own boundary
        code = INTERRUPTED
    if ours:
        signal.signal(signal.SIGINT, _leave)
    _end(code)


def _fill_closed_streams() -> None:
    """/dev/null for each standard stream that is closed; else the next files opened get its number.

    Then what is written to the stream would go there, and libuv takes such a file for a mistake and aborts.
    """
    while (handle := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(handle, True)
    os.close(handle)


def _will_serve(arguments: list[str]) -> bool:
    """Whether an engine's process will be wanted, as far as that shows before anything is parsed."""
    command = next((argument for argument in arguments if not argument.startswith("-")), "")
    return command == "serve" and not {"-h", "--help", "--print-command"} & set(arguments)


def _end(code: int) -> NoReturn:
    """End now, with what was registered for the end done and output written.

    Python would first wait for every thread that some library has started; one that waits for a network or a lock would
    keep a command that is done from ending.
    """
    import atexit

    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads it, or there is none
            stream.flush()
    os._exit(code)


def _leave(number: int, frame: object) -> None:
    """End at once: nothing is begun yet, or all of it is written."""
    os._exit(INTERRUPTED)


def _leave_if_interrupted(dropped: sys.UnraisableHookArgs) -> None:
    """Obey a Ctrl-C that struck in a callback of the interpreter, where Python prints an exception and goes on."""
    if dropped.exc_type is KeyboardInterrupt:
        os._exit(INTERRUPTED)
    sys.__unraisablehook__(dropped)
