"""Text to ints and back, around the core: used by LLM, chat and serve alike.

The core never sees a string. Encoding, the chat template, incremental decoding and stop strings are here; a match of a
stop string ends that sequence in the core, and usage counts up to the token that completed it.
"""

from __future__ import annotations

import itertools
import operator
import queue
import secrets
import uuid
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ..kernels.errors import CapacityError, UsageError
from .client import EngineClient
from .messages import EngineInfo, EngineStats
from .open_requests import OnOutput
from .request import MAX_LOGPROBS, FinishReason, Output, Request, SamplingParams, TokenLogprobs
from .schedule.sequence import mix_seed
from .tokenizer import IncrementalDecoder, StopMatcher, Tokenizer


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one sequence; `cached_tokens` of its prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of sequence `index`, and the tokens that made it. A sequence's last one has `finish` and `usage`."""

    index: int
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # with sequence 0's first delta, if they were asked for
    finish: FinishReason | None = None
    error: str = ""
    usage: Usage | None = None


class Frontend:
    """The text face of an engine. Thread-safe: every call of `stream` is independent."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, seed: int = 0) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self._seed, self._drawn = seed, itertools.count()

    def _draw_seed(self) -> int:
        """The seed of a request that names none: random, or the next of the engine's own series if it was given one."""
        return mix_seed(self._seed, next(self._drawn)) if self._seed else secrets.randbits(63)

    @property
    def info(self) -> EngineInfo:
        """The engine's facts."""
        return self.client.info

    @property
    def sampling_defaults(self) -> SamplingParams:
        """What the model's makers recommend, for a user who says nothing; the answer may fill the context."""
        recommended = msgspec.structs.asdict(self.tokenizer.chat.defaults)
        return merge_sampling(SamplingParams(max_tokens=None), recommended)

    def stats(self) -> EngineStats:
        """The engine's counters as they are now."""
        return self.client.stats()

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer. Raises UsageError if the template refuses."""
        return self.tokenizer.encode_chat(messages, most=self.info.max_model_len)

    def request(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        tenant: str = "",
        priority: int = 0,
        max_wait_s: float | None = None,
        salt: str = "",
    ) -> Request:
        """A fully resolved Request: prompt as ids, the seed drawn, max_tokens None made what the context leaves.

        Raises UsageError for parameters that cannot work and CapacityError for a prompt longer than the context.
        """
        limit, vocab = self.info.max_model_len, self.info.vocab_size
        sampling.check(vocab)
        ids = self.tokenizer.encode(prompt, most=limit) if isinstance(prompt, str) else _token_ids(prompt, limit)
        if not ids:
            raise UsageError("the prompt is empty", "give at least one token")
        room = _room(len(ids), limit)
        for token in ids:
            if not 0 <= token < vocab:
                raise UsageError(f"token id {token} is not in the vocabulary (0 to {vocab - 1})")
        for name, asked in (("max_tokens", sampling.max_tokens), ("min_tokens", sampling.min_tokens)):
            if asked is not None and asked > room:
                raise CapacityError(
                    f"{len(ids)} prompt tokens and {name} {asked} do not fit the context of {limit}",
                    f"set {name} to {room} or less",
                )
        stop_ids = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(self.tokenizer.eos_ids))
        if sampling.use_beam_search:
            _check_beams(sampling.beam_width, len(stop_ids), vocab)
        return Request(
            id=request_id or uuid.uuid4().hex,
            prompt=tuple(ids),
            sampling=sampling,
            seed=self._draw_seed() if sampling.seed is None else sampling.seed,
            stop_ids=tuple(sorted(stop_ids)),
            max_tokens=room if sampling.max_tokens is None else sampling.max_tokens,
            tenant=tenant,
            priority=priority,
            max_wait_s=max_wait_s,
            salt=salt,
        )

    def stream(
        self, prompt: str | Sequence[int], sampling: SamplingParams, *, request_id: str | None = None
    ) -> Generator[TextDelta, None, None]:
        """Text as it is generated, for all n sequences, until each has ended. Closing the iterator aborts them."""
        outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        return _deltas(self.open(self.request(prompt, sampling, request_id=request_id), outputs.put), outputs)

    def open(self, request: Request, on_output: OnOutput) -> Generation:
        """Submit a request of `request`; `on_output` carries what comes back to where `Generation.take` is called."""
        generation = Generation(self.client, request, self.tokenizer)
        self.client.submit(request, on_output)
        return generation

    def close(self) -> None:
        """Stop the engine."""
        self.client.close()


def _check_beams(width: int, stops: int, vocab: int) -> None:
    """UsageError if the sampler cannot name enough likely tokens for the beams to choose from."""
    limit = min(MAX_LOGPROBS, vocab) - stops
    if width > limit:
        raise UsageError(
            f"a beam search of width {width} with {stops} stop tokens needs {width + stops} logprobs for each token",
            f"use at most {limit} beams" if limit > 0 else "use fewer stop tokens",
        )


def _room(count: int, limit: int) -> int:
    """The tokens that a prompt of `count` leaves for the answer; CapacityError if there are none."""
    room = limit - count
    if room < 1:
        raise CapacityError(
            f"the prompt has {count} tokens, the context holds {limit} and one must be left for the answer",
            f"shorten the prompt by {1 - room} tokens, or raise --max-model-len if the model allows",
        )
    return room


def _token_ids(prompt: Sequence[int], limit: int) -> tuple[int, ...]:
    """The prompt as plain ints, numpy's taken too; nothing that only happens to be a number."""
    if isinstance(prompt, (bytes, bytearray, dict)):
        raise UsageError(f"the prompt is of type {type(prompt).__name__}", "give a text or token ids")
    try:
        _room(len(prompt), limit)  # before each of what may be millions is looked at
        ids = tuple(operator.index(token) for token in prompt)
    except TypeError as error:
        raise UsageError(f"the prompt is neither a text nor token ids: {error}", "give a text or token ids") from error
    if any(isinstance(token, bool) for token in prompt):
        raise UsageError("the prompt holds a bool among its token ids", "give a text or token ids")
    return ids


class Generation:
    """A submitted request on its way back to text, whoever carries its outputs: a queue, an event loop.

    Not thread-safe: `take` and `close` are for one thread.
    """

    def __init__(self, client: EngineClient, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self._client, self._assembler = client, TextAssembler(request, tokenizer)

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""
        return self._assembler.finished

    def take(self, output: Output) -> TextDelta | None:
        """The delta that this output makes, if any. A sequence that a stop string ends is ended in the core too."""
        delta = self._assembler.push(output)
        if delta is not None and delta.finish is not None and output.finish is None:
            self._client.abort(output.request_id, output.index)
        return delta

    def close(self) -> None:
        """Abort what has not ended."""
        if not self.finished:
            self._client.abort(self.request.id)


def _deltas(generation: Generation, outputs: queue.SimpleQueue[Output]) -> Generator[TextDelta, None, None]:
    try:
        while not generation.finished:
            if (delta := generation.take(outputs.get())) is not None:
                yield delta
    finally:
        generation.close()


@dataclass(slots=True)
class _SequenceText:
    decoder: IncrementalDecoder
    stops: StopMatcher
    completion_tokens: int = 0
    cached_tokens: int = 0
    finished: bool = False


class TextAssembler:
    """Turns the Outputs of one request into TextDeltas; pure, so that any transport can drive it."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        sampling = request.sampling
        self._request, self._stop_ids = request, frozenset(request.stop_ids)
        self._include_stop = sampling.include_stop_str_in_output
        self._sequences = [
            _SequenceText(IncrementalDecoder(tokenizer, sampling.skip_special_tokens), StopMatcher(sampling.stop))
            for _ in range(sampling.n)
        ]

    @property
    def finished(self) -> bool:
        """Whether every sequence has ended."""
        return all(sequence.finished for sequence in self._sequences)

    def push(self, output: Output) -> TextDelta | None:
        """The delta that this output makes; None for a sequence that a stop string has already ended."""
        sequence = self._sequences[output.index]
        if sequence.finished:
            return None
        sequence.cached_tokens = max(sequence.cached_tokens, output.cached_tokens)
        pieces: list[str] = []
        finish, taken, matched = output.finish, 0, False
        for token in output.tokens:
            taken += 1
            ends = finish is FinishReason.STOP and taken == len(output.tokens) and token in self._stop_ids
            if ends and not self._include_stop:
                break
            matched = self._push_text(sequence, sequence.decoder.push([token]), pieces)
            if matched:
                finish = FinishReason.STOP
                break
        sequence.completion_tokens += taken
        if finish is not None:
            sequence.finished = True
            if not matched and not self._push_text(sequence, sequence.decoder.finish(), pieces):
                self._add(pieces, *sequence.stops.finish())
        return TextDelta(
            output.index,
            "".join(pieces),
            output.tokens[:taken],
            output.logprobs[:taken],
            output.prompt_logprobs,
            finish,
            output.error,
            None if finish is None else self._usage(sequence),
        )

    def _push_text(self, sequence: _SequenceText, text: str, pieces: list[str]) -> bool:
        """Add what is safe to show of `text`; whether a stop string was completed."""
        return self._add(pieces, *sequence.stops.push(text))

    def _add(self, pieces: list[str], safe: str, stop: str | None) -> bool:
        pieces.append(safe)
        if stop is not None and self._include_stop:
            pieces.append(stop)
        return stop is not None

    def _usage(self, sequence: _SequenceText) -> Usage:
        return Usage(len(self._request.prompt), sequence.completion_tokens, sequence.cached_tokens)


def merge_sampling(defaults: SamplingParams, changes: Mapping[str, object]) -> SamplingParams:
    """`defaults` with the fields in `changes` replaced; None means: as in the defaults."""
    return msgspec.structs.replace(defaults, **{name: value for name, value in changes.items() if value is not None})
