"""What a step's result means for a sequence: whether it ends, and the Output that tells of it."""

from __future__ import annotations

from ..request import FinishReason, Output, TokenLogprobs
from .sequence import Sequence
from .step import ChunkResult


def accepted_of(seq: Sequence, chunk: ChunkResult) -> tuple[int, ...]:
    """The chunk's tokens up to the first that ends the sequence."""
    for count, token in enumerate(chunk.tokens, 1):
        if token in seq.request.stop_ids:
            return chunk.tokens[:count]
    return chunk.tokens


def finish_of(seq: Sequence, tokens: tuple[int, ...]) -> FinishReason | None:
    """Why the sequence, which `tokens` were just added to, is at its end; None if it goes on."""
    if tokens and tokens[-1] in seq.request.stop_ids:
        return FinishReason.STOP
    if seq.generated >= seq.max_new and (tokens or seq.computed >= seq.goal):
        return FinishReason.LENGTH
    return None


def logprobs_of(chunk: ChunkResult, count: int) -> tuple[TokenLogprobs, ...]:
    """One entry for each of the chunk's first `count` tokens, or none at all."""
    if not chunk.logprobs:
        return ()
    tops = zip(chunk.top_ids, chunk.top_logprobs) if chunk.top_ids else (((), ()) for _ in chunk.logprobs)
    return tuple(TokenLogprobs(logprob, *top) for logprob, top in zip(chunk.logprobs[:count], tops))


def output_of(
    seq: Sequence,
    epoch: int,
    tokens: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprobs, ...] = (),
    finish: FinishReason | None = None,
    error: str = "",
) -> Output:
    """The Output of a sequence whose last tokens are `tokens`."""
    return Output(
        request_id=seq.request.id,
        index=seq.index,
        epoch=epoch,
        first=seq.generated - len(tokens),
        tokens=tokens,
        logprobs=logprobs,
        finish=finish,
        cached_tokens=seq.leader.cached_tokens,
        error=error,
    )
