"""The three streams and what is known of them, in one record: stdout is data, stderr is talk.

Commands write through a `Console` only, so that tests see exactly what a terminal, a pipe or a file would get. Rich is
loaded when something is drawn with it: `llmctl --version` should not wait for it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from .output import guarded

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.text import Text

    from ..engine.load.progress import Progress

LINE_S = 15.0  # between two lines of progress in a log
FIRST_S = 5.0  # of work, before which nothing is said of how long it takes
_UNBOUNDED = 1 << 14  # width for output that is not a terminal: a table in a file is never cut


@dataclass(frozen=True, slots=True)
class Console:
    """Standard streams, which of them are terminals, and whether colour is wanted."""

    stdin: TextIO
    stdout: TextIO
    stderr: TextIO
    stdin_tty: bool
    stdout_tty: bool
    stderr_tty: bool
    color: bool

    @property
    def interactive(self) -> bool:
        """True when a person can type here and read the answer here."""
        return self.stdin_tty and self.stdout_tty

    def data(self, text: str) -> None:
        """Write one line (or several) of data to stdout."""
        self.stdout.write(text + "\n")
        self.stdout.flush()

    def json(self, value: object) -> None:
        """Write a value as indented JSON to stdout."""
        self.data(json.dumps(value, indent=2, ensure_ascii=False))

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
        """Write a table to stdout. Columns whose name starts with `>` are aligned to the right."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in columns:
            right = name.startswith(">")
            table.add_column(name.removeprefix(">"), justify="right" if right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        page = _Page(self.stdout.encoding)
        rich = self._rich(page, self.stdout_tty)
        if title:
            rich.print(Text(title, "bold"), soft_wrap=True)
        rich.print(table)
        self.stdout.write(page.getvalue())
        self.stdout.flush()

    def say(self, text: str, style: str = "") -> None:
        """Write a line of talk to stderr."""
        from rich.text import Text

        self._talk(Text(text, style))

    def error(self, message: str, hint: str = "") -> None:
        """Write an error, and what to do about it, to stderr."""
        from rich.text import Text

        self._talk(Text.assemble(("error", "bold red"), ": ", message))
        if hint:
            self._talk(Text.assemble("\n", ("hint", "bold cyan"), ": ", hint))

    @contextlib.contextmanager
    def progress(self) -> Iterator[Progress]:
        """A callable that shows how far long work has come: bars on a terminal, else a line per kind of work.

        Lines that say how much is left follow the first one every LINE_S seconds.
        """
        if not self.stderr_tty:
            yield _Lines(self).tell
            return

        from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bars
        from rich.table import Column
        from rich.text import Text

        class Left(ProgressColumn):
            """Rich's own looks at the last steps only, which come in bursts where work is done in batches."""

            def render(self, task: Task) -> Text:
                done, left = task.completed - task.fields["before"], (task.total or 0) - task.completed
                known = done > 0 and left > 0 and (task.elapsed or 0) >= FIRST_S
                return Text(_left(task.elapsed or 0, done, left) if known else "")

        # Where a line is too long its description is broken, so that the rest stays readable.
        description = TextColumn("{task.description}", markup=False, table_column=Column())
        columns = (description, BarColumn(), TaskProgressColumn(), Left(Column(no_wrap=True)))
        with Bars(*columns, console=self._rich(self.stderr, True), transient=True) as bars:
            tasks: dict[str, TaskID] = {}

            def draw(description: str, done: int, total: int) -> None:
                if description not in tasks:
                    tasks[description] = bars.add_task(description, before=done)
                bars.update(tasks[description], completed=done, total=total or None)

            yield draw

    def _talk(self, text: Text) -> None:
        page = _Page(self.stderr.encoding)
        self._rich(page, self.stderr_tty).print(text, soft_wrap=True)
        with contextlib.suppress(OSError):  # there is nowhere left to say that nobody hears it
            self.stderr.write(page.getvalue())
            self.stderr.flush()

    def _rich(self, stream: TextIO, tty: bool) -> RichConsole:
        from rich.console import Console as RichConsole

        return RichConsole(
            file=stream,
            force_terminal=tty,
            no_color=not self.color,
            highlight=False,
            markup=False,
            emoji=False,
            width=None if tty else _UNBOUNDED,
        )


class _Page(io.StringIO):
    """What Rich draws on before it is written: it ends the program in its own way where a pipe's reader has left.

    Lines are drawn with what `encoding` has.
    """

    def __init__(self, encoding: str | None) -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str | None:  # type: ignore[override]
        return self._encoding


class _Lines:
    """Progress in a log: the time left is estimated from the time since each kind of work began."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun: dict[str, tuple[float, int]] = {}
        self._said = 0.0

    def tell(self, description: str, done: int, total: int) -> None:
        now = time.monotonic()
        if description not in self._begun:
            self._begun[description] = now, done
            self._said = now
            self._console.say(description)
            return
        started, before = self._begun[description]
        if now - self._said < LINE_S or not before < done < total:
            return
        self._said = now
        self._console.say(f"{description}: {done / total:.0%}, {_left(now - started, done - before, total - done)}")


def _left(elapsed_s: float, done: float, left: float) -> str:
    """How long the rest takes if it goes on as all of it went until now."""
    seconds = elapsed_s * left / done
    return f"about {seconds:.0f} s left" if seconds < 100 else f"about {seconds / 60:.0f} min left"


def terminal() -> Console:
    """The console of this process. NO_COLOR (any value but the empty one) and TERM=dumb switch colour off.

    A stream that the process was started without is empty, or goes nowhere.
    """
    color = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    sys.stdin = sys.stdin or io.StringIO()
    sys.stdout = guarded(sys.stdout)
    sys.stderr = sys.stderr or guarded(None)
    return Console(
        stdin=sys.stdin,
        stdout=sys.stdout,
        stderr=sys.stderr,
        stdin_tty=sys.stdin.isatty(),
        stdout_tty=sys.stdout.isatty(),
        stderr_tty=sys.stderr.isatty(),
        color=color,
    )
