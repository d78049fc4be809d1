"""How far the formats of the KV cache with scales and the 8-bit ones are from float16, on our own documents.

Weights are float32 here: with quantized activations a difference in the last bit of K already shows as a mean KL of
some 1e-3, which would hide what the format does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from llmctl.engine.config import EngineConfig, environment
from llmctl.engine.load.hub import resolve
from llmctl.engine.load.packed import open_packed
from llmctl.engine.score import Scorer
from llmctl.engine.tokenizer import Tokenizer
from llmctl.quant.quality import compare, windows

LENGTH = 1024


@pytest.mark.slow
def test_caches_are_as_close_to_float16_as_their_bits_allow() -> None:
    model = open_packed(resolve("", environment=environment()), dtype="float32", cache=environment().cache)
    root = Path(__file__).parents[2]
    text = "\n".join(path.read_text() for path in (root / "docs/architecture.md", root / "docs/serving.md"))
    tokens = Tokenizer(model.folder).encode(text)

    def score(kind: str) -> Scorer:
        return Scorer(model, LENGTH, EngineConfig(kv_cache_dtype=kind))

    original = score("float16").logits
    far = {
        kind: compare(original, score(kind).logits, windows(tokens, LENGTH, 2)).kl_mean
        for kind in ("float32", "int16", "int8", "fp8_e4m3", "fp8_e5m2")
    }
    assert far["float32"] < 1e-5
    assert far["int16"] < 3e-5
    assert far["int8"] < 1e-3
    assert far["int8"] < far["fp8_e4m3"] < 6e-3
    assert far["fp8_e4m3"] < far["fp8_e5m2"] < 3e-2
