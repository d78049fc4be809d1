"""What a user asks (`SamplingParams`), what the core runs (`Request`) and what comes back (`Output`).

All three are msgspec records so that they cross a process boundary as they are. The core deals in ints only: text,
chat templates and stop strings belong to `frontend.py`.
"""

from __future__ import annotations

import enum
import math
import typing

import msgspec

from ..kernels.errors import UsageError

MAX_N = 128
MAX_LOGPROBS = 20


class FinishReason(enum.StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context was reached
    ABORT = "abort"  # the client left
    ERROR = "error"  # the model gave NaN or Inf for this sequence
    OVERDUE = "overdue"  # its turn did not come within the time that the request could wait


class ParameterError(UsageError):
    """A sampling parameter has a value that cannot work; `field` is its name."""

    def __init__(self, field: str, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.field = field

    def __reduce__(self) -> tuple[type[ParameterError], tuple[str, str, str]]:  # type: ignore[override]
        return type(self), (self.field, self.message, self.hint)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen, and when to stop. Field names and defaults are those of the OpenAI API and of vLLM.

    temperature 0 is greedy. top_k 0 (or -1), top_p 1 and min_p 0 switch that truncation off. `logprobs` asks for the
    log-probability of each chosen token and of that many most likely ones (0: only the chosen one). `seed` None draws
    one at admission. `stop` strings are not part of the returned text unless `include_stop_str_in_output`.

    `prompt_logprobs` asks for the same of the prompt's tokens, the first excepted. Logits are computed for every
    position then, so such a request does not use the prefix cache: a cached position has K and V, but no logits.

    With `use_beam_search` nothing is sampled: `best_of` beams (as many as `n` if it is None) are followed, and the n
    best hypotheses come back, best first, by sum of logprobs / tokens ** length_penalty. `early_stopping` is
    transformers': True stops at `best_of` finished hypotheses, False where none is likely to get better, "never" where
    none can.
    """

    n: int = 1
    best_of: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        """Take what OpenAI's and vLLM's users write: one stop string, a list, None for nothing."""
        stop: object = self.stop
        force = msgspec.structs.force_setattr
        if not isinstance(stop, tuple):
            force(self, "stop", () if stop is None else (stop,) if isinstance(stop, str) else tuple(self.stop))
        if not isinstance(self.stop_token_ids, tuple):
            force(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.logit_bias is None:
            force(self, "logit_bias", {})

    @property
    def beam_width(self) -> int:
        """Beams that are followed, 0 without beam search."""
        return (self.best_of or self.n) if self.use_beam_search else 0

    def check(self, vocab_size: int) -> None:
        """Raise ParameterError for the first field whose value cannot work, naming the value and the limit."""
        for name, kind in _KINDS.items():
            try:
                msgspec.convert(getattr(self, name), kind, strict=True)
            except msgspec.ValidationError as error:
                raise ParameterError(name, f"`{name}` is {getattr(self, name)!r}: {error}".lower()) from error
        for name in _RANGES:
            check_range(name, getattr(self, name))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(
                "min_tokens",
                f"`min_tokens` is {self.min_tokens}, more than `max_tokens`, which is {self.max_tokens}",
                f"set `max_tokens` to {self.min_tokens} or more, or `min_tokens` to {self.max_tokens} or less",
            )
        if self.top_p == 0:
            raise ParameterError(
                "top_p", "`top_p` is 0, it must be above 0 and at most 1", "use temperature 0 for greedy decoding"
            )
        if self.repetition_penalty == 0:
            raise ParameterError(
                "repetition_penalty", "`repetition_penalty` is 0, it must be above 0", "1 switches it off"
            )
        if self.best_of is not None and (self.best_of < self.n or (self.best_of > self.n and not self.use_beam_search)):
            raise ParameterError(
                "best_of",
                f"`best_of` is {self.best_of} with `n` {self.n}",
                "it is the width of a beam search, at least n: set `use_beam_search`, or leave it out",
            )
        if self.use_beam_search:
            self._check_beams()
        if any(not text for text in self.stop):
            raise ParameterError("stop", "`stop` holds an empty string, which would match everywhere", "remove it")
        for name, tokens in (("stop_token_ids", self.stop_token_ids), ("logit_bias", tuple(self.logit_bias))):
            for token in tokens:
                if not 0 <= token < vocab_size:
                    limits = f"not in the vocabulary (0 to {vocab_size - 1})"
                    raise ParameterError(name, f"token id {token} in `{name}` is {limits}")
        for token, bias in self.logit_bias.items():
            if not -100 <= bias <= 100:
                raise ParameterError(
                    "logit_bias", f"`logit_bias` of token {token} is {bias}, it must be from -100 to 100"
                )

    def _check_beams(self) -> None:
        if self.early_stopping not in (True, False, "never"):
            raise ParameterError(
                "early_stopping", f"`early_stopping` is {self.early_stopping!r}", 'use true, false or "never"'
            )
        if self.temperature not in (0.0, 1.0):
            raise ParameterError(
                "temperature",
                f"`temperature` is {self.temperature} with beam search, which follows the model's own probabilities",
                "leave it out",
            )
        for name in ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            if (value := getattr(self, name)) not in (_NEUTRAL[name], -1 if name == "top_k" else _NEUTRAL[name]):
                raise ParameterError(name, f"`{name}` is {value}, beam search does not sample", "leave it out")
        if self.logit_bias:
            raise ParameterError("logit_bias", "`logit_bias` is not supported with beam search", "leave it out")
        if self.stop:
            raise ParameterError(
                "stop", "`stop` strings are not supported with beam search", "stop at tokens: `stop_token_ids`"
            )
        if self.max_tokens == 0:
            raise ParameterError("max_tokens", "`max_tokens` is 0, beam search needs at least 1")


_NEUTRAL = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_KINDS = typing.get_type_hints(SamplingParams)
_RANGES: dict[str, tuple[float, float]] = {
    "n": (1, MAX_N),
    "best_of": (1, MAX_N),
    "length_penalty": (-100.0, 100.0),
    "max_tokens": (0, 1 << 30),
    "min_tokens": (0, 1 << 30),
    "temperature": (0.0, 100.0),
    "top_k": (-1, 1 << 30),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "seed": (-(1 << 63), (1 << 64) - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}


def check_range(name: str, value: float | None) -> None:
    """Raise ParameterError if the field of SamplingParams of this name cannot have the value, whatever others have."""
    low, high = _RANGES[name]
    if value is None:
        return
    if not low <= value <= high or (isinstance(value, float) and not math.isfinite(value)):
        raise ParameterError(name, f"`{name}` is {value}, it must be from {low} to {high}")


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt for the core, fully resolved: nothing in it depends on when or where it runs.

    prompt      token ids, at least one
    seed        sequence i of `sampling.n` samples with `mix_seed(seed, i)`, see `schedule/sequence.py`
    stop_ids    every token id that ends a sequence (EOS unless ignore_eos, and stop_token_ids)
    max_tokens  tokens to generate at most; fits the context
    tenant      whose share this is in the fair queue
    max_wait_s  it is ended if its turn has not come then; None: it waits
    salt        requests with different salts never share a prefix
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    max_tokens: int
    tenant: str = ""
    priority: int = 0
    max_wait_s: float | None = None
    salt: str = ""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position: of the chosen token, and of the most likely ones, best first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Output(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New tokens of one sequence. A client drops what it already has by (epoch, first).

    epoch    which start of the engine produced it
    index    which of the request's n sequences
    first    index of tokens[0] among the sequence's generated tokens
    prompt_logprobs  of the prompt's tokens after the first, if they were asked for; with sequence 0's first output
    """

    request_id: str
    index: int
    epoch: int
    first: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    cached_tokens: int = 0  # prompt tokens served by the prefix cache
    error: str = ""
