"""`Kernel`: one specialization of one template, and the text that it is compiled from.

The same record goes to NVRTC (jit.py) and to the CPU's compiler (emulate.py): what tests run is what a GPU gets.
"""

from __future__ import annotations

import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent

_INCLUDE = re.compile(r'^#include "([^"]+\.cuh)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Kernel:
    """header: a file of this folder;  expression: the kernel in namespace llmctl::cuda, `attend<Half, E4m3, 128>`."""

    header: str
    expression: str

    @property
    def template(self) -> str:
        """The expression without its arguments."""
        return self.expression.partition("<")[0]


def prologue(header: str) -> str:
    """How a program begins in which the expressions of this header's kernels mean something."""
    return f'#include "{header}"\nusing namespace llmctl::cuda;\n'


@functools.cache
def headers_of(header: str) -> tuple[Path, ...]:
    """The header and every header of ours that it includes, however deep."""
    found: dict[Path, None] = {}
    waiting = [FOLDER / header]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found[path] = None
        waiting += [(path.parent / name).resolve() for name in _INCLUDE.findall(path.read_text())]
    return tuple(found)


def text_hash(paths: tuple[Path, ...], *more: str) -> str:
    """A name for the content of these files, their order and these words."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes() + b"\0")
    for word in more:
        digest.update(word.encode() + b"\0")
    return digest.hexdigest()[:32]
