"""From tokens to text, one token at a time, for the two ways in which vocabularies write bytes down.

The `decoder` of a tokenizer.json decodes whole lists. Here it is read into a style that can also stream, and both the
stream and `Tokenizer.decode` use it, so that they cannot differ. It gives the text of the tokenizers library, with one
exception: where byte tokens of a SentencePiece vocabulary are not valid UTF-8, the library replaces the whole run of
bytes, valid characters included, which nobody who streams can do. Here only the invalid bytes are replaced.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ..kernels.errors import UnsupportedModel

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Style(Protocol):
    """How tokens become bytes. `lead` is what is stripped once from the start of a text, character by character."""

    @property
    def lead(self) -> str: ...
    def token_bytes(self, token: str) -> bytes: ...


class TextStream:
    """Bytes of tokens in, text out: exactly the bytes of the tokens, cut at whole characters.

    Bytes that can still become a character are held back; bytes that cannot are replaced by U+FFFD at once.
    """

    __slots__ = ("_decoder", "_lead")

    def __init__(self, lead: str) -> None:
        self._lead = lead
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> str:
        """The text that a token with these bytes completes."""
        text = self._decoder.decode(data)
        return self._strip(text) if self._lead else text

    def finish(self) -> str:
        """What was held back: an unfinished character as U+FFFD."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        while self._lead and text:
            if text[0] != self._lead[0]:
                self._lead = ""
                break
            text, self._lead = text[1:], self._lead[1:]
        return text


@dataclass(frozen=True, slots=True)
class ByteLevel:
    """Every byte is one printable character (GPT-2). A token with any other character stands for its own UTF-8."""

    lead: str = ""

    def token_bytes(self, token: str) -> bytes:
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:
            return token.encode()


@dataclass(frozen=True, slots=True)
class SentencePiece:
    """Text with a few characters replaced (a low line for the space), and tokens <0x00> .. <0xFF> for single bytes."""

    replacements: tuple[tuple[str, str], ...]
    byte_fallback: bool
    lead: str

    def token_bytes(self, token: str) -> bytes:
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        match = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        return bytes([int(match.group(1), 16)]) if match else token.encode()


def decoder_style(decoder: object) -> Style:
    """The style of a tokenizer.json's `decoder`; UnsupportedModel for one that is neither of the two."""
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return ByteLevel()
    body = steps[:-1] if kinds[-1:] == ["Strip"] and "Fuse" in kinds else steps
    replacements = []
    for step in body:
        pattern, content = step.get("pattern"), step.get("content")
        if step.get("type") == "Replace" and isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
            replacements.append((pattern["String"], str(content)))
        elif step.get("type") not in ("ByteFallback", "Fuse"):
            break
    else:
        strip = steps[-1] if body is not steps else {}
        if "ByteFallback" in kinds and not strip.get("stop"):
            return SentencePiece(tuple(replacements), True, str(strip.get("content", "")) * _count(strip))
    named = ", ".join(map(str, kinds)) or "none"
    raise UnsupportedModel(
        f"the tokenizer's decoder ({named}) cannot be streamed", "supported: byte-level BPE, SentencePiece with bytes"
    )


def _steps(decoder: object) -> list[Mapping[str, object]]:
    if not isinstance(decoder, dict):
        return []
    if decoder.get("type") != "Sequence":
        return [decoder]
    inner = decoder.get("decoders")
    return [step for step in inner if isinstance(step, dict)] if isinstance(inner, list) else []


def _count(strip: Mapping[str, object]) -> int:
    start = strip.get("start", 0)
    return start if isinstance(start, int) else 0


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's characters for bytes: printable Latin-1 as itself, all other bytes in order from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
