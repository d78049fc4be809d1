"""Tests see the product as users do: as `llmctl`, never as the bare folders of a checkout."""

import os
import signal
import sys
from pathlib import Path

import pytest

from llmctl.engine.config import environment

ROOT = Path(__file__).resolve().parents[1]

# `python -m pytest` puts the working directory first; `import kernels` would then find ours instead of PyPI's.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

# A shell ignores Ctrl-C in what it starts in the background, and processes inherit that; tests that send it need it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Packed models of tests go to a cache of their own; downloaded models are shared with the user's."""
    models = environment().cache / "models"
    models.mkdir(parents=True, exist_ok=True)
    cache = tmp_path_factory.mktemp("cache")
    (cache / "models").symlink_to(models, target_is_directory=True)
    os.environ["LLMCTL_CACHE"] = str(cache)
