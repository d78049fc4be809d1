"""The quality card of a checkpoint quantized here: a JSON file beside its weights."""

from __future__ import annotations

CARD_NAME = "llmctl_quality.json"
