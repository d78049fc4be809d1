"""The text face of an engine in a process of its own. Imports no part of an engine: a server needs none."""

from __future__ import annotations

import threading
from pathlib import Path

from .config import EngineConfig
from .frontend import Frontend
from .load.progress import Progress
from .process import EngineProcess
from .process_client import ProcessClient
from .tokenizer import Tokenizer


def attach(
    engine: EngineProcess,
    config: EngineConfig,
    *,
    template: str | None = None,
    progress: Progress | None = None,
    cancelled: threading.Event | None = None,
) -> Frontend:
    """Wait until the process that was started with `config` has loaded, and speak for it; closing ends the process.

    Its tokenizer is parsed while the engine is built, with `template` as chat template if one is given. Raises what
    ProcessClient and Tokenizer do, and has ended the process then.
    """
    parsed: list[Tokenizer] = []

    def parse(folder: Path) -> None:
        parsed.append(Tokenizer(folder, template))

    client = ProcessClient(config, engine.epoch, progress, cancelled, engine, parse)
    return Frontend(client, parsed[0], config.seed)
