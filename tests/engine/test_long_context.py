"""Long prompts: in parts as at once, far from the start as near it, with memory that grows with the length alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from llmctl.engine.config import EngineConfig, SpeculativeConfig
from llmctl.engine.llm import LLM
from llmctl.engine.models.arch import DecoderSpec, RopeSpec
from llmctl.engine.request import SamplingParams
from llmctl.engine.workspace import workspace_bytes

from .tiny import VOCAB, write_checkpoint

YARN = {"rope_type": "yarn", "factor": 4.0}
OFF = SpeculativeConfig(method="none")


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_long_prompt_in_parts_gives_what_it_gives_whole(family: str, tmp_path: Path) -> None:
    folder = str(write_checkpoint(tmp_path, family))
    prompt = np.random.default_rng(5).integers(3, VOCAB, 1990).tolist()
    asked = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True, logprobs=2)
    results = []
    for chunk, size, blocks in ((2048, 512, 4), (512, 32, 64), (100, 16, 128)):
        with LLM(
            folder,
            max_model_len=2048,
            rope_scaling=YARN,
            max_num_batched_tokens=chunk,
            block_size=size,
            num_gpu_blocks_override=blocks,
            max_num_seqs=2,
            speculative_config=OFF,
        ) as llm:
            (output,) = llm.generate([prompt], asked)
        (one,) = output.outputs
        results.append((one.token_ids, [(each.logprob, each.top_logprobs) for each in one.logprobs]))
    assert results[0] == results[1] == results[2]


def test_what_a_step_takes_grows_with_the_length_and_not_with_its_square() -> None:
    spec = DecoderSpec(
        family="llama", num_layers=30, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64, ffn_size=1536,
        vocab_size=49152, context_length=1 << 20, norm_eps=1e-5, rope=RopeSpec(),
    )  # fmt: skip
    at = {length: workspace_bytes(spec, EngineConfig(), length) for length in (8192, 16384, 32768)}
    assert at[32768] - at[16384] == pytest.approx(2 * (at[16384] - at[8192]), rel=1e-3)
    assert at[32768] < 2 * at[8192]
