"""What a step's result means for a sequence: whether it ends, and the Output that tells of it."""

from __future__ import annotations

from ..request import FinishReason, Output, TokenLogprobs
from .beam_search import Hypothesis
from .draft import Row
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


def logprobs_of(seq: Sequence, chunk: ChunkResult, count: int) -> tuple[TokenLogprobs, ...]:
    """One entry for each of the chunk's first `count` tokens, or none at all if they were not asked for."""
    shown = seq.request.sampling.logprobs
    return () if shown is None else _entries(chunk, count, shown)


def take_known(row: Row, chunk: ChunkResult) -> ChunkResult:
    """The result without what it says of known tokens, which goes to the sequence's prompt logprobs."""
    known, shown = row.known, row.seq.request.sampling.prompt_logprobs
    if known == 0 or shown is None:
        return chunk
    row.seq.prompt_logprobs.extend(_entries(chunk, known, shown))
    return ChunkResult(
        chunk.slot,
        chunk.tokens[known:],
        chunk.finite,
        chunk.logprobs[known:],
        chunk.top_ids[known:],
        chunk.top_logprobs[known:],
    )


def not_finite(row: Row, chunk: ChunkResult) -> str:
    """What to say of a chunk whose logits hold NaN or Inf, at the first such position."""
    first = row.start + row.tokens - row.known - row.samples
    return f"the model gave NaN or Inf at position {first + len(chunk.tokens)}"


def _entries(chunk: ChunkResult, count: int, shown: int) -> tuple[TokenLogprobs, ...]:
    tops = zip(chunk.top_ids, chunk.top_logprobs) if chunk.top_ids else (((), ()) for _ in chunk.logprobs)
    return tuple(
        TokenLogprobs(logprob, ids[:shown], values[:shown])
        for logprob, (ids, values) in zip(chunk.logprobs[:count], tops)
    )


def output_of(
    seq: Sequence,
    epoch: int,
    tokens: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprobs, ...] = (),
    finish: FinishReason | None = None,
    error: str = "",
) -> Output:
    """The Output of a sequence whose last tokens are `tokens`."""
    first = seq.generated - len(tokens)
    return Output(
        request_id=seq.request.id,
        index=seq.index,
        epoch=epoch,
        first=first,
        tokens=tokens,
        logprobs=logprobs,
        prompt_logprobs=() if first else tuple(seq.prompt_logprobs),
        finish=finish,
        cached_tokens=seq.leader.cached_tokens,
        error=error,
    )


def hypothesis_output(leader: Sequence, index: int, epoch: int, found: Hypothesis, error: str = "") -> Output:
    """The one Output of hypothesis `index` of a beam search: all its tokens, always with their logprobs."""
    return Output(
        request_id=leader.request.id,
        index=index,
        epoch=epoch,
        first=0,
        tokens=found.tokens,
        logprobs=found.logprobs,
        prompt_logprobs=() if index else tuple(leader.prompt_logprobs),
        finish=found.finish,
        cached_tokens=leader.cached_tokens,
        error=error,
    )
