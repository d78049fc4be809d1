"""What `LLM.beam_search` takes and gives, with the names that vLLM's users know.

One thing differs from vLLM on purpose: scores are those of transformers, which divide by the number of generated tokens
and not by that of all tokens, so that a long prompt does not dilute the length penalty.
"""

from __future__ import annotations

from dataclasses import dataclass

from .request import FinishReason, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How to search. All `beam_width` hypotheses come back; the other fields are those of SamplingParams.

    `temperature` 0 and 1 are the same: beams follow the model's own probabilities.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    include_stop_str_in_output: bool = False

    def sampling(self) -> SamplingParams:
        """The same as SamplingParams."""
        return SamplingParams(
            n=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            include_stop_str_in_output=self.include_stop_str_in_output,
            use_beam_search=True,
            logprobs=0,
        )


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A hypothesis. `tokens` begin with the prompt's, `text` is that of all of them; `logprobs` are of generated ones.

    score  what hypotheses are ranked by: cum_logprob / generated tokens ** length_penalty
    error  with FinishReason.ERROR: the model gave NaN, and no hypothesis of this prompt has tokens
    """

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    cum_logprob: float
    score: float
    finish_reason: FinishReason
    error: str = ""


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The hypotheses of one prompt, best first."""

    sequences: tuple[BeamSearchSequence, ...]
