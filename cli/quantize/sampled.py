"""Calibration text that the model writes itself, by our own engine.

Half of the samples begin with the token that begins a text or a conversation, so that they are what the model says
unasked; the others begin with an ordinary token drawn at random, as in LLM-QAT (Liu et al., arXiv 2305.17888), which
leads to places the model would not go by itself. Everything after the first token is sampled at temperature 1.
"""

from __future__ import annotations

import numpy as np

from ...engine.assemble import assemble
from ...engine.config import EngineConfig
from ...engine.load.packed import PackedModel
from ...engine.load.progress import Progress
from ...engine.process import new_epoch
from ...engine.request import FinishReason, Request, SamplingParams
from ...engine.schedule.sequence import mix_seed
from ...engine.tokenizer import Tokenizer
from ...kernels.errors import CheckpointError
from ...kernels.ops import I32Array

_AT_ONCE = 64


def write_text(
    model: PackedModel,
    tokenizer: Tokenizer,
    samples: int,
    length: int,
    *,
    seed: int,
    threads: int,
    progress: Progress,
) -> I32Array:
    """int32 [samples, length] of the model's own tokens; the same seed gives the same tokens."""
    config = EngineConfig(
        max_model_len=length, max_num_seqs=min(samples, _AT_ONCE), threads=threads, enable_prefix_caching=False,
        device="cpu",
    )  # fmt: skip
    engine, info = assemble(config, model, epoch=new_epoch())
    sampling = SamplingParams(temperature=1.0, ignore_eos=True)
    out = np.zeros((samples, length), np.int32)
    out[:, 0] = _first_tokens(tokenizer, samples, min(info.vocab_size, tokenizer.vocab_size), seed)
    done, described = 0, f"sampling {samples} texts of {length} tokens from the model"
    try:
        for i in range(samples):
            engine.add(
                Request(
                    id=str(i), prompt=(int(out[i, 0]),), sampling=sampling, seed=mix_seed(seed, i), stop_ids=(),
                    max_tokens=length - 1,
                )
            )  # fmt: skip
        while engine.has_work:
            for output in engine.step():
                if output.finish is FinishReason.ERROR:
                    raise CheckpointError(f"the model cannot write text: {output.error}", "its weights are broken")
                first = 1 + output.first
                out[int(output.request_id), first : first + len(output.tokens)] = output.tokens
                done += len(output.tokens)
            progress(described, done, samples * (length - 1))
    finally:
        engine.close()
    return out


def _first_tokens(tokenizer: Tokenizer, samples: int, vocab_size: int, seed: int) -> I32Array:
    """One per sample: the token that begins a text, if there is one, and ordinary tokens by turns."""
    rng = np.random.default_rng(seed)
    ordinary = [index for index in range(vocab_size) if not tokenizer.is_special(index)] or list(range(vocab_size))
    first = rng.choice(np.array(ordinary, np.int32), samples)
    begin = tokenizer.chat.special_tokens.get("bos_token")
    ids = tokenizer.encode(begin, add_special=False) if begin else []
    if len(ids) == 1:
        first[::2] = ids[0]
    return first
