"""Which tokens layers are calibrated on, and which others the result is measured on.

The two never overlap. Without calibration text the model writes its own: what it says by itself is what its layers
usually see. Evaluation then uses text that the model did not write.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...engine.tokenizer import Tokenizer
from ...kernels.errors import UsageError
from ...kernels.ops import I32Array
from ..bench.longtext import python_documentation
from .asked import EVAL_TOKENS, SAMPLES, SEQLEN, Asked
from .text import Documents, Unreachable, open_documents

log = logging.getLogger(__name__)

_READ_TOKENS = 1 << 18  # of a text at least, if it has so many, so that samples come from all over it

_STAND_IN = f"Python {platform.python_version()} documentation"

# (samples, tokens of each) -> int32 [samples, tokens]
WriteText = Callable[[int, int], I32Array]


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Token ids, and what text they are of.

    calibration   int32 [samples, tokens], None for methods that need none
    evaluation    windows of at least two tokens
    """

    calibration: I32Array | None
    calibration_text: str
    evaluation: tuple[I32Array, ...]
    evaluation_text: str


def choose_samples(asked: Asked, tokenizer: Tokenizer, context: int, write_text: WriteText) -> Samples:
    """The samples that the options ask for, cut out of whole texts.

    UsageError for text that is missing or too short. That samples fit the model's context was checked before.
    """
    seqlen = asked.calib_seqlen or min(SEQLEN, context)
    window = min(SEQLEN, context)
    wanted = asked.eval_tokens or EVAL_TOKENS
    # Read first: writing calibration text takes minutes, which a text that will not do should not cost.
    evaluation = _evaluation(asked, tokenizer, wanted) if asked.eval_text or not asked.calib_dataset else None
    calibration, name, rest = None, "", np.empty(0, np.int32)
    if asked.scheme.method != "rtn":
        calibration, name, rest = _calibration(asked, tokenizer, seqlen, wanted, write_text)
    if evaluation is None and len(rest) >= wanted:
        evaluation = rest, f"a part of {name} that was not used for calibration"
    tokens, eval_name = evaluation or _evaluation(asked, tokenizer, wanted)
    return Samples(calibration, name, _spread(tokens, wanted, window), eval_name)


def _evaluation(asked: Asked, tokenizer: Tokenizer, wanted: int) -> tuple[I32Array, str]:
    """Tokens of the text to measure on, which is not a part of the calibration text, and its name."""
    if not asked.eval_text:
        tokens, name = _read(Documents(_STAND_IN, iter(python_documentation())), tokenizer, wanted)
    else:
        try:
            tokens, name = _read(_opened(asked.eval_text, tokenizer), tokenizer, wanted)
        except Unreachable as error:
            raise UsageError(
                f"--eval-text `{asked.eval_text}` cannot be reached: {error}", "use a file, or leave --eval-text out"
            ) from error
    if len(tokens) < (asked.eval_tokens or 2):
        raise UsageError(
            f"`{asked.eval_text or name}` has {len(tokens)} tokens to measure on, {asked.eval_tokens or 2} are needed",
            "use a longer text, or a smaller --eval-tokens",
        )
    return tokens, name


def _calibration(
    asked: Asked, tokenizer: Tokenizer, seqlen: int, held_out: int, write_text: WriteText
) -> tuple[I32Array, str, I32Array]:
    """(samples, the text's name, tokens of it that were not used)."""
    samples, why = asked.calib_samples or SAMPLES, "no --calib-dataset was given"
    if asked.calib_dataset:
        try:
            documents = _opened(asked.calib_dataset, tokenizer)
        except Unreachable as error:
            why = f"`{asked.calib_dataset}` cannot be reached: {error}"
        else:
            tokens, name = _read(documents, tokenizer, samples * seqlen + held_out)
            rest = tokens[len(tokens) - held_out :] if len(tokens) >= samples * seqlen + held_out else tokens[:0]
            pool = tokens[: len(tokens) - len(rest)]
            found = len(pool) // seqlen
            least = asked.calib_samples or 1
            if found < least:
                raise UsageError(
                    f"the calibration text `{asked.calib_dataset}` has {len(pool)} tokens, enough for {found} samples "
                    f"of {seqlen}, but {least} are needed",
                    "use a longer text, fewer --calib-samples or a smaller --calib-seqlen",
                )
            if found < samples:
                log.warning("calibration text %s has %d samples of %d tokens, not %d", name, found, seqlen, samples)
            return _drawn(pool, min(samples, found), seqlen, asked.seed), name, rest
    log.warning("calibrating on text that the model writes itself: %s", why)
    return write_text(samples, seqlen), f"text sampled from the model itself ({why})", np.empty(0, np.int32)


def _opened(name: str, tokenizer: Tokenizer) -> Documents:
    return open_documents(name, lambda messages: tokenizer.apply_chat_template(messages, add_generation_prompt=False))


def _read(documents: Documents, tokenizer: Tokenizer, wanted: int) -> tuple[I32Array, str]:
    """At least `wanted` tokens of the text, more where they come cheap, fewer if it has no more; and its name."""
    tokens: list[int] = []
    for text in documents.texts:
        tokens += tokenizer.encode(text, add_special=False)
        if len(tokens) >= max(wanted, _READ_TOKENS):
            break
    return np.array(tokens, np.int32), documents.name


def _drawn(tokens: I32Array, samples: int, length: int, seed: int) -> I32Array:
    """`samples` of the consecutive pieces of `length` tokens, drawn without repetition, in their order."""
    pieces = len(tokens) // length
    chosen = np.sort(np.random.default_rng(seed).permutation(pieces)[:samples])
    return tokens[: pieces * length].reshape(pieces, length)[chosen]


def _spread(tokens: I32Array, wanted: int, window: int) -> tuple[I32Array, ...]:
    """Windows that together hold `wanted` tokens, or all there are, evenly spread over the text without overlap."""
    total = min(wanted, len(tokens))
    sizes = [window] * (total // window) + ([total % window] if total % window >= 2 else [])
    slack, gaps = len(tokens) - sum(sizes), max(1, len(sizes) - 1)
    starts = [window * i + slack * i // gaps for i in range(len(sizes))]
    return tuple(tokens[start : start + size] for start, size in zip(starts, sizes, strict=True))
