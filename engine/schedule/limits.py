"""The limits a scheduler works within, and whether a request fits them at all."""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.errors import CapacityError, UsageError
from ..config import NO_SPECULATION, SpeculativeConfig
from ..request import Request
from .pace import PaceConfig
from .windows import WindowLimit


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one engine start. `num_blocks` has one entry per KV group without a window, `windows` the others.

    `depth` counts steps in flight.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: tuple[int, ...]
    max_model_len: int
    enable_prefix_caching: bool = True
    policy: str = "hybrid"
    depth: int = 1
    epoch: int = 0
    eviction_k: int = 2  # K of LRU-K; 1 is LRU
    tier_blocks: int = 0  # places for evicted blocks in tier 2, each of one block of every KV group
    preemption_mode: str = "auto"
    bytes_per_block: int = 0  # of all groups together, to tell what was swapped
    speculation: SpeculativeConfig = NO_SPECULATION
    max_logit_rows: int = 0  # rows with logits in one step; 0: as many as tokens
    windows: tuple[WindowLimit, ...] = ()
    pace: PaceConfig | None = None  # of prompts beside decodes; None: whatever the token budget allows
    tenant_weights: tuple[tuple[str, float], ...] = ()  # shares of the fair queue; 1 for who is not named

    @property
    def limit(self) -> int:
        """Tokens that one sequence can have, prompt and answer: by the context, or by the smallest pool."""
        return min(self.max_model_len, min(self.num_blocks) * self.block_size)

    @property
    def logit_rows(self) -> int:
        """Rows of one step that may have logits."""
        return self.max_logit_rows or self.max_num_batched_tokens

    @property
    def max_running(self) -> int:
        """Sequences that run at once. Each may decode in every step, or some would wait with their memory held."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)

    def check(self, request: Request) -> None:
        """CapacityError for a request that could not run even alone: its prompt and one token are too much."""
        prompt = len(request.prompt)
        if prompt == 0:
            raise UsageError("the prompt has no tokens", "give at least one token")
        total = prompt + min(request.max_tokens, 1)
        if total > self.max_model_len:
            raise CapacityError(
                f"the prompt has {prompt} tokens, the context holds {self.max_model_len} with at least one to generate",
                "shorten the prompt, or raise --max-model-len if the model allows",
            )
        if total > self.limit:
            raise CapacityError(
                f"a prompt of {prompt} tokens and one to generate need {-(-total // self.block_size)} KV blocks of "
                f"{self.block_size} tokens, there are {min(self.num_blocks)}",
                "shorten the prompt, or raise --kv-cache-memory-bytes",
            )
        if request.sampling.use_beam_search:
            self._check_beams(request)

    def _check_beams(self, request: Request) -> None:
        """CapacityError if the beams could not all run at once, each with blocks of its own after the prompt."""
        width, prompt = request.sampling.beam_width, len(request.prompt)
        if width > self.max_running:
            raise CapacityError(
                f"{width} beams run at once, this engine runs {self.max_running} sequences",
                f"use at most {self.max_running} beams, or raise --max-num-seqs",
            )
        new = min(request.max_tokens, self.limit - prompt)
        shared = prompt // self.block_size
        for each in self.windows:
            together = width * min(each.blocks_of_one(self.block_size), -(-(prompt + new) // self.block_size))
            if together > each.num_blocks:
                raise CapacityError(
                    f"{width} beams may need {together} KV blocks of {self.block_size} tokens in layers with a window "
                    f"of {each.window}, there are {each.num_blocks}",
                    "use fewer beams, or raise --kv-cache-memory-bytes",
                )
        needed = shared + width * (-(-(prompt + new - 1) // self.block_size) - shared)
        if needed > min(self.num_blocks):
            raise CapacityError(
                f"{width} beams of {new} tokens after a prompt of {prompt} may need {needed} KV blocks of "
                f"{self.block_size} tokens, there are {min(self.num_blocks)}",
                "use fewer beams or a smaller max_tokens, or raise --kv-cache-memory-bytes",
            )
