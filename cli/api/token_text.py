"""Tokens as logprobs show them: exact bytes, and a text that is as good as a text can be."""

from __future__ import annotations

from ...engine.request import TokenLogprobs
from ...engine.tokenizer import Tokenizer
from .responses import TextLogprobs, TokenLogprob, TopLogprob

LOWEST = -9999.0  # JSON has no infinity


def chat_logprob(tokenizer: Tokenizer, token: int, entry: TokenLogprobs) -> TokenLogprob:
    """One entry of a chat's `logprobs.content`."""
    top = [_top(tokenizer, *pair) for pair in zip(entry.top_ids, entry.top_logprobs, strict=True)]
    own = _top(tokenizer, token, entry.logprob)
    return TokenLogprob(own.token, own.logprob, own.bytes, top)


class TextLogprobsWriter:
    """Makes a completion's parallel lists piece by piece; it keeps the offset at which the next token's text begins."""

    def __init__(self, tokenizer: Tokenizer, offset: int, with_top: bool) -> None:
        self._tokenizer, self._offset, self._with_top = tokenizer, offset, with_top

    def write(self, tokens: tuple[int, ...], entries: tuple[TokenLogprobs, ...]) -> TextLogprobs:
        """The lists for these tokens."""
        written = self._empty()
        for token, entry in zip(tokens, entries, strict=True):
            name = _name(self._tokenizer, token)
            written.tokens.append(name)
            written.token_logprobs.append(max(entry.logprob, LOWEST))
            written.text_offset.append(self._offset)
            self._offset += len(name)
            if written.top_logprobs is not None:
                pairs = zip(entry.top_ids, entry.top_logprobs, strict=True)
                top = {_name(self._tokenizer, index): max(logprob, LOWEST) for index, logprob in pairs}
                top.setdefault(name, max(entry.logprob, LOWEST))
                written.top_logprobs.append(top)
        return written

    def write_prompt(self, tokens: tuple[int, ...], entries: tuple[TokenLogprobs, ...]) -> TextLogprobs:
        """The lists for an echoed prompt, whose first token has no entry; what is written next comes after it."""
        after, self._offset = self._offset, 0
        first = self._empty()
        name = _name(self._tokenizer, tokens[0])
        first.tokens.append(name)
        first.token_logprobs.append(None)
        first.text_offset.append(0)
        if first.top_logprobs is not None:
            first.top_logprobs.append(None)
        self._offset += len(name)
        rest = self.write(tokens[1:], entries)
        self._offset = after
        return joined(first, rest)

    def _empty(self) -> TextLogprobs:
        return TextLogprobs([], [], [] if self._with_top else None, [])


def joined(first: TextLogprobs, second: TextLogprobs) -> TextLogprobs:
    """The lists of both, made by the same writer."""
    top = None if second.top_logprobs is None else [*(first.top_logprobs or ()), *second.top_logprobs]
    return TextLogprobs(
        [*first.tokens, *second.tokens],
        [*first.token_logprobs, *second.token_logprobs],
        top,
        [*first.text_offset, *second.text_offset],
    )


def _top(tokenizer: Tokenizer, token: int, logprob: float) -> TopLogprob:
    data = _bytes(tokenizer, token)
    text = "" if data is None else data.decode(errors="replace")
    return TopLogprob(text, max(logprob, LOWEST), None if data is None else list(data))


def _name(tokenizer: Tokenizer, token: int) -> str:
    """A token's text, or `bytes:\\xe2\\x82` for a part of a character: as keys of one object they must differ."""
    data = _bytes(tokenizer, token)
    if data is None:
        return f"token_id:{token}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _bytes(tokenizer: Tokenizer, token: int) -> bytes | None:
    """None for an id that the vocabulary does not have: a model's may be padded."""
    return tokenizer.known_bytes(token)
