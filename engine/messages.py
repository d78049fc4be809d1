"""What passes between a client and an engine loop, in one process or over a socket."""

from __future__ import annotations

import msgspec

from .request import Output, Request
from .schedule.states import SequenceState


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The engine as a client needs to know it. `epoch` is new at every start of an engine."""

    model: str
    folder: str  # of the packed model: tokenizer and chat template are read from here
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    weight_format: str
    kv_format: str
    threads: int
    isa: str
    fingerprint: str
    num_blocks: int
    block_size: int
    epoch: int
    model_impl: str = "llmctl"  # or "transformers"
    same_bits: bool = True  # whether a request's bits are promised not to depend on company or on luck


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start of the engine; `last_step_age_s` is 0 when there is nothing to do."""

    waiting: int = 0
    running: int = 0
    preemptions: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    fragmentation: float = 0.0  # of the blocks not in use, those that cannot be had in runs of 16
    waste: float = 0.0  # of the positions in blocks in use, those that hold no token
    evictions: int = 0
    evicted_reused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafts: int = 0  # chunks with proposed tokens
    draft_tokens: int = 0
    accepted_tokens: int = 0
    recomputed_tokens: int = 0
    tier_blocks: int = 0  # places in tier 2, each for one KV block
    tier_blocks_used: int = 0
    tier_writes: int = 0
    tier_clean_drops: int = 0
    tier_hits: int = 0
    tier_failures: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    accepted_per_position: tuple[int, ...] = ()  # of these, by their place in a draft
    cache_audits: int = 0
    cache_audit_failures: int = 0
    steps: int = 0
    scheduler_s: float = 0.0  # in the scheduler and the prefix tree, of `step_s` in all
    draft_s: float = 0.0  # and in a draft model
    step_s: float = 0.0
    last_step_age_s: float = 0.0


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """Run a request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request, or one of its sequences."""

    request_id: str
    index: int | None = None


class GetStats(msgspec.Struct, frozen=True, tag="get_stats"):
    """Ask for a `Stats` with this ticket."""

    ticket: int


class GetStates(msgspec.Struct, frozen=True, tag="get_states"):
    """Ask for a `States` with this ticket."""

    ticket: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop the engine."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded."""

    info: EngineInfo


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Progress before `Ready`."""

    description: str
    done: int
    total: int


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """Before `Ready`: the model was found, and this is the folder with its tokenizer."""

    folder: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not start, or died: the error's class name, message and hint."""

    kind: str
    message: str
    hint: str


class Outputs(msgspec.Struct, frozen=True, tag="outputs"):
    """What one step produced."""

    outputs: tuple[Output, ...]


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """The answer to `GetStats`."""

    ticket: int
    stats: EngineStats


class States(msgspec.Struct, frozen=True, tag="states"):
    """The answer to `GetStates`: the sequences that ended last, then those that have not."""

    ticket: int
    states: tuple[SequenceState, ...]


Command = Submit | Abort | GetStats | GetStates | Shutdown
Event = Ready | Loading | Opened | Failed | Outputs | Stats | States
