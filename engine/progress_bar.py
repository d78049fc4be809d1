"""How far a batch of requests is, on one line of stderr that is written over."""

from __future__ import annotations

import sys
import time

WIDTH = 30
PAUSE_S = 0.1  # between two drawings


class ProgressBar:
    """Drawn while it is open; the last state stays on the screen."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._tokens = total, 0, 0
        self._began, self._drawn = time.monotonic(), 0.0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._draw()
        print(file=sys.stderr)

    def add(self, tokens: int, ended: bool) -> None:
        """So many tokens came, and with them a request's end perhaps."""
        self._tokens += tokens
        self._done += ended
        if time.monotonic() - self._drawn >= PAUSE_S:
            self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        filled = WIDTH * self._done // max(self._total, 1)
        rate = self._tokens / max(self._drawn - self._began, 1e-9)
        bar = "#" * filled + "." * (WIDTH - filled)
        print(f"\r[{bar}] {self._done}/{self._total} prompts, {rate:.1f} tokens/s", end="", file=sys.stderr, flush=True)
