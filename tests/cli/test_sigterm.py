"""SIGTERM interrupts as Ctrl-C does, and says so in the exit code."""

import signal

import pytest
import typer

from llmctl.cli.exits import ExitCode
from llmctl.cli.sigterm import sigterm_like_ctrl_c


@pytest.mark.parametrize("ctrl_c", [signal.default_int_handler, signal.SIG_IGN])
def test_sigterm_interrupts_the_block_also_where_ctrl_c_is_ignored(console, ctrl_c):
    before, cleaned = signal.getsignal(signal.SIGTERM), []
    kept = signal.signal(signal.SIGINT, ctrl_c)
    try:
        with pytest.raises(typer.Exit) as ended, sigterm_like_ctrl_c(console):
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                cleaned.append(True)
    finally:
        signal.signal(signal.SIGINT, kept)
    assert ended.value.exit_code == ExitCode.TERMINATED and cleaned
    assert console.stderr.getvalue() == "terminated\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_stays_ctrl_c_and_other_ends_are_left_alone(console):
    with pytest.raises(KeyboardInterrupt), sigterm_like_ctrl_c(console):
        signal.raise_signal(signal.SIGINT)
    with pytest.raises(typer.Exit) as ended, sigterm_like_ctrl_c(console):
        raise typer.Exit(ExitCode.INTERRUPTED)
    assert ended.value.exit_code == ExitCode.INTERRUPTED


def test_sigterm_that_is_ignored_stays_so(console):
    kept = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with sigterm_like_ctrl_c(console):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, kept)
