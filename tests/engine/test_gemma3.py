"""Gemma 3 from other containers than its own folder: a GGUF file, and the folder of a model that also sees."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from llmctl.engine.config import EngineConfig, environment
from llmctl.engine.load.hub import resolve
from llmctl.engine.load.packed import open_packed
from llmctl.engine.plan import resolve as resolve_plan
from llmctl.engine.runner.runner import Runner

from .forced import forced_logits
from .gguf_files import gemma3_config, write_gemma3
from .tiny import FAMILIES, VOCAB, randomize, write_tokenizer


def our_logits(path: Path, tokens: list[int], cache: Path) -> np.ndarray:
    config = EngineConfig(dtype="float32", max_num_batched_tokens=64, max_num_seqs=64, block_size=16)
    model = open_packed(resolve(str(path), environment=environment()), dtype="float32", cache=cache)
    return forced_logits(Runner(model, resolve_plan(config, model)[0]), tokens, VOCAB, 64, 16)


@pytest.fixture
def tokens() -> list[int]:
    return np.random.default_rng(3).integers(3, VOCAB, 60).tolist()


def test_a_gguf_file_gives_the_logits_of_transformers(tokens: list[int], tmp_path: Path) -> None:
    oracle = transformers.AutoModelForCausalLM.from_config(gemma3_config(7)).eval()
    randomize(oracle)
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0].numpy()
    path = write_gemma3(tmp_path / "gemma.gguf", oracle)
    np.testing.assert_allclose(our_logits(path, tokens, tmp_path / "cache"), expected, atol=3e-4, rtol=0)


def test_the_decoder_of_a_model_that_sees_gives_its_logits_for_text(tokens: list[int], tmp_path: Path) -> None:
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = transformers.Gemma3Config(text_config=FAMILIES["gemma3"], vision_config=vision, mm_tokens_per_image=4)
    oracle = transformers.Gemma3ForConditionalGeneration(config).eval()
    randomize(oracle)
    oracle.save_pretrained(tmp_path / "model")
    write_tokenizer(tmp_path / "model")
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0].numpy()
    np.testing.assert_allclose(our_logits(tmp_path / "model", tokens, tmp_path / "cache"), expected, atol=3e-4, rtol=0)
