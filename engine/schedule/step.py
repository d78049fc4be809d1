"""`Step` and `StepResult`: all that passes between the scheduler and a runner, as plain ints and bytes.

A Step is a delta. The runner keeps per-slot state (tokens, block tables, sampling) and feeds its own last sampled
token: a Step never names a token that is not yet known, so it can be made before the previous one's result is in,
recorded, and replayed on another machine.
"""

from __future__ import annotations

import msgspec


class SlotSampling(msgspec.Struct, frozen=True, array_like=True):
    """The part of SamplingParams that the sampler needs, resolved for one sequence (`seed` is the sequence's own)."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logprobs: int  # -1: none; else how many most likely tokens to report besides the chosen one
    bias_ids: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()
    banned_until: int = 0  # tokens in `banned_ids` cannot be sampled before this many generated tokens (min_tokens)
    banned_ids: tuple[int, ...] = ()


class Admit(msgspec.Struct, frozen=True, array_like=True):
    """Give `slot` to a sequence. `tokens` (int32 little-endian) is all that is known of it: the prompt, and after a
    preemption the tokens generated so far; the first `prompt_len` are the prompt."""

    slot: int
    tokens: bytes
    prompt_len: int
    sampling: SlotSampling


class TableDelta(msgspec.Struct, frozen=True, array_like=True):
    """Append `blocks` to the slot's block table of `group`."""

    slot: int
    group: int
    blocks: tuple[int, ...]


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """Before anything is computed, copy the first `tokens` tokens of KV block `source` into block `target`."""

    group: int
    source: int
    target: int
    tokens: int


class Swap(msgspec.Struct, frozen=True, array_like=True):
    """Move the KV of one block of every group to `place` in tier 2 (`out`), or from there into these blocks."""

    place: int
    blocks: tuple[int, ...]
    out: bool


class Chunk(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Compute positions start .. start + count - 1 of `slot`. Prefill, decode and extend differ only in the numbers.

    Tokens from `logits_from` on (an offset into the chunk; `count` means none) get logits, and each such position
    samples the token that follows it. Without drafts that is at most the last position. `drafts` are proposed tokens
    for the chunk's last positions. After the first `known` of the positions with logits the next token is known: it
    stands whatever the logits, and its logprob is reported.
    """

    slot: int
    start: int
    count: int
    logits_from: int
    drafts: tuple[int, ...] = ()
    known: int = 0


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One forward pass. Applied in this order: drop, admit, tables, swaps (one after the other), copies, chunks."""

    index: int
    drop: tuple[int, ...] = ()
    admit: tuple[Admit, ...] = ()
    tables: tuple[TableDelta, ...] = ()
    copies: tuple[Copy, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    swaps: tuple[Swap, ...] = ()


class ChunkResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one chunk sampled: one token per position with logits (none for a chunk that ends inside a prompt).

    After a `known` position that is the known token. With drafts the tokens end with the first that is not the draft in
    its place: it is the target's own, and what was computed after it is void. logprobs[i] belongs to tokens[i] and is
    present if the slot's sampling asked for it; top_ids and top_logprobs hold `SlotSampling.logprobs` entries for each
    token, best first. `finite` is False when the logits row after the last token held NaN or Inf.
    """

    slot: int
    tokens: tuple[int, ...] = ()
    finite: bool = True
    logprobs: tuple[float, ...] = ()
    top_ids: tuple[tuple[int, ...], ...] = ()
    top_logprobs: tuple[tuple[float, ...], ...] = ()


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """`chunks` in the order of the Step's chunks.

    failed       places of tier 2 that could not be written, or whose content is not what was written there: the blocks
                 that were to get it hold anything
    swap_us      how long the swaps took, and compute_us everything else; both 0 without a tier 2
    """

    index: int
    chunks: tuple[ChunkResult, ...] = ()
    failed: tuple[int, ...] = ()
    swap_us: int = 0
    compute_us: int = 0
