"""Encoding that holds nobody up: long texts without Python's lock, and hopeless ones not to their end.

tokenizers encodes a text under the interpreter's lock but a batch without it, so a long text goes as a batch of one.
Its records take some hundred bytes per token: a text of a request's full size would take gigabytes only to be refused.
So a text that is long for its limit is counted first, piece by piece, until it is known that it cannot fit.
"""

from __future__ import annotations

import tokenizers

from ..kernels.errors import CapacityError, UsageError

SHORT = 4096  # characters that are encoded within a few milliseconds
LONG = 8  # characters per token: hardly any text has that many, so a longer one hardly fits
PIECE = 1 << 16  # characters
CUT = 256  # tokens that a piece may have more than its part of the whole has, since words and runs are cut at its ends


def encode(backend: tokenizers.Tokenizer, text: str, add_special: bool) -> tokenizers.Encoding:
    """The encoded text, without offsets if it is long. UsageError for a text that is not Unicode."""
    try:
        if len(text) <= SHORT:
            return backend.encode(text, add_special_tokens=add_special)
        return backend.encode_batch_fast([text], add_special_tokens=add_special)[0]
    except (UnicodeEncodeError, TypeError) as error:
        raise UsageError(
            "the text holds a lone surrogate, which is no character", "send text that can be written as UTF-8"
        ) from error


def refuse_hopeless(backend: tokenizers.Tokenizer, text: str, most: int) -> None:
    """Raise CapacityError if the text certainly has more than `most` tokens; costs next to nothing for usual texts."""
    if len(text) <= max(PIECE, LONG * most):
        return
    count = 0
    for start in range(0, len(text), PIECE):
        count += max(0, len(encode(backend, text[start : start + PIECE], add_special=False)) - CUT)
        if count > most:
            raise CapacityError(
                f"the text of {len(text)} characters has more than {count} tokens, and there is room for {most}",
                "shorten it, or raise --max-model-len if the model allows",
            )
