"""What a process takes beside weights and KV cache: the buffers of a step, and what the kernels keep for themselves.

Counted is what is in use when the engine does all that it was asked for at once: every sequence decodes, prompts are as
long as a step allows, and contexts as long as they may be.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..kernels import registry
from ..kernels.device import default_threads
from ..kernels.formats import KVFormat
from ..kernels.ops import PANEL, steering_width
from ..kernels.scratch import attend_scratch_bytes, latent_scratch_bytes, sample_scratch_bytes, screen_scratch_bytes
from .config import EngineConfig
from .models.arch import DecoderSpec
from .pools import blocks_for


def workspace_bytes(spec: DecoderSpec, config: EngineConfig, length: int, weight_formats: Sequence[str] = ()) -> int:
    """Bytes of the buffers that a step computes in, and of what is kept for each of `max_num_seqs` sequences.

    Per row: float32 values, and for what a linear reads also a quantized form (at most 16 bits a value; a scale, a sum
    and the high parts of a wide quad for every 32). Per sequence: a row of logits, its tokens and its block table. Per
    thread: what it samples in; and the partial results of attention that threads hand to each other. Where weights are
    int8, as a head's may be, also what finds the largest logit for less than all logits.
    """
    if config.on_gpu:
        from .gpu_sizes import gpu_workspace_bytes  # nothing of it is needed on a CPU

        threads = config.threads or default_threads()
        return gpu_workspace_bytes(spec, config, length, weight_formats, threads)
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    read = 2 * spec.hidden_size + query + spec.ffn_size
    written = (2 if spec.sandwich_norms else 1) * spec.hidden_size + query + 2 * key + 2 * spec.ffn_size
    row = read * (4 + 2) + read // 32 * (4 + 4 + 4) + written * 4
    logits = -(-spec.vocab_size // PANEL) * PANEL
    sequence = 4 * (length + blocks_for(length, config.block_size))
    rope = (1 if spec.rope_local is None else 2) * length * spec.head_dim * 4
    per_sequence = config.max_num_seqs * sequence + config.max_logit_rows * 4 * logits
    is_screened = any(name.startswith("int8") for name in weight_formats) and registry.screens(config.kernels)
    screen = screen_scratch_bytes(spec.vocab_size, spec.hidden_size, config.max_logit_rows) if is_screened else 0
    return config.max_num_batched_tokens * row + per_sequence + rope + screen + _scratch_bytes(spec, config, length)


def steering_bytes(spec: DecoderSpec, formats: Sequence[KVFormat]) -> int:
    """Bytes of what says how K is made ready and steered in the layers that store it in 8 bits (`KeySteering`)."""
    layers = 0 if spec.latent is not None else sum(kv.bytes_per_value == 1 for kv in formats)
    return layers * spec.num_kv_heads * (spec.head_dim // 2) * (4 + 4 * 4 * steering_width(spec.head_dim) + 3 * 4)


def _scratch_bytes(spec: DecoderSpec, config: EngineConfig, length: int) -> int:
    threads = config.threads or default_threads()
    sampled = sample_scratch_bytes(spec.vocab_size, threads)
    rows = config.max_num_batched_tokens
    if spec.latent is not None:
        sizes = spec.num_heads, spec.latent.kv_rank, spec.latent.rope_dim
        return sampled + latent_scratch_bytes(*sizes, length, rows, threads)
    return sampled + attend_scratch_bytes(spec.num_heads, spec.num_kv_heads, spec.head_dim, length, rows, threads)
