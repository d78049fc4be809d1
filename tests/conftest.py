"""Tests see the product as users do: as `llmctl`, never as the bare folders of a checkout."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# `python -m pytest` puts the working directory first; `import kernels` would then find ours instead of PyPI's.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
